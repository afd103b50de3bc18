"""The exchanges of model code on a rank grid, with their gradients."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .comm import Comm, Span, Tree, Vocab, local
from .fetch import Started, finish, start
from .mesh import Grid, axis_of
from .ops import upcast
from .settings import MeshConfig


def comm_for(grid: Grid | None, dtype: torch.dtype, grad_dtype: torch.dtype) -> Comm:
    """The exchanges on this grid. Blocks compute in dtype; gradients of parameters are reduced in grad_dtype."""
    if grid is None:
        return local(dtype)

    wide = grad_dtype != torch.promote_types(dtype, torch.float32) and axis_of(grid.expert, "ep") is not None

    def begin(params: Tree, specs: Tree) -> Started:
        return start(params, specs, grid, dtype, grad_dtype if wide else dtype, grad_dtype)

    def fetch(params: Tree, specs: Tree, started: Started | None = None) -> Tree:
        return finish(begin(params, specs) if started is None else started, specs, grid)

    def total(value: Tensor) -> Tensor:
        value = value.detach().clone()
        dist.all_reduce(value)
        return value

    rows, tp = grid.rows, grid.heads
    order = chunk_order(rows.size(), grid.balanced)
    alone = Comm(
        begin=begin,
        fetch=fetch,
        sum=total,
        tp=tp.size(),
        first=rows.get_local_rank() == tp.get_local_rank() == 0,
        experts=experts_on(grid, cut=False),
        leave=lambda y: move(y, tp, Partial(), Replicate(), Replicate()),
        embed=lambda table, tokens: alone.leave(look_up(table, tokens, tp)),
        token_loss=lambda kernel, *inputs: loss_share(kernel, *inputs, mesh=tp),
        logits=lambda logits: move(logits, tp, Shard(logits.dim() - 1), Replicate(), Partial()),
    )
    cut = replace(
        alone,
        uncut=alone,
        split=rows.size(),
        parts=parts_of(order, tp.size()),
        mine=lambda values: own_part(values, order, rows),
        gather=lambda *parts: gather_tokens(parts, order, rows),
        spans=lambda steps: spans_of(steps, order, rows),
        experts=experts_on(grid),
        own=lambda values: values.chunk(tp.size(), 1)[tp.get_local_rank()],
        enter=lambda x: move(x, tp, Shard(1), Replicate(), Partial()),
        leave=lambda y: move(y, tp, Partial(), Shard(1), Shard(1)),
        own_spans=lambda steps: spans_within(spans_of(steps, order, rows), steps, tp.size(), tp.get_local_rank()),
        embed=lambda table, tokens: cut.leave(look_up(table, tokens, tp)),
        all_heads=lambda queries: heads_for_tokens(queries, tp),
    )
    return cut


def move(x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement, grad: Placement) -> Tensor:
    """A local tensor, given as `source` says, wanted as `target` says; its gradient comes as `grad` says."""
    if mesh.size() == 1:
        return x
    placed = DTensor.from_local(x.contiguous(), mesh, [source], run_check=False)
    return placed.redistribute(placements=[target]).to_local(grad_placements=[grad])


# --- the tokens of a row, cut over the ranks that share it ---

Order = Sequence[tuple[int, ...]]  # for each rank, which of the equal chunks of a row it has


def chunk_order(ranks: int, balanced: bool) -> Order:
    """Which chunks of a row each rank has: balanced, one from either end, since a later token meets more keys.

    >>> chunk_order(2, balanced=True), chunk_order(2, balanced=False)
    ([(0, 3), (1, 2)], [(0,), (1,)])
    """
    return [(rank, 2 * ranks - 1 - rank) if balanced and ranks > 1 else (rank,) for rank in range(ranks)]


def parts_of(order: Order, tp: int) -> int:
    """Into how many equal parts a row must be cut, so that each rank has chunks of one size, and tp a part of them."""
    return len(order) * math.lcm(len(order[0]), tp)


def pieces_of(mesh: MeshConfig) -> int:
    """Into how many equal parts the ranks of a mesh cut a row."""
    return parts_of(chunk_order(mesh.cp, mesh.cp_split == "balanced"), mesh.tp)


def own_part(values: Tensor, order: Order, mesh: DeviceMesh) -> Tensor:
    if len(order) == 1:
        return values
    chunks = values.chunk(len(order) * len(order[0]), 1)
    return torch.cat([chunks[number] for number in order[mesh.get_local_rank()]], 1)


def spans_of(steps: int, order: Order, mesh: DeviceMesh) -> tuple[Span, ...]:
    own = order[mesh.get_local_rank()]
    size = steps // len(own)
    return tuple(Span(i * size, (i + 1) * size, (number + 1) * size) for i, number in enumerate(own))


def gather_tokens(parts: Sequence[Tensor], order: Order, mesh: DeviceMesh) -> tuple[Tensor, ...]:
    if len(order) == 1:
        return tuple(parts)
    whole = move(torch.cat(tuple(parts), -1), mesh, Shard(1), Replicate(), Partial())
    numbers = [number for own in order for number in own]
    chunks = dict(zip(numbers, whole.chunk(len(numbers), 1), strict=True))
    return torch.cat([chunks[number] for number in sorted(numbers)], 1).split([part.shape[-1] for part in parts], -1)


# --- the heads and token ids of a block, cut over the ranks that compute the same tokens ---


def spans_within(spans: Sequence[Span], steps: int, ranks: int, rank: int) -> tuple[Span, ...]:
    """Where a rank's part stands of so many tokens that stand so.

    >>> spans_within([Span(0, 6, 6), Span(6, 12, 24)], 12, ranks=3, rank=1)
    (Span(low=0, high=2, end=6), Span(low=2, high=4, end=20))
    """
    size = steps // ranks
    start = rank * size
    met = [(max(span.low, start), min(span.high, start + size), span) for span in spans]
    return tuple(Span(low - start, high - start, span.end + high - span.high) for low, high, span in met if low < high)


def heads_for_tokens(queries: Float[Tensor, "b s h e"], mesh: DeviceMesh) -> Float[Tensor, "b r h e"]:
    """Some heads of all tokens -> all heads of this rank's part of them."""
    if mesh.size() == 1:
        return queries
    sent = rearrange(queries, "b (n r) h e -> n b r h e", n=mesh.size()).contiguous()
    sizes = [1] * mesh.size()
    received = functional.wait_tensor(functional.all_to_all_single(sent, sizes, sizes, mesh))
    return rearrange(received, "n b r h e -> b r (n h) e")


