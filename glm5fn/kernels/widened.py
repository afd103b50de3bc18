"""For half precision where the device has no units for it: matmuls in fp32 on the same rounded numbers.

A CPU without bf16 instructions multiplies bf16 several times more slowly than fp32. The operands and results are in
half precision as they would be with such units, which sum in fp32 too, so what is stored and moved stays small.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..comm import Vocab
from ..ops import apply, upcast
from . import portable
from .portable import (
    experts,
    index_loss,
    rms_norm,
    rope,
    select,
    sparse_attention,
    swiglu,
)  # these upcast what they hold

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


class Linear(torch.autograd.Function):
    """Keeps the operands in half precision for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(upcast(x), upcast(weight), None if bias is None else upcast(bias)).type_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide = upcast(grad)
        flat = wide.flatten(0, -2)
        weight_grad = flat.mT @ upcast(x).flatten(0, -2)
        bias_grad = flat.sum(0).type_as(weight) if ctx.has_bias else None
        return (wide @ upcast(weight)).type_as(x), weight_grad.type_as(weight), bias_grad


def linear(x: Float[Tensor, "*b i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None = None) -> Tensor:
    """As `reference.linear`."""
    return apply(Linear, x, weight, bias)


def attention(
    q: Float[Tensor, "b h s k"],
    k: Float[Tensor, "b n t k"],
    v: Float[Tensor, "b n t u"],
    segments: Int[Tensor, "b t"] | None = None,
    scale: float | None = None,
    fused: Callable[..., Tensor] = portable.fused_attention,
) -> Float[Tensor, "b h s u"]:
    """As `reference.attention`."""
    return portable.attention(upcast(q), upcast(k), upcast(v), segments, scale, fused).type_as(v)


def token_loss(
    x: Float[Tensor, "n d"], head: Float[Tensor, "v d"], targets: Int[Tensor, "n"], vocab: Vocab | None = None
) -> Float[Tensor, ""]:
    """As `portable.token_loss`; the logits are not rounded to half precision on the way."""
    return portable.token_loss(upcast(x), upcast(head), targets, vocab)
