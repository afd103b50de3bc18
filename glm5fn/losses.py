"""What training minimises."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .batch import prepare
from .block import Params
from .comm import LOCAL, Comm
from .config import ModelConfig
from .kernels.reference import IGNORE
from .model import Engine, add, head_weight, trunk
from .mtp import depths


def counts(batch: Mapping[str, Tensor], cfg: ModelConfig, comm: Comm = LOCAL) -> dict[str, Int[Tensor, ""]]:
    """By what the parts of the loss are divided; each adds up over batches and ranks.

    labels: positions that must predict the next token. mtp_1, ...: those that must predict at that depth.
    real: tokens that are not padding. documents: in each row, one without segments.
    """
    own = prepare(batch, cfg.mtp_depths, comm)
    real = torch.ones_like(own.begins) if own.where.real is None else own.where.real
    found = {"labels": comm.own(own.targets != IGNORE), "real": real, "documents": own.begins}
    found |= {f"mtp_{d}": comm.own(further.targets != IGNORE) for d, further in enumerate(own.further, 1)}
    return {name: part.sum() for name, part in found.items()}


def loss(
    params: Params,
    batch: Mapping[str, Tensor],
    cfg: ModelConfig,
    count: Mapping[str, Tensor | float] | None = None,
    **how: Any,
) -> tuple[Float[Tensor, ""], dict[str, Any]]:
    """Cross-entropy in nats a token, plus the terms that `how` asks for: each a sum, divided by its `count`.

    batch: tokens and targets [b, s] (already shifted, -100 for none), optionally positions and segments.
    count: those of the whole step, over all ranks and accumulated batches, so that the parts add up to its mean; those
    of this batch when absent. how: terms (the cross-entropy alone by default), comm, kernels, block and recompute, see
    `model.Engine`.
    Returns the loss and the metrics, each a sum over this batch that adds up over batches and ranks: nll, mtp_1, ...,
    kl, balance and z, and load, the tokens that each expert got, by the path of its layer.
    """
    engine = Engine(**how)
    own = prepare(batch, cfg.mtp_depths, engine.comm)
    count = counts(batch, cfg, engine.comm) if count is None else count
    indexer, router, mtp = engine.terms.indexer, engine.terms.router, engine.terms.mtp
    x, terms, started = trunk(params, own.tokens, cfg, own.where, engine, head=True)

    def nll(x: Tensor, targets: Tensor, detach: bool = False, started: Any = None) -> Tensor:
        head, x = head_weight(params, cfg, engine, started), engine.comm.enter(x).flatten(0, 1)
        head = head.detach() if detach else head
        return engine.comm.token_loss(engine.kernels.token_loss, x, head, targets.flatten())

    sums = {"nll": nll(x, own.targets, started=started)}
    weights = {"nll": (1.0, "labels"), "kl": (indexer.coef, "real")}
    weights |= {"balance": (router.balance_coef, "documents"), "z": (router.z_coef, "real")}
    if mtp.coef and cfg.mtp_depths:
        start = x.detach() if mtp.detach_trunk else x
        further = zip(own.further, depths(params, start, cfg, own, engine), strict=True)
        for d, (here, depth) in enumerate(further, 1):
            sums[f"mtp_{d}"] = nll(depth.x, here.targets, mtp.detach_head)
            weights[f"mtp_{d}"] = (mtp.coef / cfg.mtp_depths, f"mtp_{d}")
            terms = add(terms, depth.terms)
    sums |= {name: value for name, value in terms.items() if name != "load"}
    parts = [weights[name][0] * value / at_least_one(count[weights[name][1]]) for name, value in sums.items()]
    metrics = {name: value.detach() for name, value in sums.items()}
    return torch.stack(parts).sum(), metrics | ({"load": terms["load"]} if "load" in terms else {})


def at_least_one(count: Tensor | float) -> Tensor | float:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
