"""What the indexer learns from, a chunk of queries at a time: its gradients are made on the way to the value."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..ops import upcast
from .dsa_attention import softmax_of
from .dsa_select import allowed, chunks, held

torch.library.define(
    "glm5fn::index_loss",
    "(Tensor[] queries, Tensor[] keys, Tensor q, Tensor k, Tensor weights, Tensor? chosen, Tensor? segments, "
    "Tensor? real, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
)


def loss_and_grads(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    chosen: Tensor | None,
    segments: Tensor | None,
    real: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradients by q, k and weights."""
    rows, steps, heads, dim = q.shape
    factor = 1 / math.sqrt(heads * dim)
    total = upcast(q).new_zeros(())
    q_grad, k_grad, weights_grad = (torch.zeros_like(upcast(x)) for x in (q, k, weights))
    wide, most = max(heads, queries[0].shape[2]), held(q.device)
    for row in range(rows):
        ranges = chunks(steps, wide, most)
        if chosen is not None:
            size = max(1, most // (chosen.shape[2] * max(keys[0].shape[2], wide)))
            ranges = [(low, min(low + size, steps)) for low in range(0, steps, size)]
        for low, high in ranges:
            part = (row, slice(low, high))
            if chosen is None:
                index = None
                empty = ~allowed(None if segments is None else segments[row], low, high, q.device)
            else:
                index, empty = chosen[part].clamp(min=0).flatten(), chosen[part] < 0
            target = torch.zeros_like(empty, dtype=total.dtype)
            for query, key in zip(queries, keys, strict=True):
                shares = softmax_of(upcast(query[part]), met(key[row], index, empty), empty, scale).sum(1)
                target += shares.div_(shares.sum(-1, keepdim=True)).div_(len(queries))
            query, weight, key = upcast(q[part]), upcast(weights[part]), met(k[row], index, empty)
            active = torch.matmul(query, key.mT).relu_()
            scores = torch.bmm(weight[:, None], active)[:, 0].mul_(factor)
            logs = scores.masked_fill_(empty, -math.inf).log_softmax(-1)
            gap = torch.xlogy(target, target) - target * logs.masked_fill(empty, 0.0)
            slope = (logs.exp() - target).mul_(factor)
            if real is not None:
                unreal = ~real[part][:, None]
                gap, slope = gap.masked_fill_(unreal, 0.0), slope.masked_fill_(unreal, 0.0)
            total += gap.sum()
            weights_grad[part] = torch.bmm(active, slope[..., None])[..., 0]
            pull = (active > 0) * slope[:, None] * weight[..., None]
            q_grad[part] = torch.matmul(pull, key)
            if index is None:
                k_grad[row, :high] += torch.matmul(pull.flatten(0, 1).mT, query.flatten(0, 1))
            else:
                k_grad[row].index_add_(0, index, torch.bmm(pull.mT, query).flatten(0, 1))
    return total, q_grad.type_as(q), k_grad.type_as(k), weights_grad.type_as(weights)


torch.library.impl("glm5fn::index_loss", "CompositeExplicitAutograd", loss_and_grads)


@torch.library.register_fake("glm5fn::index_loss")
def _(queries: Any, keys: Any, q: Tensor, k: Tensor, weights: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return upcast(q).new_empty(()), torch.empty_like(q), torch.empty_like(k), torch.empty_like(weights)


def met(
    keys: Float[Tensor, "t e"], index: Int[Tensor, "n*g"] | None, empty: Bool[Tensor, "n g"]
) -> Float[Tensor, "n g e"] | Float[Tensor, "g e"]:
    """The keys that each query of a chunk meets: those selected, or the first ones, the same for all."""
    if index is None:
        return upcast(keys[: empty.shape[1]])
    return upcast(keys.index_select(0, index)).view(*empty.shape, -1)


class IndexLoss(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        queries, keys, chosen, segments, real, scale = rest
        return torch.ops.glm5fn.index_loss(queries, keys, q, k, weights, chosen, segments, real, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return *((part * grad).type_as(part) for part in ctx.saved_tensors), *[None] * 6


def index_loss(
    teachers: Sequence[tuple[Tensor, Tensor]],
    q: Float[Tensor, "b s i j"],
    k: Float[Tensor, "b t j"],
    weights: Float[Tensor, "b s i"],
    chosen: Int[Tensor, "b s g"] | None,
    segments: Int[Tensor, "b s"] | None,
    real: Bool[Tensor, "b s"] | None,
    scale: float,
) -> Float[Tensor, ""]:
    """As `reference.index_loss`."""
    queries, keys = zip(*((query.detach(), key.detach()) for query, key in teachers), strict=True)
    return IndexLoss.apply(q, k, weights, queries, keys, chosen, segments, real, scale)[0]
