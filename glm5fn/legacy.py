"""GLM-4-9B under ChatGLM's names, as it was published before transformers had the model: the `glm` two-norm block.

Source: config.json and modeling_chatglm.py beside those weights, and transformers' own conversion of them.
"""

import re
from collections.abc import Mapping
from typing import Any

from .typed import ConfigError, build

MODEL_TYPE = "chatglm"
THETA = 1e4  # times rope_ratio
OURS = {  # key there -> key here
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "padded_vocab_size": "vocab_size",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
    "add_qkv_bias": "attention_bias",
    "tie_word_embeddings": "tie_word_embeddings",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}
ONLY = {  # key -> the one value of it that the `glm` block computes
    "rmsnorm": True,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "interleaved_qkv": False,
    "original_rope": True,
}
KEYS = {
    "model.embed_tokens.": "transformer.embedding.word_embeddings.",
    "model.norm.": "transformer.encoder.final_layernorm.",
    "lm_head.": "transformer.output_layer.",
    "model.layers.": "transformer.encoder.layers.",
    ".self_attn.o_proj.": ".self_attention.dense.",
    ".mlp.gate_up_proj.": ".mlp.dense_h_to_4h.",
    ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
}
FUSED = re.compile(r"\.self_attn\.([qkv])_proj\.")


def modern(keys: Mapping[str, Any]) -> dict[str, Any]:
    """ChatGLM's config.json, said in the keys of the `glm` family.

    Raises ConfigError for a key that is missing, and for a block of another kind.
    """
    for name, value in ONLY.items():
        if keys.get(name, value) != value:
            raise ConfigError(f"{name} ({keys[name]!r}) must be {value!r}: nothing else is supported in {MODEL_TYPE}")
    optional = ("tie_word_embeddings", "eos_token_id", "pad_token_id", "add_qkv_bias")
    if missing := [name for name in OURS if name not in keys and name not in optional]:
        raise ConfigError(f"config.json of a {MODEL_TYPE} lacks {', '.join(missing)}")
    grouped = keys.get("multi_query_attention", False)
    if grouped and "multi_query_group_num" not in keys:
        raise ConfigError(f"config.json of a {MODEL_TYPE} with multi_query_attention lacks multi_query_group_num")
    groups = keys["multi_query_group_num"] if grouped else keys["num_attention_heads"]
    return {ours: keys[name] for name, ours in OURS.items() if name in keys} | {
        "model_type": "glm",
        "attention_bias": keys.get("add_qkv_bias", False),
        "num_key_value_heads": groups,
        "partial_rotary_factor": 0.5,
        "rope_theta": THETA * build(float, keys.get("rope_ratio", 1.0), "rope_ratio"),
    }


def place(key: str, dims: Mapping[str, int]) -> tuple[str, int, int | None]:
    """Where a tensor of the `glm` family stands: its key, its first row there, and the rows there if it is fused.

    >>> place("model.layers.3.self_attn.k_proj.bias", {"heads": 32, "kv_heads": 2, "head_dim": 128})
    ('transformer.encoder.layers.3.self_attention.query_key_value.bias', 4096, 4608)
    """
    fused = FUSED.search(key)
    key = FUSED.sub(".self_attention.query_key_value.", key)
    for ours, theirs in KEYS.items():
        key = key.replace(ours, theirs)
    if not fused:
        return key, 0, None
    queries, pairs = dims["heads"] * dims["head_dim"], dims["kv_heads"] * dims["head_dim"]
    return key, {"q": 0, "k": queries, "v": queries + pairs}[fused[1]], queries + 2 * pairs
