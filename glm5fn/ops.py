"""The small operations that every block is made of."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """At least fp32: half precisions become fp32, fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rope_angles(
    positions: Int[Tensor, "*b s"], rotary_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "*b s r"], Float[Tensor, "*b s r"]]:
    """Cosine and sine of each position's rotation, one for each of the rotary_dim / 2 pairs (RoFormer, eq. 15)."""
    exponent = torch.arange(0, rotary_dim, 2, device=positions.device).to(dtype) / rotary_dim
    angles = positions.to(dtype)[..., None] / theta**exponent
    return angles.cos(), angles.sin()


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
