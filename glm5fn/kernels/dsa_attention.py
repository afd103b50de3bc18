"""Attention over selected latents, a chunk of queries at a time; the backward pass gathers and weighs them again."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..ops import apply, upcast
from .dsa_select import FEW, held

# While there are at most so many times the selected keys, a chunk of queries meets all of them in one product; then
# each query meets its own, which are gathered. A large product costs less than many small ones of fewer FLOPs.
WHOLE = 4


class Chunk(NamedTuple):
    """Queries of one row, and the keys that they meet: those at `index`, for each its own, or the first ones, for all.

    empty: the keys that a query meets but did not select.
    """

    row: int
    queries: slice
    index: Int[Tensor, "n*g"] | None
    empty: Bool[Tensor, "n g"]

    def of(self, x: Float[Tensor, "b s *x"]) -> Float[Tensor, "n *x"]:
        """Its queries' part of a tensor, in at least fp32."""
        return upcast(x[self.row, self.queries])

    def met(self, keys: Float[Tensor, "b t e"]) -> Float[Tensor, "n g e"] | Float[Tensor, "g e"]:
        """The keys that it meets, in at least fp32."""
        if self.index is None:
            return upcast(keys[self.row, : self.empty.shape[1]])
        return upcast(keys[self.row].index_select(0, self.index)).view(*self.empty.shape, -1)

    def add(self, total: Float[Tensor, "b t e"], left: Float[Tensor, "n h g"], right: Float[Tensor, "n h e"]) -> None:
        """Add to each key what it gets of its queries: its weights in `left` by `right`."""
        if self.index is None:
            total[self.row, : self.empty.shape[1]].addmm_(left.flatten(0, 1).mT, right.flatten(0, 1))
        else:
            total[self.row].index_add_(0, self.index, torch.bmm(left.mT, right).flatten(0, 1))


def chunks_of(chosen: Int[Tensor, "b s g"], before: int, heads: int, dim: int) -> Iterator[Chunk]:
    """All queries in chunks, of which each works on about as many numbers as the device should hold.

    before: how many keys stand before the first query.
    How they are cut depends on no number, so that a query's result depends on nothing but its own keys, to the bit.
    """
    most, slots = held(chosen.device), chosen.shape[2]
    for row in range(chosen.shape[0]):
        low = 0
        while low < chosen.shape[1]:
            keys = before + low
            each = slots * dim if keys >= WHOLE * slots else 2 * heads * max(keys, slots)
            high = min(low + max(1, min(most // each, keys + 16)), chosen.shape[1])
            own, end = chosen[row, low:high], before + high
            if end <= WHOLE * slots:
                empty = torch.ones(high - low, end + 1, dtype=torch.bool, device=chosen.device)
                empty = empty.scatter_(1, own.long() % (end + 1), False)[:, :end]
                yield Chunk(row, slice(low, high), None, empty)
            else:
                yield Chunk(row, slice(low, high), own.clamp(min=0).flatten(), own < 0)
            low = high


def softmax_of(q: Float[Tensor, "n h e"], latents: Float[Tensor, "n g e"], empty: Tensor, scale: float) -> Tensor:
    scores = torch.matmul(q, latents.mT).mul_(scale)
    return scores.masked_fill_(empty[..., None, :], -math.inf).softmax(-1)


# Operators of torch's, so that compiling does not unroll the chunks. Not `custom_op`, which torch.func cannot call in a
# backward pass.
INPUTS = "Tensor q, Tensor keys, Tensor chosen"
torch.library.define("glm5fn::sparse_attention", f"({INPUTS}, int rank, float scale) -> Tensor")
torch.library.define("glm5fn::sparse_attention_back", f"(Tensor grad, {INPUTS}, float scale) -> (Tensor, Tensor)")


def attend(q: Tensor, keys: Tensor, chosen: Tensor, rank: int, scale: float) -> Tensor:
    y = q.new_empty(*q.shape[:3], rank)
    if q.shape[1] <= FEW:
        group = max(1, held(q.device) // (chosen[0].numel() * keys.shape[2]))
        for row in range(0, len(q), group):
            some = slice(row, row + group)
            own = chosen[some]
            pairs = zip(keys[some], own.clamp(min=0), strict=True)
            met = [kept.index_select(0, index.flatten()) for kept, index in pairs]
            latents = upcast(torch.stack(met)).unflatten(1, own.shape[1:])
            weights = softmax_of(upcast(q[some]), latents, own < 0, scale)
            y[some] = torch.matmul(weights, latents[..., :rank])
        return y
    for chunk in chunks_of(chosen, keys.shape[1] - q.shape[1], *q.shape[2:]):
        latents = chunk.met(keys)
        weights = softmax_of(chunk.of(q), latents, chunk.empty, scale)
        y[chunk.row, chunk.queries] = torch.matmul(weights, latents[..., :rank])
    return y


torch.library.impl("glm5fn::sparse_attention", "CompositeExplicitAutograd", attend)


@torch.library.register_fake("glm5fn::sparse_attention")
def _(q: Tensor, keys: Tensor, chosen: Tensor, rank: int, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], rank)


def attend_back(grad: Tensor, q: Tensor, keys: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    rank = grad.shape[-1]
    q_grad, keys_grad = torch.empty_like(q), torch.zeros_like(upcast(keys))
    for chunk in chunks_of(chosen, keys.shape[1] - q.shape[1], *q.shape[2:]):
        query, slope, latents = chunk.of(q), chunk.of(grad), chunk.met(keys)
        weights = softmax_of(query, latents, chunk.empty, scale)
        pull = torch.matmul(slope, latents[..., :rank].mT)
        pull = weights * (pull - (pull * weights).sum(-1, keepdim=True)) * scale
        q_grad[chunk.row, chunk.queries] = torch.matmul(pull, latents)
        # What a latent gets as a key and as a value, in one product: short ones cost more than their FLOPs.
        slope = F.pad(slope, (0, query.shape[-1] - rank))
        chunk.add(keys_grad, torch.cat((pull, weights), 1), torch.cat((query, slope), 1))
    return q_grad, keys_grad.type_as(keys)


torch.library.impl("glm5fn::sparse_attention_back", "CompositeExplicitAutograd", attend_back)


@torch.library.register_fake("glm5fn::sparse_attention_back")
def _(grad: Tensor, q: Tensor, keys: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(keys)


class SparseAttention(torch.autograd.Function):
    """Keeps queries, latents and the selection alone for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, keys: Tensor, chosen: Tensor, rank: int, scale: float) -> Tensor:
        return torch.ops.glm5fn.sparse_attention(q, keys, chosen, rank, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        q, keys, chosen, _, ctx.scale = inputs
        ctx.save_for_backward(q, keys, chosen)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.ops.glm5fn.sparse_attention_back(grad.contiguous(), *ctx.saved_tensors, ctx.scale)
        return *grads, None, None, None


def sparse_attention(
    q: Float[Tensor, "b s h e"],
    keys: Float[Tensor, "b t e"],
    chosen: Int[Tensor, "b s g"],
    rank: int,
    scale: float,
) -> Float[Tensor, "b s h c"]:
    """As `reference.sparse_attention`."""
    return apply(SparseAttention, q.contiguous(), keys, chosen, rank, scale)
