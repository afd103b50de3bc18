"""Products of a few rows, which cost the time that the other factor takes to be read."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

ROWS = 4


def matmul(a: Float[Tensor, "n i"], b: Float[Tensor, "i o"]) -> Float[Tensor, "n o"]:
    """a @ b. On a CPU a few rows, two at least, are made the columns of the right factor: MKL then reads the left one
    two to four times as fast, on one thread as on several. One row that is compiled is summed up: faster still."""
    if a.device.type != "cpu" or not 0 < a.shape[0] <= ROWS or a.dtype.itemsize < torch.float32.itemsize:
        return a @ b
    if a.shape[0] == 1 and torch.compiler.is_compiling():
        return (a * b.mT).sum(-1)[None]
    columns = torch.cat((a, a)) if a.shape[0] == 1 else a
    return (b.mT @ columns.mT).mT[: a.shape[0]].contiguous()


def linear(x: Float[Tensor, "*b i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None = None) -> Tensor:
    """As `reference.linear`."""
    if x.shape[:-1].numel() > ROWS:
        return F.linear(x, weight, bias)
    y = matmul(x.reshape(-1, x.shape[-1]), weight.mT).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias
