"""Routed experts in plain torch: rows sorted by expert, products group by group.

Either one `grouped_mm` takes all groups, which needs no word from the device, or a loop takes one at a time. On a CPU
the loop is the faster one (a group's rows stay in the cache), and it takes every dtype, size and stride.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..ops import apply, upcast
from . import reference
from .thin import matmul

Product = Callable[[Tensor, Tensor], Tensor]
FEW = 64  # rows of all experts, as when texts get one token more: then small operations cost more than their arithmetic


def widened(a: Tensor, b: Tensor) -> Tensor:
    return matmul(upcast(a), upcast(b)).type_as(a)


def product_for(x: Tensor) -> Product:
    """Half precisions are multiplied in fp32 on a CPU: oneDNN takes milliseconds to prepare a product of a new size, if
    it has instructions for them at all, and groups are ever of new sizes."""
    return widened if x.device.type == "cpu" and x.dtype.itemsize < torch.float32.itemsize else matmul


def ahead(rows: Tensor, share: Tensor, first: Tensor, second: Tensor, times: Product) -> tuple[Tensor, Tensor]:
    """The experts on their rows, and what the backward pass cannot do without.

    The shares are applied before the second product: rows are short there, and the gradient needs nothing more.
    """
    hidden = times(rows, first.mT)
    acts = (reference.swiglu(hidden) * share[:, None]).type_as(rows)
    return times(acts, second.mT), hidden


def back(
    grad: Tensor, rows: Tensor, share: Tensor, hidden: Tensor, first: Tensor, second: Tensor, times: Product
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `ahead` at rows, share, first and second."""
    gate, up = hidden.chunk(2, -1)
    silu = F.silu(gate)
    acts = silu * up
    slope = times(grad, second)
    second_grad = times(grad.mT, (acts * share[:, None]).type_as(rows))
    share_grad = (upcast(slope) * acts).sum(-1).type_as(share)
    slope = (slope * share[:, None]).type_as(rows)
    slope = torch.cat((torch.ops.aten.silu_backward(slope * up, gate), slope * silu), -1)
    return times(slope, first), share_grad, times(slope.mT, rows), second_grad


def groups(sizes: Sequence[int], *parts: Tensor) -> Iterator[tuple[Any, ...]]:
    """(expert, its rows of each part), in the order of the experts that have any."""
    low = 0
    for e, size in enumerate(sizes):
        if size:
            yield e, *(part[low : low + size] for part in parts)
            low += size


def by_group(times: Product, sizes: Sequence[int], a: Tensor, b: Tensor) -> Tensor:
    """Each expert's rows of a, in memory of their own, since bits depend on where it starts, by its matrix of b."""
    return torch.cat([times(rows.clone(), b[e]) for e, rows in groups(sizes, a)])


