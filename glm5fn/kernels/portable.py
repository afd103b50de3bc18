"""The fast versions in plain torch, right on every device."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..comm import Vocab
from ..ops import apply, upcast
from . import reference
from .dsa_attention import sparse_attention
from .dsa_loss import index_loss
from .dsa_select import select
from .experts import experts
from .reference import IGNORE
from .thin import linear

__all__ = [
    "attention",
    "experts",
    "index_loss",
    "linear",
    "rms_norm",
    "rope",
    "select",
    "sparse_attention",
    "swiglu",
    "token_loss",
]

LOGITS = 1 << 22  # logits that the loss holds at once,
ROWS = 128  # but never fewer rows of them: a matmul of less is slow


class RMSNorm(torch.autograd.Function):
    """Keeps x alone for the backward pass and does the arithmetic again there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = upcast(x)
        return (wide * inverse_rms(wide, eps)).type_as(x) * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide, slope, gain = upcast(x), upcast(grad), upcast(weight)
        scale = inverse_rms(wide, ctx.eps)
        both = slope * wide
        weight_grad = both.flatten(0, -2).mT @ scale.flatten()
        pull = (both @ gain)[..., None] * scale**3 / x.shape[-1]
        return (slope * gain * scale - wide * pull).type_as(x), weight_grad.type_as(weight), None


def inverse_rms(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / wide.shape[-1] + eps)


class Rope(torch.autograd.Function):
    """A rotation, whose gradient is the rotation back: nothing of x is kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        return reference.rope(x, cos, sin, interleaved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, cos, sin, ctx.interleaved = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return reference.rope(grad, cos, -sin, ctx.interleaved), None, None, None


class SwiGLU(torch.autograd.Function):
    """Keeps gate_up alone for the backward pass and does the arithmetic again there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate_up: Tensor) -> Tensor:
        return reference.swiglu(gate_up)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)), -1)


def rms_norm(x: Float[Tensor, "*b d"], weight: Float[Tensor, "d"], eps: float) -> Float[Tensor, "*b d"]:
    """As `reference.rms_norm`."""
    return apply(RMSNorm, x, weight, eps)


def rope(x: Float[Tensor, "*b s h k"], cos: Tensor, sin: Tensor, interleaved: bool) -> Float[Tensor, "*b s h k"]:
    """As `reference.rope`."""
    return apply(Rope, x, cos, sin, interleaved)


def swiglu(gate_up: Float[Tensor, "*b 2f"]) -> Float[Tensor, "*b f"]:
    """As `reference.swiglu`."""
    return apply(SwiGLU, gate_up)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float | None) -> Tensor:
    """torch's own, causal if no keys are given as allowed."""
    settings = {"attn_mask": allowed, "is_causal": allowed is None, "scale": scale}
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **settings)


def attention(
    q: Float[Tensor, "b h s k"],
    k: Float[Tensor, "b n t k"],
    v: Float[Tensor, "b n t u"],
    segments: Int[Tensor, "b t"] | None = None,
    scale: float | None = None,
    fused: Callable[..., Tensor] = fused_attention,
) -> Float[Tensor, "b h s u"]:
    """As `reference.attention`, by a fused attention; documents cost a mask of s x t booleans a row.

    The fused kernels want keys and values of one width, so the narrower ones get columns of zeros.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    width, wanted = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (part if part.shape[-1] == width else F.pad(part, (0, width - part.shape[-1])) for part in (q, k, v))
    queries, keys = q.shape[2], k.shape[2]
    if segments is None and queries == keys:
        allowed = None
    else:
        allowed = reference.allowed_keys(segments, queries, keys, q.device)[:, None]
    return fused(q, k, v, allowed, scale)[..., :wanted]


class TokenLoss(torch.autograd.Function):
    """The loss in chunks of rows, gradients made on the way, so that the logits of all rows never stand at once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, head: Tensor, targets: Tensor, training: bool, vocab: Vocab | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        x_grads, head_grad = [], None
        rows = max(ROWS, LOGITS // head.shape[0])
        for some, wanted in zip(x.split(rows), targets.split(rows), strict=True):
            logits = upcast(some @ head.mT)
            ignored = (wanted == IGNORE)[:, None]
            kept = (~ignored).type_as(logits)
            index, there = wanted[:, None].masked_fill(ignored, 0), kept
            if vocab is not None:
                index = index - vocab.first
                other = (index < 0) | (index >= len(head))
                index, there = index.masked_fill(other, 0), kept.masked_fill(other, 0.0)
            top, chosen = logits.amax(-1, keepdim=True), logits.gather(-1, index)
            top = top if vocab is None else vocab.highest(top)
            weights = logits.sub_(top).exp_()
            mass = weights.sum(-1, keepdim=True)
            if vocab is not None:
                mass, chosen = vocab.total(torch.cat((mass, chosen * there), -1)).split(1, -1)
            total = total + ((mass.log() + top - chosen) * kept).sum()
            if training:
                slope = weights.mul_(kept / mass).scatter_add_(-1, index, -there).type_as(x)
                x_grads.append(slope @ head)
                head_grad = add_product(head_grad, slope.mT, some)
        if head_grad is None:
            return total, x.new_zeros(()), head.new_zeros(())
        return total, torch.cat(x_grads), head_grad

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, x_grad, head_grad = output
        ctx.mark_non_differentiable(x_grad, head_grad)
        ctx.save_for_backward(x_grad, head_grad)
        ctx.head_dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place, since the head's gradient may be the largest tensor of all; a second pass would be told so.
        x_grad, head_grad = ctx.saved_tensors
        return x_grad.mul_(grad), head_grad.mul_(grad).to(ctx.head_dtype), None, None, None


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b in at least fp32, in place where there is a total."""
    if total is None:
        return upcast(a @ b)
    return total.addmm_(a, b) if total.dtype == a.dtype else total.add_(a @ b)


def token_loss(
    x: Float[Tensor, "n d"], head: Float[Tensor, "v d"], targets: Int[Tensor, "n"], vocab: Vocab | None = None
) -> Float[Tensor, ""]:
    """As `reference.token_loss`, holding LOGITS logits at a time, forward and backward.

    vocab: the ranks that have the other rows of the head; each has the whole loss, and its part of the gradient of x.
    """
    training = torch.is_grad_enabled() and (x.requires_grad or head.requires_grad)
    return TokenLoss.apply(x, head, targets, training, vocab)[0]
