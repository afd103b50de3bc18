"""GLM-4-9B under ChatGLM's names becomes the same model as under transformers'."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from test_convert import run  # noqa: F401
from test_hf_experts import edit, randomized, same, stored_tensors

from glm5fn import ConfigError, ModelConfig, init_params, load, save_hf
from glm5fn.files import MODEL
from glm5fn.hf import open_model
from glm5fn.tree import flatten

CHATGLM = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"},
    "num_layers": 12,
    "padded_vocab_size": 96,
    "hidden_size": 40,
    "ffn_hidden_size": 56,
    "kv_channels": 16,
    "num_attention_heads": 6,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "seq_length": 256,
    "layernorm_epsilon": 1.5625e-7,
    "rope_ratio": 500,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "original_rope": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": [5, 6, 7],
    "pad_token_id": 5,
}
GLM = ModelConfig(
    model_type="glm",
    vocab_size=96,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=12,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    attention_bias=True,
    partial_rotary_factor=0.5,
    rope_theta=5e6,
    rms_norm_eps=1.5625e-7,
    max_position_embeddings=256,
    eos_token_id=(5, 6, 7),
    pad_token_id=5,
)


def released(directory, config=CHATGLM, cfg=GLM):
    """The same random model under both names: ChatGLM's directory, ours, and its parameters."""
    params = randomized(init_params(cfg, dtype=torch.bfloat16))
    save_hf(directory / "glm", params, cfg)
    state, found = stored_tensors(directory / "glm"), {}
    for i in range(cfg.num_hidden_layers):
        ours, theirs = f"model.layers.{i}", f"transformer.encoder.layers.{i}"
        for kind in ("weight", "bias") if cfg.attention_bias else ("weight",):
            parts = [state.pop(f"{ours}.self_attn.{name}_proj.{kind}") for name in "qkv"]
            found[f"{theirs}.self_attention.query_key_value.{kind}"] = torch.cat(parts)
        found[f"{theirs}.self_attention.dense.weight"] = state.pop(f"{ours}.self_attn.o_proj.weight")
        found[f"{theirs}.mlp.dense_h_to_4h.weight"] = state.pop(f"{ours}.mlp.gate_up_proj.weight")
        found[f"{theirs}.mlp.dense_4h_to_h.weight"] = state.pop(f"{ours}.mlp.down_proj.weight")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{theirs}.{norm}.weight"] = state.pop(f"{ours}.{norm}.weight")
    found["transformer.embedding.word_embeddings.weight"] = state.pop("model.embed_tokens.weight")
    found["transformer.encoder.final_layernorm.weight"] = state.pop("model.norm.weight")
    if not cfg.tie_word_embeddings:
        found["transformer.output_layer.weight"] = state.pop("lm_head.weight")
    found["transformer.rotary_pos_emb.inv_freq"] = torch.ones(4, dtype=torch.bfloat16)
    assert not state
    (directory / "chatglm").mkdir()
    save_file(found, directory / "chatglm" / MODEL, {"format": "pt"})
    (directory / "chatglm" / "config.json").write_text(json.dumps(config))
    return directory / "chatglm", directory / "glm", params


def test_it_becomes_the_same_model_as_under_the_names_of_transformers(tmp_path, run):  # noqa: F811
    old, new, params = released(tmp_path)
    cfg, loaded = load(old)
    assert cfg == GLM and same(flatten(loaded), flatten(params))
    code, said = run("hf-to-native", old, tmp_path / "native")
    assert code == 0, said
    run("native-to-hf", tmp_path / "native", tmp_path / "hf")
    assert same(stored_tensors(tmp_path / "hf"), stored_tensors(new))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "glm" and config["architectures"] == ["GlmForCausalLM"] and "auto_map" not in config
    checksums = {run("inspect", place, "--verify")[1].split()[-1] for place in (old, new, tmp_path / "native")}
    assert len(checksums) == 1


def test_without_grouped_queries_and_biases_or_with_a_tied_head_too(tmp_path):
    cfg = replace(GLM, num_key_value_heads=6, attention_bias=False, tie_word_embeddings=True, rope_theta=1e4)
    config = CHATGLM | {"multi_query_attention": False, "add_qkv_bias": False, "tie_word_embeddings": True}
    config.pop("rope_ratio")
    old, _, params = released(tmp_path, config, cfg)
    found, loaded = load(old)
    assert found == cfg and same(flatten(loaded), flatten(params))
    edit(old, lambda tensors: tensors.update({"transformer.output_layer.weight": params["embed"].clone()}))
    assert same(flatten(load(old)[1]), flatten(params))


def test_any_region_of_a_fused_tensor_is_read(tmp_path):
    old, _, params = released(tmp_path)
    leaves, values = flatten(open_model(old)[1]), flatten(params)
    for name in ("q", "k", "v", "k_bias", "v_bias"):
        leaf, value = leaves[f"layers.3.attn.{name}"], values[f"layers.3.attn.{name}"]
        for dim, size in enumerate(leaf.shape):
            region = tuple((size // 2, size - size // 2) if i == dim else (0, n) for i, n in enumerate(leaf.shape))
            assert torch.equal(leaf.read(region), value.narrow(dim, size // 2, size - size // 2)), (name, dim)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rmsnorm": False}, "rmsnorm (False) must be True"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ({"add_bias_linear": True}, "add_bias_linear (True) must be False"),
        ({"num_layers": None}, "lacks num_layers"),
        ({"rope_ratio": "much"}, "rope_ratio ('much') must be of type float"),
        ({"multi_query_group_num": None}, "with multi_query_attention lacks multi_query_group_num"),
        ({"multi_query_group_num": 4}, "must be a multiple of"),
    ],
)
def test_a_block_of_another_kind_is_refused_by_name(change, told):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_hf(CHATGLM | change)
    assert told in str(error.value)
