"""The slow, obviously right versions: the spec that every other kernel must equal."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
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


def attention(
    q: Float[Tensor, "b h s k"],
    k: Float[Tensor, "b n t k"],
    v: Float[Tensor, "b n t u"],
    segments: Int[Tensor, "b s"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b h s u"]:
    """Each query attends to the keys of its own segment that stand at or before it."""
    groups, steps = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = upcast(q @ k.mT) * (scale or 1 / math.sqrt(q.shape[-1]))
    allowed = torch.ones(steps, steps, dtype=torch.bool, device=q.device).tril()
    if segments is not None:
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None, :])
    return scores.masked_fill(~allowed, -math.inf).softmax(-1).type_as(v) @ v


def token_loss(x: Float[Tensor, "n d"], head: Float[Tensor, "v d"], targets: Int[Tensor, "n"]) -> Float[Tensor, ""]:
    logs = upcast(x @ head.mT).log_softmax(-1)
    ignored = targets == IGNORE
    picked = logs.gather(-1, targets.masked_fill(ignored, 0)[:, None])[:, 0]  # raises for an id that is no token's
    return -picked.masked_fill(ignored, 0.0).sum()