# Operators of torch's, since a loop over counts can be neither compiled, nor run on meta tensors, nor under vmap.
# Not `custom_op`, which torch.func cannot call inside of a backward pass.
INPUTS = "Tensor x, Tensor share, Tensor first, Tensor second, Tensor source, Tensor counts"
torch.library.define("glm5fn::experts", f"({INPUTS}) -> (Tensor, Tensor)")
torch.library.define(
    "glm5fn::experts_back", f"(Tensor grad, {INPUTS}, Tensor hidden) -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl("glm5fn::experts", "CompositeExplicitAutograd")
def loop_ahead(
    x: Tensor, share: Tensor, first: Tensor, second: Tensor, source: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    times = product_for(x)
    total, sizes = torch.zeros_like(upcast(x)), counts.tolist()
    if 0 < len(source) <= FEW:
        y, hidden = ahead(x.index_select(0, source), share, first, second, partial(by_group, times, sizes))
        return total.index_add_(0, source, upcast(y)).type_as(x), hidden
    hidden = x.new_empty(len(source), first.shape[1])
    for e, index, scale, kept in groups(sizes, source, share, hidden):
        y, now = ahead(x.index_select(0, index), scale, first[e], second[e], times)
        kept.copy_(now)
        total.index_add_(0, index, upcast(y))  # a token is in a group once, so sums have one order
    return total.type_as(x), hidden


@torch.library.impl("glm5fn::experts_back", "CompositeExplicitAutograd")
def loop_back(
    grad: Tensor,
    x: Tensor,
    share: Tensor,
    first: Tensor,
    second: Tensor,
    source: Tensor,
    counts: Tensor,
    hidden: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    times = product_for(x)
    total, share_grad = torch.zeros_like(upcast(x)), torch.empty_like(share)
    first_grad, second_grad = torch.empty_like(first), torch.empty_like(second)
    sizes = counts.tolist()
    for e in (e for e, size in enumerate(sizes) if not size):
        first_grad[e], second_grad[e] = 0, 0
    for e, index, scale, kept, slope in groups(sizes, source, share, hidden, share_grad):
        rows, slopes = x.index_select(0, index), grad.index_select(0, index)
        row_grad, now, first_grad[e], second_grad[e] = back(slopes, rows, scale, kept, first[e], second[e], times)
        slope.copy_(now)
        total.index_add_(0, index, upcast(row_grad))
    return total.type_as(x), share_grad, first_grad, second_grad


@torch.library.register_fake("glm5fn::experts")
def _(x: Tensor, share: Tensor, first: Tensor, second: Tensor, source: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x), x.new_empty(source.shape[0], first.shape[1])


@torch.library.register_fake("glm5fn::experts_back")
def _(grad: Tensor, x: Tensor, share: Tensor, first: Tensor, second: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(share), torch.empty_like(first), torch.empty_like(second)


class Loop(torch.autograd.Function):
    """Keeps what the first product gave; gathers and activates again in the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        share: Tensor,
        first: Tensor,
        second: Tensor,
        source: Tensor,
        order: Tensor,
        counts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.glm5fn.experts(x, share, first, second, source, counts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, share, first, second, source, _, counts, hidden = ctx.saved_tensors
        grads = torch.ops.glm5fn.experts_back(grad, x, share, first, second, source, counts, hidden)
        return *grads, None, None, None


class Grouped(Loop):
    """The same by `grouped_mm`, which takes bf16 of sizes that are multiples of 16 bytes, and on a CPU fp32 too."""

    @staticmethod
    def forward(
        x: Tensor,
        share: Tensor,
        first: Tensor,
        second: Tensor,
        source: Tensor,
        order: Tensor,
        counts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        times = partial(F.grouped_mm, offs=counts.cumsum(0, dtype=torch.int32))
        y, hidden = ahead(x.index_select(0, source), share, first, second, times)
        return home(y, order, len(x)), hidden

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, share, first, second, source, order, counts, hidden = ctx.saved_tensors
        times = partial(F.grouped_mm, offs=counts.cumsum(0, dtype=torch.int32))
        rows, slopes = x.index_select(0, source), grad.index_select(0, source)
        row_grad, *grads = back(slopes, rows, share, hidden, first, second, times)
        return home(row_grad, order, len(x)), *grads, None, None, None


def home(rows: Float[Tensor, "m d"], order: Int[Tensor, "m"], tokens: int) -> Float[Tensor, "n d"]:
    """Add up each token's rows, in at least fp32 and always in the same order."""
    if not tokens:
        return rows
    place = torch.zeros_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    first, *others = place.view(tokens, -1).unbind(1)
    total = upcast(rows.index_select(0, first))
    for index in others:
        total.add_(rows.index_select(0, index))
    return total.type_as(rows)


def sort_experts(
    function: Callable[..., tuple[Tensor, Tensor]],
    x: Float[Tensor, "n d"],
    chosen: Int[Tensor, "n a"],
    weights: Float[Tensor, "n a"],
    gate_up: Float[Tensor, "e 2 f d"],
    down: Float[Tensor, "e d f"],
) -> Float[Tensor, "n d"]:
    """Apply Loop or Grouped to the rows in the order of their experts."""
    slots = chosen.flatten()  # slot n * a + i is the i-th choice of token n
    counts = slots.new_zeros(len(gate_up)).scatter_add(0, slots, torch.ones_like(slots))
    order = slots.argsort(stable=True)
    source = order // chosen.shape[1]
    share = weights.flatten().index_select(0, order)
    return function(x, share, gate_up.flatten(1, 2), down, source, order, counts)[0]


def experts(
    x: Float[Tensor, "n d"],
    chosen: Int[Tensor, "n a"],
    weights: Float[Tensor, "n a"],
    gate_up: Float[Tensor, "e 2 f d"],
    down: Float[Tensor, "e d f"],
) -> Float[Tensor, "n d"]:
    """As `reference.experts`."""
    aligned = x.shape[1] % 8 == 0 and down.shape[2] % 8 == 0
    grouped = aligned and x.dtype == torch.bfloat16 and x.device.type == "cuda"
    return sort_experts(partial(apply, Grouped if grouped else Loop), x, chosen, weights, gate_up, down)
