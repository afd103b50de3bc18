"""The selection of keys in chunks of queries: heads x s x t scores never stand at once, nor s x t."""

import math

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..ops import upcast

FEW = 8  # queries of each row, as when it gets one token more, of which many rows are worked on at once
HELD = {"cpu": 1 << 19}  # numbers that a chunk of queries works on, by device: on a CPU as many as its cache holds


# An operator of torch's, since its steps depend on the scores and can be neither compiled nor run on meta tensors.
torch.library.define("glm5fn::select", "(Tensor q, Tensor k, Tensor weights, Tensor? segments, int topk) -> Tensor")


def select_in_chunks(q: Tensor, k: Tensor, weights: Tensor, segments: Tensor | None, topk: int) -> Tensor:
    rows, steps, heads, dim = q.shape
    before = k.shape[1] - steps
    chosen = torch.full((rows, steps, min(topk, k.shape[1])), -1, dtype=torch.int32, device=q.device)
    scale = 1 / math.sqrt(heads * dim)
    if steps <= FEW:
        group = max(1, held(q.device) // (steps * heads * k.shape[1]))
        for row in range(0, rows, group):
            some = slice(row, row + group)
            own, keys = q[some], k[some]
            documents = None if segments is None else segments[some]
            mask = allowed(documents, before, k.shape[1], q.device).expand(len(own), -1, -1)
            if k.shape[1] > topk:
                scores = (upcast(own).flatten(1, 2) @ upcast(keys).mT).relu_().view(-1, steps, heads, k.shape[1])
                scores = (upcast(weights[some])[:, :, None] @ scores)[:, :, 0].mul_(scale)
                if steps > 1 or documents is not None:  # else every key is allowed
                    scores.masked_fill_(~mask, -math.inf)
                mask = best(scores, topk)
            pack(mask.flatten(0, 1), chosen[some].flatten(0, 1))
        return chosen
    for row in range(rows):
        wide = upcast(k[row])
        for low, high in chunks(steps, before, heads, held(q.device)):
            documents, end = None if segments is None else segments[row], before + high
            mask = allowed(documents, before + low, end, q.device)
            if end > topk:
                scores = upcast(q[row, low:high]).flatten(0, 1) @ wide[:end].mT
                scores = scores.relu_().view(high - low, heads, end)
                scores = (upcast(weights[row, low:high])[:, None] @ scores)[:, 0].mul_(scale)
                mask = best(scores.masked_fill_(~mask, -math.inf), topk)
            pack(mask, chosen[row, low:high])
    return chosen


torch.library.impl("glm5fn::select", "CompositeExplicitAutograd", select_in_chunks)


@torch.library.register_fake("glm5fn::select")
def _(q: Tensor, k: Tensor, weights: Tensor, segments: Tensor | None, topk: int) -> Tensor:
    return q.new_empty((*q.shape[:2], min(topk, k.shape[1])), dtype=torch.int32)


def held(device: torch.device) -> int:
    return HELD.get(device.type, 1 << 26)


def chunks(steps: int, before: int, width: int, most: int) -> list[tuple[int, int]]:
    """Ranges of queries whose scores, `width` for each of the keys so far, are about `most`; at least four queries.

    before: how many keys stand before the first query.
    """
    ranges, low = [], 0
    while low < steps:
        keys = before + low
        high = min(low + max(4, most // (width * max(keys, 1))), low + max(16, keys), steps)
        ranges.append((low, high))
        low = high
    return ranges


def allowed(documents: Int[Tensor, "*b t"] | None, low: int, high: int, device: torch.device) -> Bool[Tensor, "*b s t"]:
    """The keys at or before each place from low to high, in its own document."""
    at = torch.arange(high, device=device)
    causal = at <= at[low:, None]
    return causal if documents is None else causal & (documents[..., None, :high] == documents[..., low:high, None])


def best(scores: Float[Tensor, "*b t"], topk: int) -> Bool[Tensor, "*b t"]:
    """The topk highest scores of each query, at ties those of lower position; never one of -inf.

    The lowest score that is taken is the threshold, and of its equals as many are taken as there is room for.
    """
    threshold = lowest_of_best(scores, topk)
    taken = scores >= threshold
    if (taken.count_nonzero(-1) > topk).any():
        above = scores > threshold
        level = taken & ~above
        room = topk - above.count_nonzero(-1)[..., None]
        taken = above | (level & (level.cumsum(-1, dtype=torch.int32) <= room) & (threshold > -math.inf))
    return taken


def lowest_of_best(scores: Float[Tensor, "*b t"], topk: int) -> Float[Tensor, "*b 1"]:
    """The topk-th highest score of each query. On a CPU NumPy partitions several times faster than torch.topk."""
    if scores.device.type == "cpu":
        place = scores.shape[-1] - topk
        return torch.from_numpy(np.partition(scores.numpy(), place, axis=-1)[..., place : place + 1])
    return scores.topk(topk, -1, sorted=False).values.amin(-1, keepdim=True)


def pack(mask: Bool[Tensor, "s t"], slots: Int[Tensor, "s g"]) -> None:
    """Write the positions that a mask holds into the first slots of each query, in ascending order."""
    query, position = mask.nonzero().unbind(-1)
    if len(position) == slots.numel():
        slots.copy_(position.view_as(slots))
        return
    counts = mask.sum(-1)
    first = counts.cumsum(0) - counts
    slot = torch.arange(len(query), device=mask.device) - first.index_select(0, query)
    slots.view(-1).scatter_(0, query * slots.shape[1] + slot, position.to(slots.dtype))


def select(
    q: Float[Tensor, "b s i j"],
    k: Float[Tensor, "b t j"],
    weights: Float[Tensor, "b s i"],
    segments: Int[Tensor, "b t"] | None,
    topk: int,
) -> Int[Tensor, "b s g"]:
    """As `reference.select`."""
    return torch.ops.glm5fn.select(q.detach(), k.detach(), weights.detach(), segments, topk)
