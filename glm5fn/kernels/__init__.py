"""The few hot operations, chosen once as one value: `REFERENCE` is the slow spec, the others equal it, fast."""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import portable, reference, widened


class Kernels(NamedTuple):
    """linear: (x [*b, i], weight [o, i], bias [o] | None) -> [*b, o].

    rms_norm: (x [*b, d], weight [d], eps) -> [*b, d].
    rope: (x [*b, s, h, k], cos and sin [*b, s, r], interleaved) -> [*b, s, h, k], the first 2r dims rotated.
    swiglu: (gate_up [*b, 2f]) -> [*b, f].
    attention: (q [b, h, s, k], k [b, n, t, k], v [b, n, t, u], segments [b, t] | None, scale) -> [b, h, s, u], causal,
    inside each segment; h is a multiple of n. The queries stand at the last s of the t places, here and below.
    experts: (x [n, d], chosen [n, a], weights [n, a], gate_up [e, 2, f, d], down [e, d, f]) -> [n, d], the weighted sum
    of each token's chosen experts.
    token_loss: (x [n, d], head [v, d], targets [n]) -> the sum of -log softmax(head x)[target], in at least fp32,
    over the targets that are not IGNORE; the fast ones also take a `comm.Vocab`, where other ranks have rows of it.
    select: (index q [b, s, i, j], index k [b, t, j], head weights [b, s, i], segments, topk) -> [b, s, g], int32.
    sparse_attention: (q [b, s, h, e], keys [b, t, e], chosen [b, s, g], rank, scale) -> [b, s, h, rank].
    index_loss: (teachers [(q, keys)], index q, k and head weights, chosen | None, segments, real, scale) -> [].
    """

    linear: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    experts: Callable[..., Tensor]
    token_loss: Callable[..., Tensor]
    select: Callable[..., Tensor]
    sparse_attention: Callable[..., Tensor]
    index_loss: Callable[..., Tensor]


def kernels_of(module: ModuleType) -> Kernels:
    return Kernels(*(getattr(module, name) for name in Kernels._fields))


REFERENCE = kernels_of(reference)
TORCH = kernels_of(portable)  # right on every device
WIDENED = kernels_of(widened)  # for bf16 on a CPU that has no instructions for it


def kernels_for(kind: str, dtype: torch.dtype) -> Kernels:
    """The kernels for a device type and a compute dtype."""
    slow = kind == "cpu" and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return WIDENED if slow else TORCH
