"""Decoding: the keys of all tokens so far are kept, so that each new token is computed once.

A cache is a value: `advance` takes one and gives the next. Both may share memory, since tokens are written behind those
that are there: what was kept before stays as it was until another continuation is written over the same places.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .batch import Documents
from .block import Params, block, block_specs
from .comm import Comm, Span
from .config import ModelConfig
from .model import Engine, head_weight, trunk
from .tree import tree_map

CHUNK = 512  # tokens of a prompt that are computed at once


class Cache(NamedTuple):
    """What is kept of b rows of tokens, which stand in the first `length` of the places, perhaps with gaps.

    kept: by layer, what its attention gathers: tensors [b, room, ...]. segments: 1 where a token stands, 0 where none
    does [b, room].
    """

    kept: Mapping[str, Mapping[str, Tensor]]
    segments: Int[Tensor, "b room"]
    length: int

    @property
    def counts(self) -> Int[Tensor, "b"]:
        """How many tokens each row has."""
        return self.segments[:, : self.length].sum(1)

    def of(self, rows: Int[Tensor, "n"]) -> "Cache":
        """The cache of these rows."""
        return self._replace(kept=tree_map(lambda part: part[rows], self.kept), segments=self.segments[rows])


def cache_dims(cfg: ModelConfig, layer: int, tp: int = 1) -> dict[str, tuple[int, ...]]:
    """What a layer keeps of each token: keys and values, or one latent with its rotated dims; the keys of an indexer.

    The layers behind the last one are those of multi-token prediction. tp: how many ranks share the heads.
    """
    if cfg.attention == "gqa":
        size = (cfg.num_key_value_heads // tp, cfg.head_dim)
        return {"k": size, "v": size}
    found: dict[str, tuple[int, ...]] = {"latent": (cfg.kv_lora_rank + cfg.qk_rope_head_dim,)}
    indexed = "indexer" in block_specs(cfg, layer)["attn"]
    return found | ({"index": (cfg.index_head_dim,)} if indexed else {})


def bytes_of_token(cfg: ModelConfig, dtype: torch.dtype) -> list[dict[str, int]]:
    """The bytes that each layer keeps of a token, by what they hold."""
    dims = [cache_dims(cfg, layer) for layer in range(cfg.num_hidden_layers)]
    return [{name: torch.Size(size).numel() * dtype.itemsize for name, size in found.items()} for found in dims]


def init_cache(
    cfg: ModelConfig,
    rows: int,
    room: int,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    layers: Sequence[int] | None = None,
    tp: int = 1,
) -> Cache:
    """A cache without tokens, with room for so many in each row; it grows where more come.

    layers: those of the model, when absent. tp: how many ranks share the heads.
    """
    kept = {
        str(layer): {
            name: torch.empty(rows, room, *size, dtype=dtype, device=device)
            for name, size in cache_dims(cfg, layer, tp).items()
        }
        for layer in (range(cfg.num_hidden_layers) if layers is None else layers)
    }
    return Cache(kept, torch.zeros(rows, room, dtype=torch.long, device=device), 0)


def with_room(cache: Cache, room: int) -> Cache:
    """The cache, with places for so many tokens; if it has fewer, with half as many more as it had at least."""
    there = cache.segments.shape[1]
    if room <= there:
        return cache
    more = max(room, there * 3 // 2) - there

    def grown(values: Tensor) -> Tensor:
        return torch.cat((values, values.new_zeros(values.shape[0], more, *values.shape[2:])), 1)

    return Cache(tree_map(grown, cache.kept), grown(cache.segments), cache.length)


def keeping(comm: Comm, kept: Mapping[str, Tensor], past: int) -> Comm:
    """The exchanges of a layer in which its keys are added to those that are kept, and all of them are attended to."""

    def gather(*parts: Tensor) -> tuple[Tensor, ...]:
        found = []
        for part, place in zip(comm.gather(*parts), kept.values(), strict=True):
            end = past + part.shape[1]
            place[:, past:end] = part
            found.append(place[:, :end])
        return tuple(found)

    def spans(steps: int) -> tuple[Span, ...]:
        return tuple(span._replace(end=past + span.end) for span in comm.spans(steps))

    return replace(comm, gather=gather, past=past, spans=spans)


def engine_for(steps: int, engine: Engine, comm: Comm) -> Engine:
    """An engine with these exchanges, for so many tokens of each row: a compiled layer runs one alone, since each other
    number is another graph, and gains less."""
    return replace(engine, comm=comm, block=engine.block if steps == 1 else block)


class Placed(NamedTuple):
    """Where new tokens stand, and the cache whose places are taken for them."""

    where: Documents
    cache: Cache


def placed(cache: Cache, steps: int, real: Bool[Tensor, "b s"] | None, comm: Comm) -> Placed:
    """Take the next places of a cache for so many tokens of each row, of which this rank computes its own."""
    cache = with_room(cache, cache.length + steps)
    past, end = cache.length, cache.length + steps
    if real is None:
        ahead = torch.arange(steps, device=cache.segments.device).expand(len(cache.segments), -1)
    else:
        ahead = (real.cumsum(1) - 1).clamp(min=0)
    positions = cache.counts[:, None] + ahead
    cache.segments[:, past:end] = 1 if real is None else real.long()
    cache = cache._replace(length=end)
    segments = cache.segments[:, :end]
    gaps = bool((segments == 0).any())
    return Placed(Documents(comm.mine(positions), segments if gaps else None), cache)


@torch.no_grad()
def advance(
    params: Params,
    tokens: Int[Tensor, "b s"],
    cache: Cache,
    cfg: ModelConfig,
    engine: Engine,
    real: Bool[Tensor, "b s"] | None = None,
) -> tuple[Float[Tensor, "b s d"], Cache]:
    """Token ids -> hidden states after the final norm, and the cache with their keys.

    real: which of them are tokens; all if None. The others leave a gap, which nothing attends to.
    Ranks that share rows compute a part of the tokens each where these can be cut, and all of them else; each has all
    of the states.
    """
    cut = tokens.shape[1] % engine.comm.parts == 0
    comm = engine.comm if cut else engine.comm.alone()
    past = cache.length
    where, cache = placed(cache, tokens.shape[1], real, comm)

    def comm_of(layer: int) -> Comm:
        return keeping(comm, cache.kept[str(layer)], past)

    x = trunk(params, comm.mine(tokens), cfg, where, engine_for(tokens.shape[1], engine, comm), comm_of).x
    return comm.gather(comm.enter(x))[0], cache


@torch.no_grad()
def prefill(
    params: Params,
    tokens: Int[Tensor, "b s"],
    cache: Cache,
    cfg: ModelConfig,
    engine: Engine,
    real: Bool[Tensor, "b s"] | None = None,
    *,
    chunk: int = CHUNK,
    every: bool = False,
) -> tuple[Float[Tensor, "b s d"], Cache]:
    """The states of a prompt, which is computed in chunks, and the cache with its keys; of its last token alone by
    default. A prompt whose tokens cannot be cut over the ranks that share it gets gaps before its first."""
    if missing := -tokens.shape[1] % engine.comm.parts:
        real = F.pad(torch.ones_like(tokens, dtype=torch.bool) if real is None else real, (missing, 0))
        tokens = F.pad(tokens, (missing, 0))
    chunk += -chunk % engine.comm.parts
    states = []
    for start in range(0, tokens.shape[1], chunk):
        part = slice(start, start + chunk)
        x, cache = advance(params, tokens[:, part], cache, cfg, engine, None if real is None else real[:, part])
        states = [*states, x] if every else [x[:, -1:]]
    x = torch.cat(states, 1)
    return x[:, missing:] if every else x, cache


def logits_of(params: Params, x: Float[Tensor, "*b d"], cfg: ModelConfig, engine: Engine) -> Float[Tensor, "*b v"]:
    return engine.logits(x, head_weight(params, cfg, engine))


def trim(cache: Cache, dropped: Int[Tensor, "b"]) -> Cache:
    """The cache without the last so many tokens of each row; rows that lose more than others get gaps."""
    length = cache.length - int(dropped.min())
    segments = cache.segments.clone()
    places = torch.arange(segments.shape[1], device=segments.device)
    segments[places >= (cache.length - dropped)[:, None]] = 0
    return Cache(cache.kept, segments, length)
