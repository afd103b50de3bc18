"""The exchanges of model code on a rank grid, with their gradients."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .comm import Comm, Span, Tree, local
from .fetch import Started, finish, start
from .mesh import Grid
from .ops import upcast


def comm_for(grid: Grid | None, dtype: torch.dtype, grad_dtype: torch.dtype) -> Comm:
    """The exchanges on this grid. Blocks compute in dtype; gradients of parameters are reduced in grad_dtype."""
    if grid is None:
        return local(dtype)

    def begin(params: Tree, specs: Tree) -> Started:
        return start(params, specs, grid, dtype, grad_dtype)

    def fetch(params: Tree, specs: Tree, started: Started | None = None) -> Tree:
        return finish(begin(params, specs) if started is None else started, params, specs, grid)

    def total(value: Tensor) -> Tensor:
        value = value.detach().clone()
        dist.all_reduce(value)
        return value

    ranks = grid.rows.size()
    order = chunk_order(ranks, grid.balanced)
    return Comm(
        begin=begin,
        fetch=fetch,
        sum=total,
        split=ranks,
        parts=len(order) * len(order[0]),
        mine=lambda values: own_part(values, order, grid.rows),
        gather=lambda *parts: gather_tokens(parts, order, grid.rows),
        spans=lambda steps: spans_of(steps, order, grid.rows),
        experts=lambda kernel, *inputs: exchange_experts(kernel, *inputs, mesh=grid.expert["ep"]),
        first=grid.rows.get_local_rank() == 0,
    )


# --- the tokens of a row, cut over the ranks that share it ---

Order = Sequence[tuple[int, ...]]  # for each rank, which of the equal chunks of a row it has


def chunk_order(ranks: int, balanced: bool) -> Order:
    """Which chunks of a row each rank has: balanced, one from either end, since a later token meets more keys.

    >>> chunk_order(2, balanced=True), chunk_order(2, balanced=False)
    ([(0, 3), (1, 2)], [(0,), (1,)])
    """
    return [(rank, 2 * ranks - 1 - rank) if balanced and ranks > 1 else (rank,) for rank in range(ranks)]


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


def move(x: Tensor, mesh: DeviceMesh, source: Shard, target: Replicate, grad: Partial) -> Tensor:
    """A local tensor, given as `source` says, wanted as `target` says; its gradient comes as `grad` says."""
    placed = DTensor.from_local(x.contiguous(), mesh, [source], run_check=False)
    return placed.redistribute(placements=[target]).to_local(grad_placements=[grad])


# --- tokens to their experts and back ---


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

    shares_of: (how many rows go to each rank and how many come from it [2, r], how many go in all) -> two lists.
    """
    ranks, held = mesh.size(), len(gate_up)
    if ranks == 1:
        return kernel(x, chosen, weights, gate_up, down)
    slots = chosen.flatten()  # slot n * a + i is the i-th choice of token n
    order = slots.argsort(stable=True)  # by expert, and so by rank
    source = order // chosen.shape[1]
    sent = slots.new_zeros(ranks * held).scatter_add(0, slots, torch.ones_like(slots))
    received = functional.all_to_all_single(sent, [held] * ranks, [held] * ranks, mesh)
    received = functional.wait_tensor(received)
    give, take = shares_of(torch.stack((sent, received)).view(2, ranks, held).sum(-1), len(slots))
    rows = functional.all_to_all_single_autograd(x.index_select(0, source), take, give, mesh)
    shares = weights.flatten().index_select(0, order)[:, None]
    shares = functional.all_to_all_single_autograd(shares, take, give, mesh)
    experts = torch.arange(held, device=x.device).repeat(ranks).repeat_interleave(received, output_size=sum(take))
    done = kernel(rows, experts[:, None], shares, gate_up, down)
    back = functional.all_to_all_single_autograd(done, give, take, mesh)
    return torch.zeros_like(upcast(x)).index_add(0, source, upcast(back)).type_as(x)
