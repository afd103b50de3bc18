"""How many parameters a model has, and how many FLOPs it costs, read off its rows."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from .config import ModelConfig
from .model import model_specs
from .spec import Param, rows, shape


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
            yield path, row, n, n // cfg.n_routed_experts * cfg.num_experts_per_tok if "expert" in row.names else n


def flops_per_token(cfg: ModelConfig, seq_len: int) -> float:
    """Matmul FLOPs of forward and backward for one token of a sequence, causal pairs only; recomputation not counted.

    Six for each weight of a matrix that the token meets, the head included whether tied or not. Attention costs, for
    each key, head and dim of query-key and of value, 2 FLOPs forward and twice that backward, for (seq_len + 1) / 2
    keys a query on average, or for min(keys, index_topk) of them. A depth of multi-token prediction costs its join, a
    layer and the head. The indexer counts where it has something to drop, seq_len > index_topk, and forward only: its
    scores are of all causal pairs in each layer that selects, but no gradient passes through the selection.
    """
    depths, sets = cfg.mtp_depths, cfg.num_nextn_predict_layers
    selects = 0 < cfg.index_topk < seq_len
    flops = 0
    for path, row, _, active in sizes(cfg):
        if row.fan_in and (row.part != "indexer" or selects):
            # One weight set serves all depths; several serve one each, and those beyond the last depth none.
            uses = 1 if not path.startswith("mtp.") else depths if sets == 1 else int(path.split(".")[1]) < depths
            flops += (2 if row.part == "indexer" else 6) * uses * active
    head = cfg.vocab_size * cfg.hidden_size
    flops += 6 * head * (depths + cfg.tie_word_embeddings)
    qk_and_v = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim + cfg.v_head_dim
    dims = cfg.num_attention_heads * (qk_and_v if cfg.attention == "mla" else 2 * cfg.head_dim)
    causal = (seq_len + 1) / 2
    kept = cfg.index_topk * (1 - (cfg.index_topk - 1) / (2 * seq_len)) if selects else causal
    flops += 6 * (cfg.num_hidden_layers + depths) * dims * kept
    if selects:
        full = cfg.indexers.count("full") + depths
        flops += 2 * full * cfg.index_n_heads * cfg.index_head_dim * causal
    return flops
