"""The slow, obviously right versions: the spec that every other kernel must equal."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..ops import upcast

IGNORE = -100  # the target of a position that must predict nothing


def linear(x: Float[Tensor, "*b i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None = None) -> Tensor:
    y = x @ weight.mT
    return y if bias is None else y + bias


def rms_norm(x: Float[Tensor, "*b d"], weight: Float[Tensor, "d"], eps: float) -> Float[Tensor, "*b d"]:
    """x / sqrt(mean(x^2) + eps) * weight. Statistics in fp32, the weight applied after the cast back."""
    wide = upcast(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).type_as(x) * weight


def swiglu(gate_up: Float[Tensor, "*b 2f"]) -> Float[Tensor, "*b f"]:
    """silu(gate) * up, the gate in the first half (Shazeer 2020, arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rope(
    x: Float[Tensor, "*b s h k"],
    cos: Float[Tensor, "*b s r"],
    sin: Float[Tensor, "*b s r"],
    interleaved: bool,
) -> Float[Tensor, "*b s h k"]:
    """Rotate the first 2r dims of each head by its position; the other dims pass through.

    interleaved turns the pairs (x0, x1), (x2, x3), ...; else (x0, x_r), (x1, x_{r+1}), ...
    """
    pairs = cos.shape[-1]
    turned, passed = x[..., : 2 * pairs], x[..., 2 * pairs :]
    split, dim = ((-1, 2), -1) if interleaved else ((2, -1), -2)
    first, second = turned.unflatten(-1, split).unbind(dim)
    cos, sin = cos.unsqueeze(-2).type_as(x), sin.unsqueeze(-2).type_as(x)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim).flatten(-2)
    return torch.cat((turned, passed), -1) if passed.shape[-1] else turned


def allowed_keys(
    segments: Int[Tensor, "b t"] | None, queries: int, keys: int, device: torch.device
) -> Bool[Tensor, "b s t"]:
    """The keys at or before each query, in its own segment; one row for all without segments.

    Here and in all that follows the queries are those of the last places: the last query stands at the last key.
    """
    causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None]
    return causal if segments is None else causal & (segments[:, keys - queries :, None] == segments[:, None])


def attention(
    q: Float[Tensor, "b h s k"],
    k: Float[Tensor, "b n t k"],
    v: Float[Tensor, "b n t u"],
    segments: Int[Tensor, "b t"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b h s u"]:
    """Each query attends to the keys of its own segment that stand at or before it."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = upcast(q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    allowed = allowed_keys(segments, q.shape[2], k.shape[2], q.device)[:, None]
    return scores.masked_fill(~allowed, -math.inf).softmax(-1).type_as(v) @ v


def token_loss(x: Float[Tensor, "n d"], head: Float[Tensor, "v d"], targets: Int[Tensor, "n"]) -> Float[Tensor, ""]:
    logs = upcast(x @ head.mT).log_softmax(-1)
    ignored = targets == IGNORE
    picked = logs.gather(-1, targets.masked_fill(ignored, 0)[:, None])[:, 0]  # raises for an id that is no token's
    return -picked.masked_fill(ignored, 0.0).sum()


def experts(
    x: Float[Tensor, "n d"],
    chosen: Int[Tensor, "n a"],
    weights: Float[Tensor, "n a"],
    gate_up: Float[Tensor, "e 2 f d"],
    down: Float[Tensor, "e d f"],
) -> Float[Tensor, "n d"]:
    """Each token's weighted sum of its chosen experts, added in at least fp32; every expert sees every token."""
    total = torch.zeros_like(upcast(x))
    for e, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        share = (weights * (chosen == e)).sum(-1, keepdim=True)
        total = total + share * linear(swiglu(linear(x, first.flatten(0, 1))), second)
    return total.type_as(x)


def index_scores(
    q: Float[Tensor, "b s i j"], k: Float[Tensor, "b t j"], weights: Float[Tensor, "b s i"]
) -> Float[Tensor, "b s t"]:
    """How much each query wants each key, in fp32: sum over heads of weight x i^-0.5 x relu(q . k x j^-0.5)."""
    scores = torch.einsum("bsij,btj->bsit", upcast(q), upcast(k)).relu()
    return torch.einsum("bsit,bsi->bst", scores, upcast(weights)) / math.sqrt(q.shape[2] * q.shape[3])


def select(
    q: Float[Tensor, "b s i j"],
    k: Float[Tensor, "b t j"],
    weights: Float[Tensor, "b s i"],
    segments: Int[Tensor, "b t"] | None,
    topk: int,
) -> Int[Tensor, "b s g"]:
    """The allowed keys of the topk highest scores, at ties those of lower position, by ascending position.

    Slots without an allowed key are -1 and stand last.
    """
    scores = index_scores(q, k, weights)
    steps = k.shape[1]
    scores = scores.masked_fill(~allowed_keys(segments, q.shape[1], steps, q.device), -math.inf)
    ordered = scores.sort(dim=-1, descending=True, stable=True)
    chosen = ordered.indices.masked_fill(ordered.values == -math.inf, steps)[..., :topk].sort(-1).values
    return chosen.masked_fill(chosen == steps, -1).to(torch.int32)


def support(chosen: Int[Tensor, "b s g"], steps: int) -> Bool[Tensor, "b s t"]:
    """The selected keys as a mask."""
    mask = torch.zeros(*chosen.shape[:2], steps + 1, dtype=torch.bool, device=chosen.device)
    return mask.scatter(-1, chosen.long() % (steps + 1), True)[..., :steps]


def latent_weights(
    q: Float[Tensor, "b s h e"], keys: Float[Tensor, "b t e"], mask: Bool[Tensor, "b s t"], scale: float
) -> Float[Tensor, "b h s t"]:
    scores = upcast(torch.einsum("bshe,bte->bhst", q, keys)) * scale
    return scores.masked_fill(~mask[:, None], -math.inf).softmax(-1)


def sparse_attention(
    q: Float[Tensor, "b s h e"],
    keys: Float[Tensor, "b t e"],
    chosen: Int[Tensor, "b s g"],
    rank: int,
    scale: float,
) -> Float[Tensor, "b s h c"]:
    """Each query attends to its selected latents alone; the first `rank` dims of a latent are its values."""
    weights = latent_weights(q, keys, support(chosen, keys.shape[1]), scale)
    return torch.einsum("bhst,btc->bshc", weights.type_as(keys), keys[..., :rank])


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
    """Sum over real queries of KL(target || softmax of the index scores) over the selected keys, all allowed if None.

    teachers: queries [b, s, h, e] and keys [b, t, e] of the attentions whose probabilities, summed over heads and
    scaled to sum to 1, are averaged to the target. They get no gradient.
    """
    steps = k.shape[1]
    mask = allowed_keys(segments, q.shape[1], steps, q.device) if chosen is None else support(chosen, steps)
    shares = [latent_weights(*teacher, mask, scale).sum(1) for teacher in teachers]
    target = torch.stack([share / share.sum(-1, keepdim=True) for share in shares]).mean(0).detach()
    scores = index_scores(q, k, weights).masked_fill(~mask, -math.inf)
    gap = target.log() - scores.log_softmax(-1)
    loss = (target * gap.masked_fill(target == 0, 0.0)).sum(-1)
    return loss.sum() if real is None else loss.masked_fill(~real, 0.0).sum()
