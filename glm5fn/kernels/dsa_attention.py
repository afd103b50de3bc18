"""Attention over selected latents, a chunk of queries at a time; the backward pass gathers and weighs them again."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..ops import upcast
from .dsa_select import held


def gathered(
    keys: Float[Tensor, "b t e"], chosen: Int[Tensor, "b s g"]
) -> Iterator[tuple[slice, Int[Tensor, "n g"], Tensor, Float[Tensor, "n g e"]]]:
    """For each chunk of queries: its range, the rows of its latents among all, the empty slots, the latents."""
    rows, steps, _ = keys.shape
    flat = upcast(keys).flatten(0, 1)
    first = (torch.arange(rows, device=keys.device) * steps).repeat_interleave(chosen.shape[1])[:, None]
    selected = chosen.flatten(0, 1)
    size = max(1, held(keys.device) // (selected.shape[1] * keys.shape[2]))
    for low in range(0, len(selected), size):
        part = slice(low, low + size)
        empty = selected[part] < 0
        index = selected[part].clamp(min=0) + first[part]
        yield part, index, empty, flat.index_select(0, index.flatten()).view(*index.shape, -1)


def softmax_of(q: Float[Tensor, "n h e"], latents: Float[Tensor, "n g e"], empty: Tensor, scale: float) -> Tensor:
    scores = torch.matmul(q, latents.mT).mul_(scale)
    return scores.masked_fill_(empty[:, None], -math.inf).softmax(-1)


# Operators of torch's, so that compiling does not unroll the chunks. Not `custom_op`, which torch.func cannot call in a
# backward pass.
INPUTS = "Tensor q, Tensor keys, Tensor chosen"
torch.library.define("glm5fn::sparse_attention", f"({INPUTS}, int rank, float scale) -> Tensor")
torch.library.define("glm5fn::sparse_attention_back", f"(Tensor grad, {INPUTS}, float scale) -> (Tensor, Tensor)")


def attend(q: Tensor, keys: Tensor, chosen: Tensor, rank: int, scale: float) -> Tensor:
    y = q.new_empty(*q.shape[:3], rank)
    queries, out = q.flatten(0, 1), y.flatten(0, 1)
    for part, _, empty, latents in gathered(keys, chosen):
        out[part] = torch.bmm(softmax_of(upcast(queries[part]), latents, empty, scale), latents[..., :rank])
    return y


torch.library.impl("glm5fn::sparse_attention", "CompositeExplicitAutograd", attend)


@torch.library.register_fake("glm5fn::sparse_attention")
def _(q: Tensor, keys: Tensor, chosen: Tensor, rank: int, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], rank)


def attend_back(grad: Tensor, q: Tensor, keys: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    rank = grad.shape[-1]
    q_grad, keys_grad = torch.empty_like(q), torch.zeros_like(upcast(keys))
    slopes, queries, out, total = grad.flatten(0, 1), q.flatten(0, 1), q_grad.flatten(0, 1), keys_grad.flatten(0, 1)
    for part, index, empty, latents in gathered(keys, chosen):
        query, slope = upcast(queries[part]), upcast(slopes[part])
        weights = softmax_of(query, latents, empty, scale)
        pull = torch.bmm(slope, latents[..., :rank].mT)
        pull = weights * (pull - (pull * weights).sum(-1, keepdim=True)) * scale
        out[part] = torch.bmm(pull, latents)
        wide = torch.bmm(pull.mT, query)
        wide[..., :rank].baddbmm_(weights.mT, slope)
        total.index_add_(0, index.flatten(), wide.flatten(0, 1))
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
    return SparseAttention.apply(q.contiguous(), keys.contiguous(), chosen, rank, scale)
