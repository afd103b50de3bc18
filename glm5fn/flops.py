"""How many parameters a model has, and how many FLOPs it costs, read off its rows."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from .config import ModelConfig
from .model import model_specs
from .settings import Terms
from .spec import Param, rows, shape, unused


class Parameters(NamedTuple):
    """Numbers of parameters; a router's balance bias is none, since nothing trains it by gradient.

    total, active: of the main stack, and of it those that one token meets: `num_experts_per_tok` experts of each layer.
    embedding: those of both that are only looked up; none if the head is tied to them.
    mtp, mtp_active: of the weight sets of multi-token prediction, which `total` and `active` leave out.
    """

    total: int
    active: int
    embedding: int
    mtp: int
    mtp_active: int


def parameters(cfg: ModelConfig) -> Parameters:
    total = active = mtp = mtp_active = 0
    for path, _, n, met in sizes(cfg):
        if path.startswith("mtp."):
            mtp, mtp_active = mtp + n, mtp_active + met
        else:
            total, active = total + n, active + met
    embedding = 0 if cfg.tie_word_embeddings else cfg.vocab_size * cfg.hidden_size
    return Parameters(total, active, embedding, mtp, mtp_active)


def sizes(cfg: ModelConfig) -> Iterator[tuple[str, Param, int, int]]:
    """Each tensor of parameters: its path, its row, how many it has, and how many of them one token meets."""
    for path, row in rows(model_specs(cfg)):
        if row.part != "state":
            n = math.prod(shape(row, cfg.dims))
            yield path, row, n, n // cfg.n_routed_experts * cfg.num_experts_per_tok if row.of_experts else n


def flops_per_token(cfg: ModelConfig, seq_len: int, terms: Terms) -> float:
    """Matmul FLOPs of a training step for one token of a sequence, causal pairs only; recomputation not counted.

    A weight of a matrix that the token meets costs 2 forward and 4 backward, the head's whether tied or not. So does
    attention for each key, head and dim of query-key and of value, for (seq_len + 1) / 2 keys a query on average, or
    for min(keys, index_topk) of them. A depth of multi-token prediction costs its join, a layer and the head.
    Index scores are of all causal pairs in each layer that selects, and no gradient passes through the selection: an
    indexer costs 2 forward where it has something to drop, and what it learns from 2 for its weights, since its inputs
    are detached, and 4 for the scores of its loss. In its dense warm-up all else runs forward only, on all keys.
    """
    stage, taught = terms.indexer.stage, bool(terms.indexer.coef) and terms.indexer.stage != "frozen"
    warmup = stage == "dense-warmup"
    depths, sets = cfg.mtp_depths if terms.mtp.coef else 0, cfg.num_nextn_predict_layers
    drops = 0 < cfg.index_topk < seq_len
    selects, taught = drops and not warmup, taught and cfg.index_topk > 0
    passes = 2 if warmup else 6
    indexer = 2 * (selects or taught) + 2 * taught
    flops = 0.0
    for path, row, _, active in sizes(cfg):
        if row.fan_in and not unused(path, depths):
            uses = depths if path.startswith("mtp.") and sets == 1 else 1  # one weight set serves all depths
            flops += (indexer if row.part == "indexer" else passes) * uses * active
    head = cfg.vocab_size * cfg.hidden_size
    flops += passes * head * (depths + cfg.tie_word_embeddings)
    qk_and_v = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim + cfg.v_head_dim
    dims = cfg.num_attention_heads * (qk_and_v if cfg.attention == "mla" else 2 * cfg.head_dim)
    causal = (seq_len + 1) / 2
    kept = cfg.index_topk * (1 - (cfg.index_topk - 1) / (2 * seq_len)) if selects else causal
    flops += passes * (cfg.num_hidden_layers + depths) * dims * kept
    full = cfg.indexers.count("full") + depths
    scores = 2 * (causal if selects else kept * taught) + 4 * kept * taught
    return flops + full * cfg.index_n_heads * cfg.index_head_dim * scores
