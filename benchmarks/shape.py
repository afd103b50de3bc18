"""The shape of sparse attention models that are measured."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Every layer selects its own keys, all layers but the first have experts, four of which are chosen."""

    topk: int = 256
    hidden: int = 512
    layers: int = 4
    heads: int = 8
    experts: int = 16
    vocab: int = 8192

    @property
    def hf(self) -> dict[str, Any]:
        """The keys of config.json."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "moe_intermediate_size": self.hidden // 2,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "q_lora_rank": self.hidden // 2,
            "kv_lora_rank": self.hidden // 4,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "index_topk": self.topk,
            "index_head_dim": 64,
            "index_n_heads": 8,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            "max_position_embeddings": 1 << 18,
        }
