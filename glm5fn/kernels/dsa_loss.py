"""What the indexer learns from, a chunk of queries at a time: its gradients are made on the way to the value."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..ops import upcast
from .dsa_attention import Chunk, chunks_of, softmax_of
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
    heads, dim = q.shape[2:]
    factor = 1 / math.sqrt(heads * dim)
    total = upcast(q).new_zeros(())
    q_grad, k_grad, weights_grad = (torch.zeros_like(upcast(x)) for x in (q, k, weights))
    before = k.shape[1] - q.shape[1]
    for chunk in meetings(chosen, segments, q, before, max(heads, queries[0].shape[2]), keys[0].shape[2]):
        target = torch.zeros_like(chunk.empty, dtype=total.dtype)
        for query, key in zip(queries, keys, strict=True):
            shares = softmax_of(chunk.of(query), chunk.met(key), chunk.empty, scale).sum(1)
            target += shares.div_(shares.sum(-1, keepdim=True)).div_(len(queries))
        query, weight, key = chunk.of(q), chunk.of(weights), chunk.met(k)
        active = torch.matmul(query, key.mT).relu_()
        scores = torch.bmm(weight[:, None], active)[:, 0].mul_(factor)
        logs = scores.masked_fill_(chunk.empty, -math.inf).log_softmax(-1)
        gap = torch.xlogy(target, target) - target * logs.masked_fill(chunk.empty, 0.0)
        slope = (logs.exp() - target).mul_(factor)
        if real is not None:
            unreal = ~real[chunk.row, chunk.queries][:, None]
            gap, slope = gap.masked_fill_(unreal, 0.0), slope.masked_fill_(unreal, 0.0)
        total += gap.sum()
        weights_grad[chunk.row, chunk.queries] = torch.bmm(active, slope[..., None])[..., 0]
        pull = (active > 0) * slope[:, None] * weight[..., None]
        q_grad[chunk.row, chunk.queries] = torch.matmul(pull, key)
        chunk.add(k_grad, pull, query)
    return total, q_grad.type_as(q), k_grad.type_as(k), weights_grad.type_as(weights)


torch.library.impl("glm5fn::index_loss", "CompositeExplicitAutograd", loss_and_grads)


@torch.library.register_fake("glm5fn::index_loss")
def _(queries: Any, keys: Any, q: Tensor, k: Tensor, weights: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return upcast(q).new_empty(()), torch.empty_like(q), torch.empty_like(k), torch.empty_like(weights)


def meetings(
    chosen: Tensor | None, segments: Tensor | None, q: Tensor, before: int, heads: int, dim: int
) -> Iterator[Chunk]:
    """Chunks of queries that meet their selected keys, or all that they may."""
    if chosen is not None:
        yield from chunks_of(chosen, before, heads, max(dim, heads))
        return
    for row in range(q.shape[0]):
        documents = None if segments is None else segments[row]
        for low, high in chunks(q.shape[1], before, heads, held(q.device)):
            yield Chunk(row, slice(low, high), None, ~allowed(documents, before + low, before + high, q.device))


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
    segments: Int[Tensor, "b t"] | None,
    real: Bool[Tensor, "b s"] | None,
    scale: float,
) -> Float[Tensor, ""]:
    """As `reference.index_loss`."""
    queries, keys = zip(*((query.detach(), key.detach()) for query, key in teachers), strict=True)
    return IndexLoss.apply(q, k, weights, queries, keys, chosen, segments, real, scale)[0]
