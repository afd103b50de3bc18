"""Drafts of the next tokens by the model's own multi-token prediction, as it is trained: each depth is one draft.

Depth d joins its input at token t with the token at t + d. A round drafts k tokens behind those that are known; what a
depth computed from drafts goes again, so that it never stands on a token that was rejected.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .block import Params, block_specs
from .config import ModelConfig
from .decode import CHUNK, Cache, engine_for, init_cache, keeping, logits_of, placed, trim
from .model import Engine, mtp_specs
from .mtp import joined


class Depths(NamedTuple):
    """What is kept for drafting. caches: of each depth, without what it computed from drafts.

    carried: of each depth, its state at the last token of the cache of the next one and one further, which that begins
    with, and whether there is one; None before the first round.
    """

    caches: tuple[Cache, ...]
    carried: tuple[tuple[Float[Tensor, "b d"], Bool[Tensor, "b"]], ...] | None

    def of(self, rows: Int[Tensor, "n"]) -> "Depths":
        """What is kept for these rows."""
        carried = None if self.carried is None else tuple((x[rows], real[rows]) for x, real in self.carried)
        return Depths(tuple(cache.of(rows) for cache in self.caches), carried)


def init_depths(cfg: ModelConfig, drafts: int, rows: int, room: int, like: Tensor, tp: int) -> Depths:
    """For so many drafts, of a model that has multi-token prediction; depths in excess of its weight sets share one."""
    layers = [cfg.num_hidden_layers + depth % cfg.num_nextn_predict_layers for depth in range(drafts)]
    made = (init_cache(cfg, rows, room + drafts, like.dtype, like.device, [layer], tp) for layer in layers)
    return Depths(tuple(made), None)


@torch.no_grad()
def draft(
    params: Params,
    x: Float[Tensor, "b s d"],
    known: Int[Tensor, "b s"],
    real: Bool[Tensor, "b s"] | None,
    depths: Depths,
    cfg: ModelConfig,
    engine: Engine,
    choose: Callable[[Float[Tensor, "b v"]], Sequence[int]],
) -> tuple[Int[Tensor, "b k"], Depths]:
    """As many tokens for each row as there are depths, and what is kept for the next round.

    x: the final states of the tokens that are new, at the right; known: the token behind each. real: which are there;
    all if None. choose: the logits of a depth -> the tokens that are drafted.
    """
    drafted, caches, carried, window, mask = known[:, :0], [], [], x, real
    for depth, cache in enumerate(depths.caches):
        ahead = torch.cat((known, drafted), 1)[:, -window.shape[1] :]
        window, cache = advance_depth(params, window, ahead, cache, mask, depth, cfg, engine)
        tokens = torch.tensor(choose(logits_of(params, window[:, -1], cfg, engine)), device=known.device)
        drafted = torch.cat((drafted, tokens[:, None]), 1)
        caches.append(trim(cache, torch.full_like(tokens, min(depth, cache.length))))
        carried.append(at_end(window, mask, depth + 1))
        if depths.carried is not None:
            window, mask = with_carried(window, mask, *depths.carried[depth])
    return drafted, Depths(tuple(caches), tuple(carried))


def at_end(x: Float[Tensor, "b s d"], real: Bool[Tensor, "b s"] | None, back: int) -> tuple[Tensor, Tensor]:
    """The state that stands so far from the end, and of which rows it is one."""
    if x.shape[1] < back:
        return torch.zeros_like(x[:, 0]), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    there = torch.ones(len(x), dtype=torch.bool, device=x.device) if real is None else real[:, -back]
    return x[:, -back], there


def with_carried(
    x: Float[Tensor, "b s d"], real: Bool[Tensor, "b s"] | None, carried: Float[Tensor, "b d"], there: Bool[Tensor, "b"]
) -> tuple[Float[Tensor, "b s+1 d"], Bool[Tensor, "b s+1"] | None]:
    """The states with the one that stands before the first real one of each row."""
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if real is None else real
    after = F.pad(mask, (1, 0))
    here = F.pad(mask, (0, 1), value=True) & ~after
    x = torch.where(here[..., None], carried[:, None], F.pad(x, (0, 0, 1, 0)))
    mask = after | (here & there[:, None])
    return x, None if bool(mask.all()) else mask


def advance_depth(
    params: Params,
    x: Float[Tensor, "b s d"],
    tokens: Int[Tensor, "b s"],
    cache: Cache,
    real: Bool[Tensor, "b s"] | None,
    depth: int,
    cfg: ModelConfig,
    engine: Engine,
) -> tuple[Float[Tensor, "b s d"], Cache]:
    """The states of the depth before, and the tokens further ahead -> the states of this one, and its cache."""
    number = depth % cfg.num_nextn_predict_layers
    layer, weights, comm = cfg.num_hidden_layers + number, params["mtp"][str(number)], engine.comm.alone()
    engine = replace(engine, comm=comm)
    norm, found = engine.fetch(weights, mtp_specs(cfg, layer), "norm"), []
    for start in range(0, x.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        y = joined(params, number, x[:, part], tokens[:, part], cfg, engine)
        past = cache.length
        where, cache = placed(cache, y.shape[1], None if real is None else real[:, part], comm)
        own = engine_for(y.shape[1], engine, keeping(comm, cache.kept[str(layer)], past))
        y, _, _ = own.layer(weights, block_specs(cfg, layer), y, where, None, cfg)
        found.append(engine.kernels.rms_norm(y, norm, cfg.rms_norm_eps))
    return torch.cat(found, 1), cache
