"""How many FLOPs a model costs, read off its rows."""

import math

from .config import ModelConfig
from .model import model_specs
from .spec import rows, shape


def flops_per_token(cfg: ModelConfig, seq_len: int) -> float:
    """Matmul FLOPs of forward and backward for one token of a sequence, causal pairs only; recomputation not counted.

    Six for each weight of a matrix, the output projection included whether tied or not; attention costs 2 x 2 FLOPs a
    pair, head and dim forward and twice that backward, for (seq_len + 1) / 2 keys a query on average.
    """
    dims = cfg.dims
    weights = sum(math.prod(shape(row, dims)) for _, row in rows(model_specs(cfg)) if row.fan_in)
    if cfg.tie_word_embeddings:
        weights += cfg.vocab_size * cfg.hidden_size
    pairs = cfg.num_hidden_layers * cfg.num_attention_heads * cfg.head_dim * (seq_len + 1) / 2
    return 6 * weights + 12 * pairs
