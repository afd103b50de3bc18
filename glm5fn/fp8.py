"""Matrices in FP8 (e4m3) by blocks, as DeepSeek-V3 and GLM-5 are published.

Beside such a matrix X stands X_scale_inv in fp32, a factor for each block of 128 x 128; the last blocks may be short.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

E4M3 = torch.float8_e4m3fn
BLOCK = 128
LARGEST = torch.finfo(E4M3).max
SCALE = "_scale_inv"  # what the key of the factors adds to the key of the matrix
METHOD = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}


def scale_shape(size: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix's factors.

    >>> scale_shape((576, 6144))
    (5, 48)
    """
    return tuple(-(-n // BLOCK) for n in size)


def dequantize(
    values: Float[Tensor, "m n"], scales: Float[Tensor, "p q"], row: int = 0, column: int = 0
) -> Float[Tensor, "m n"]:
    """The numbers that FP8 values stand for, in the scales' dtype.

    values: the part that begins at (row, column) of the matrix of which these are all scales.
    """
    m, n = values.shape
    down, across = (torch.arange(row, row + m) // BLOCK, torch.arange(column, column + n) // BLOCK)
    return values.to(scales.dtype).mul_(scales.index_select(0, down).index_select(1, across))


def quantize(
    values: Float[Tensor, "m n"], scales: Float[Tensor, "p q"] | None = None
) -> tuple[Float[Tensor, "m n"], Float[Tensor, "p q"]]:
    """FP8 values and their scales: by default so that the largest number of each block becomes the largest of FP8.

    Raises ValueError for numbers that are not finite.
    """
    m, n = values.shape
    padded = F.pad(values.to(torch.float32), (0, -n % BLOCK, 0, -m % BLOCK))
    blocks = rearrange(padded, "(p down) (q across) -> p down q across", down=BLOCK, across=BLOCK)
    if scales is None:
        highest = blocks.abs().amax((1, 3))
        if not highest.isfinite().all():
            raise ValueError("has numbers that are not finite, which FP8 cannot hold")
        scales = highest / LARGEST
        scales = torch.where(scales > 0, scales, 1.0)  # of blocks of zeros, or of numbers too small for a factor
    # What rounding lifts above the largest number would become NaN.
    held = (blocks / scales[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(E4M3)
    return rearrange(held, "p down q across -> (p down) (q across)")[:m, :n].contiguous(), scales
