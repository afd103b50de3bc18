"""config.json of the MoE and GLM-5 families: what is read, what is refused by name, and what is written."""

import json
from dataclasses import replace

import pytest
from transformers import AutoConfig

from configs import MODELS
from glm5fn.config import ABSENT, ModelConfig
from glm5fn.typed import ConfigError

GLM5 = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 96,
    "hidden_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "max_position_embeddings": 256,
    "eos_token_id": [2, 3, 5],
    "pad_token_id": 2,
}
GLM45 = {
    "model_type": "glm4_moe",
    "vocab_size": 96,
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "use_qk_norm": True,
}
FULL, SHARED = "full", "shared"
WORDS = [FULL, FULL, SHARED, FULL, SHARED, FULL]
MLA = {
    "attention": "mla",
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
PARTS = {  # of our own type, to be combined
    "moe": {"n_routed_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    "dsa": {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16, "index_topk_freq": 2},
    "mtp": {"num_nextn_predict_layers": 1, "num_mtp_depths": 3},
}
OWN = {
    "model_type": "glm5_dense",
    "vocab_size": 96,
    "hidden_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 56,
}
GQA = {"num_key_value_heads": 2, "head_dim": 16}


def read_by_transformers(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("keys, model", [(GLM5, "GlmMoeDsaForCausalLM"), (GLM45, "Glm4MoeForCausalLM")])
def test_transformers_reads_our_export_as_it_reads_the_original(keys, model, tmp_path):
    cfg = ModelConfig.from_hf(keys)
    assert ModelConfig.from_hf(cfg.to_hf()) == cfg
    theirs, ours = (read_by_transformers(config, tmp_path).to_dict() for config in (keys, cfg.to_hf()))
    differing = {key for key in theirs if theirs[key] != ours.get(key)}
    assert differing <= {"architectures"}
    assert ours["architectures"] == {"glm_moe_dsa": ["GlmMoeDsaForCausalLM"]}.get(
        cfg.model_type, ["Glm4MoeForCausalLM"]
    )
    assert cfg.to_hf()["topk_method"] == "noaux_tc" and cfg.to_hf()["scoring_func"] == "sigmoid"


@pytest.mark.parametrize("family", ["glm4_moe", "glm_moe_dsa"])
def test_absent_keys_are_what_transformers_takes_for_them(family, tmp_path):
    bare = {name: GLM5[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")}
    bare |= {"model_type": family, "num_attention_heads": 8} | ({"num_key_value_heads": 8} if "4" in family else {})
    cfg, theirs = ModelConfig.from_hf(bare), read_by_transformers(bare, tmp_path)
    for name in ABSENT[family].keys() - {"attention", "index_topk_freq", "index_skip_topk_offset"}:
        wanted = theirs.rope_parameters if name == "partial_rotary_factor" else theirs.to_dict()
        assert getattr(cfg, name) == wanted.get(name, 0), name
    assert cfg.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ModelConfig.from_hf(cfg.to_hf()) == cfg


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_read_back_equal(name):
    assert ModelConfig.from_hf(MODELS[name].to_hf()) == MODELS[name]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("parts", ["", "moe", "mtp", "moe mtp", "dsa", "moe dsa mtp"])
@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_every_combination_of_our_own_type_is_read_back_equal_and_writes_no_part_that_it_lacks(attention, parts, tied):
    if attention == "gqa" and "dsa" in parts:
        with pytest.raises(ConfigError, match="index_topk"):
            ModelConfig(**OWN, **GQA, **PARTS["dsa"])
        return
    own = OWN | (MLA if attention == "mla" else GQA)
    for part in parts.split():
        own |= PARTS[part]
    cfg = ModelConfig(**own, tie_word_embeddings=tied)
    written = cfg.to_hf()
    assert ModelConfig.from_hf(json.loads(json.dumps(written))) == cfg
    lacking = {**MLA, **GQA, **PARTS["moe"], **PARTS["dsa"], **PARTS["mtp"]}.keys() - own.keys()
    assert not lacking & written.keys()


def test_a_dense_export_has_no_key_of_parts_that_its_family_lacks():
    lacking = {*PARTS["moe"], *PARTS["dsa"], *PARTS["mtp"], *MLA, "topk_method", "scoring_func", "mlp_layer_types"}
    assert not lacking & MODELS["glm4-9b"].to_hf().keys()


@pytest.mark.parametrize("number", [18, 10])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_head_dim_sizes_nothing_in_mla_and_is_carried_along(number, place, tmp_path):
    more = {"head_dim": number}
    cfg = ModelConfig.from_hf(more | GLM5 if place == "before" else GLM5 | more)
    assert cfg == replace(ModelConfig.from_hf(GLM5), extra={"head_dim": number})
    assert cfg.rotary_dim == 8 and cfg.dims["qk_dim"] == 18
    assert cfg.to_hf()["head_dim"] == number and "head_dim" not in ModelConfig.from_hf(GLM5).to_hf()
    theirs = read_by_transformers(cfg.to_hf(), tmp_path)
    assert (theirs.qk_head_dim, theirs.qk_rope_head_dim, theirs.num_key_value_heads) == (18, 8, 4)


def test_keys_and_values_of_mla_have_as_many_heads_as_queries_in_the_export():
    keys = {key: value for key, value in GLM5.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_hf(keys) == ModelConfig.from_hf(GLM5)
    assert ModelConfig.from_hf(keys).to_hf()["num_key_value_heads"] == 4


def test_theta_is_the_same_flat_nested_or_both_in_mla():
    nested = ModelConfig.from_hf(GLM5)
    flat = {key: value for key, value in GLM5.items() if key != "rope_parameters"} | {"rope_theta": 8e6}
    assert ModelConfig.from_hf(flat) == ModelConfig.from_hf(flat | GLM5) == nested and nested.rope_theta == 8e6


@pytest.mark.parametrize(
    "schedule",
    [
        {"indexer_types": WORDS},
        {"index_topk_pattern": "FFSFSF"},
        {"index_topk_pattern": list("FFSFSF")},
        {"index_topk_pattern": WORDS},
        {"index_topk_freq": 2},
        {"index_topk_freq": 2, "index_skip_topk_offset": None},
        {"index_topk_freq": 2, "index_skip_topk_offset": 2, "indexer_types": WORDS},
        {"index_topk_freq": 5, "index_skip_topk_offset": 3, "indexer_types": WORDS, "index_topk_pattern": None},
    ],
    ids=str,
)
def test_the_schedule_of_indexers_is_found_in_each_spelling(schedule, tmp_path):
    cfg = ModelConfig.from_hf(GLM5 | schedule)
    assert cfg.indexers == tuple(WORDS) and cfg.to_hf()["indexer_types"] == WORDS
    assert ModelConfig.from_hf(cfg.to_hf()) == cfg
    assert read_by_transformers(cfg.to_hf(), tmp_path).indexer_types == WORDS


@pytest.mark.parametrize("freq", [{}, {"index_topk_freq": 1}, {"index_topk_freq": None}], ids=str)
def test_without_a_schedule_every_layer_has_an_indexer(freq):
    assert ModelConfig.from_hf(GLM5 | freq).indexers == (FULL,) * 6


def test_of_glm52s_layers_21_have_an_indexer():
    kinds = MODELS["glm5.2-744b"].indexers
    assert [i for i, kind in enumerate(kinds) if kind == FULL] == [0, 1, *range(2, 75, 4)]


@pytest.mark.parametrize(
    "more, named",
    [
        ({"indexer_types": [SHARED, *WORDS[1:]]}, "layer 0 must have an indexer"),
        ({"indexer_types": WORDS[:4]}, "layer 4 has none"),
        ({"indexer_types": [*WORDS, FULL]}, "there is no layer 6"),
        ({"indexer_types": [*WORDS[:2], "half", *WORDS[3:]]}, "layer 2: indexer_types says 'half'"),
        ({"index_topk_pattern": "FFSXSF"}, "layer 3: index_topk_pattern says 'X'"),
        ({"index_topk_freq": 0}, "index_topk_freq"),
        ({"attention_bias": True}, "attention_bias"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4}, "first_k_dense_replace .1. must be 2"),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 4}, "mlp_layer_types has 5 entries"),
        ({"mlp_layer_types": ["dense", "sparse", "dense"] + ["sparse"] * 3}, "layer 2: mlp_layer_types says 'dense'"),
        ({"mlp_layer_types": ["dense", "moe"] + ["sparse"] * 4}, "layer 1: mlp_layer_types says 'moe'"),
        ({"num_experts": 9}, "num_experts"),
        ({"n_group": 3}, "n_group"),
        ({"num_experts_per_tok": 5, "n_group": 4, "topk_group": 2}, "num_experts_per_tok"),
        ({"index_head_dim": 6}, "index_head_dim"),
        ({"num_nextn_predict_layers": 2, "num_mtp_depths": 3}, "num_mtp_depths"),
    ],
    ids=str,
)
def test_what_would_be_computed_otherwise_is_refused_by_name(more, named):
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf(GLM5 | more)


@pytest.mark.parametrize("more", [{}, {"indexer_rope_interleave": True}, {"indexer_rope_interleave": None}], ids=str)
def test_interleaved_indexers_are_the_rule(more):
    assert replace(ModelConfig.from_hf(GLM5 | more), extra={}) == ModelConfig.from_hf(GLM5)


def test_mlp_layer_types_alone_decide_which_layers_are_dense():
    keys = {key: value for key, value in GLM5.items() if key != "first_k_dense_replace"}
    cfg = ModelConfig.from_hf(keys | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4})
    assert [cfg.is_moe(layer) for layer in range(7)] == [False] * 2 + [True] * 5
    dense = ModelConfig.from_hf(keys | {"mlp_layer_types": ["dense"] * 6})
    assert [dense.is_moe(layer) for layer in range(7)] == [False] * 6 + [True]  # that of multi-token prediction


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_experts_are_counted_under_other_names_too(name):
    keys = {key: value for key, value in GLM5.items() if key != "n_routed_experts"}
    assert ModelConfig.from_hf(keys | {name: 8}) == ModelConfig.from_hf(GLM5 | {name: 8}) == ModelConfig.from_hf(GLM5)
