"""The small operations that every block is made of."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """At least fp32: half precisions become fp32, fp64 stays."""
    return x.float() if x.dtype.itemsize < torch.float32.itemsize else x


def apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """The function of these inputs; where no backward pass can follow, without what its preparation costs."""
    return function.apply(*inputs) if torch.is_grad_enabled() else function.forward(*inputs)


def rotation(
    x: Float[Tensor, "b s *x"], positions: Int[Tensor, "b s"] | None, rotary_dim: int, theta: float
) -> tuple[Float[Tensor, "*b s r"], Float[Tensor, "*b s r"]]:
    """The `rope_angles` of x's positions, 0, 1, ... when absent, in at least fp32."""
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device)
    return rope_angles(positions, rotary_dim, theta, torch.promote_types(x.dtype, torch.float32))


def rope_angles(
    positions: Int[Tensor, "*b s"], rotary_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "*b s r"], Float[Tensor, "*b s r"]]:
    """Cosine and sine of each position's rotation, one for each of the rotary_dim / 2 pairs (RoFormer, eq. 15)."""
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim ({rotary_dim}) must be even and above 0, since RoPE turns pairs")
    exponent = torch.arange(0, rotary_dim, 2, device=positions.device).to(dtype) / rotary_dim
    angles = positions.to(dtype)[..., None] / theta**exponent
    return angles.cos(), angles.sin()
