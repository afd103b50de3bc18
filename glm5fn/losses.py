"""What training minimises."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from .comm import LOCAL, Comm
from .config import ModelConfig
from .kernels import TORCH, Kernels
from .kernels.reference import IGNORE
from .model import Params, block, head_weight, trunk


def labels(batch: Mapping[str, Tensor]) -> Tensor:
    """The number of positions that must predict something, int64 []."""
    return (batch["targets"] != IGNORE).sum()


def loss(
    params: Params,
    batch: Mapping[str, Tensor],
    cfg: ModelConfig,
    count: Tensor | float | None = None,
    *,
    comm: Comm = LOCAL,
    kernels: Kernels = TORCH,
    block: Callable[..., Tensor] = block,
    recompute: bool = False,
) -> tuple[Float[Tensor, ""], dict[str, Any]]:
    """Cross-entropy in nats a token: the sum over this batch's labels, divided by `count`.

    batch: tokens and targets [b, s] (already shifted, -100 for none), optionally positions and segments.
    count: labels of the whole step, over all ranks and accumulated batches, so that the parts add up to its mean;
    those of this batch when absent (at least 1).
    Returns the loss and the metrics, each a sum over this batch that adds up over batches and ranks.
    """
    x = trunk(
        params,
        batch["tokens"],
        cfg,
        batch.get("positions"),
        batch.get("segments"),
        comm=comm,
        kernels=kernels,
        block=block,
        recompute=recompute,
    )
    total = kernels.token_loss(x.flatten(0, 1), head_weight(params, comm), batch["targets"].flatten())
    count = labels(batch).clamp(min=1) if count is None else count
    return total / count, {"nll": total.detach()}