def look_up(table: Float[Tensor, "v d"], tokens: Int[Tensor, "b s"], mesh: DeviceMesh) -> Float[Tensor, "b s d"]:
    """The embeddings that are among this rank's rows of the table, and zeros."""
    if mesh.size() == 1:
        return F.embedding(tokens, table)
    rows = tokens - mesh.get_local_rank() * len(table)
    missing = (rows < 0) | (rows >= len(table))
    return F.embedding(rows.masked_fill(missing, 0), table).masked_fill(missing[..., None], 0.0)


def loss_share(kernel: Callable[..., Tensor], *inputs: Tensor, mesh: DeviceMesh) -> Float[Tensor, ""]:
    """The kernel's loss of x, head and targets, of which each rank has some rows of the head: its share."""
    if mesh.size() == 1:
        return kernel(*inputs)

    def over_ranks(values: Tensor, operation: Any) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, operation, group=mesh.get_group())
        return values

    highest, total = (partial(over_ranks, operation=kind) for kind in (dist.ReduceOp.MAX, dist.ReduceOp.SUM))
    vocab = Vocab(mesh.get_local_rank() * len(inputs[1]), highest, total)
    return Share.apply(kernel(*inputs, vocab), mesh.size())


class Share(torch.autograd.Function):
    """A rank's share of what so many have alike. The sum over ranks of all that is made of it has its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        return value / ranks

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# --- tokens to their experts and back ---


def experts_on(grid: Grid, cut: bool = True, **how: Any) -> Callable[..., Tensor]:
    """`exchange_experts` on a grid, on which all ranks of tp may have a part of each expert. cut: and of the tokens."""
    ep, tp, here = axis_of(grid.expert, "ep"), axis_of(grid.expert, "tp"), Shard(0) if cut else Replicate()

    def exchange(kernel: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return kernel(*inputs) if ep is None else exchange_experts(kernel, *inputs, mesh=ep, **how)

    if tp is None:
        return exchange

    def experts(kernel: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        *tokens, gate_up, down = inputs
        tokens = [move(part, tp, here, Replicate(), Partial()) for part in tokens]
        return move(exchange(kernel, *tokens, gate_up, down), tp, Partial(), here, here)

    return experts


def exchange_experts(
    kernel: Callable[..., Tensor],
    x: Float[Tensor, "n d"],
    chosen: Int[Tensor, "n a"],
    weights: Float[Tensor, "n a"],
    gate_up: Float[Tensor, "e 2 f d"],
    down: Float[Tensor, "e d f"],
    *,
    mesh: DeviceMesh,
    shares_of: Callable[[Tensor, int], Sequence[list[int]]] = lambda counts, rows: counts.tolist(),
) -> Float[Tensor, "n d"]:
    """Send each token, and its share, to the ranks of its experts, and add up at home what comes back.

    Each row is computed as one process would, in the same order of operations, and added in the order of experts.

    Experts of a wider dtype than x: the rows of each rank are computed on their own, in that of x, so that they have
    the bits that they have at home; the gradients of the ranks are summed up in the wider one.
    shares_of: (how many rows go to each rank and how many come from it [2, r], how many go in all) -> two lists.
    """
    ranks, held = mesh.size(), len(gate_up)
    slots = chosen.flatten()  # slot n * a + i is the i-th choice of token n
    order = slots.argsort(stable=True)  # by expert, and so by rank
    source = order // chosen.shape[1]
    sent = slots.new_zeros(ranks * held).scatter_add(0, slots, torch.ones_like(slots))
    received = functional.all_to_all_single(sent, [held] * ranks, [held] * ranks, mesh)
    received = functional.wait_tensor(received)
    give, take = shares_of(torch.stack((sent, received)).view(2, ranks, held).sum(-1), len(slots))
    rows = upcast(x).index_select(0, source).type_as(x)  # whose gradients are summed up in at least fp32
    rows = functional.all_to_all_single_autograd(rows, take, give, mesh)
    shares = weights.flatten().index_select(0, order)[:, None]
    shares = functional.all_to_all_single_autograd(shares, take, give, mesh)
    experts = torch.arange(held, device=x.device).repeat(ranks).repeat_interleave(received, output_size=sum(take))
    inputs = rows, experts[:, None], shares
    if gate_up.dtype != x.dtype:
        each = zip(*(part.split(take) for part in inputs), strict=True)
        done = torch.cat([kernel(*part, gate_up.type_as(x), down.type_as(x)) for part in each])
    else:
        done = kernel(*inputs, gate_up, down)
    back = functional.all_to_all_single_autograd(done, give, take, mesh)
    return torch.zeros_like(upcast(x)).index_add(0, source, upcast(back)).type_as(x)
