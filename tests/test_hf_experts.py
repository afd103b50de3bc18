"""Checkpoints of the MoE and GLM-5 families: experts, the router's state, and the layers of multi-token prediction."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_hf_glm5_config import GLM5, GLM45, WORDS
from transformers import AutoConfig, AutoModelForCausalLM

from glm5fn.config import ModelConfig
from glm5fn.files import MODEL, TensorFiles
from glm5fn.hf import load, open_model
from glm5fn.model import init_params, model_specs
from glm5fn.save import save, save_hf
from glm5fn.spec import cut, rows, whole
from glm5fn.tree import flatten, tree_map

FAMILIES = {
    "glm_moe_dsa": GLM5 | {"indexer_types": WORDS, "n_shared_experts": 2},
    "glm_moe_dsa of 12 layers": GLM5 | {"num_hidden_layers": 12, "index_topk_freq": 4, "index_skip_topk_offset": 3},
    "glm4_moe": GLM45 | {"n_routed_experts": 12, "attention_bias": True},
}
WITH_MTP = ModelConfig.from_hf(GLM5 | {"num_hidden_layers": 4})
BF16 = torch.bfloat16


def randomized(tree, seed=0):
    """Every leaf random, in its own dtype."""
    generator = torch.Generator().manual_seed(seed)
    return tree_map(lambda leaf: torch.randn(leaf.shape, generator=generator).to(leaf.dtype), tree)


def stored_tensors(directory):
    files = TensorFiles.open(directory)
    return {key: files.read(key) for key in files.rows}


def same(a, b):
    """Whether two flat dicts hold the same bits."""
    return a.keys() == b.keys() and all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a)


def edit(directory, change, **settings):
    """Change the tensors of a directory of one file, and its config."""
    tensors = load_file(directory / MODEL)
    change(tensors)
    save_file(tensors, directory / MODEL, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))
    return directory


def quietly(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


@pytest.fixture(scope="module", params=FAMILIES)
def released(request, tmp_path_factory):
    """A directory as transformers writes it, in shards, with every number random; and its model."""
    directory = tmp_path_factory.mktemp("hf")
    (directory / "config.json").write_text(json.dumps(FAMILIES[request.param]))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    torch.manual_seed(0)
    for tensor in model.state_dict().values():
        torch.nn.init.normal_(tensor)
    model.save_pretrained(directory, max_shard_size="100KB")
    return directory, model


@pytest.fixture
def exported(tmp_path):
    """Our own export of a model with multi-token prediction, and its parameters."""
    params = randomized(init_params(WITH_MTP))
    save_hf(tmp_path / "hf", params, WITH_MTP)
    return tmp_path / "hf", params


def test_a_loaded_model_has_the_values_of_transformers(released):
    directory, model = released
    with pytest.warns(UserWarning, match="num_nextn_predict_layers is 1, but no tensor of it is there"):
        cfg, params = load(directory)
    assert (cfg.num_nextn_predict_layers, cfg.mtp_depths) == (0, 0)
    assert list(flatten(params)) == [path for path, _ in rows(model_specs(cfg))]
    state, prefix = model.state_dict(), f"model.layers.{cfg.num_hidden_layers - 1}"
    ffn, experts = params["layers"][str(cfg.num_hidden_layers - 1)]["ffn"], cfg.n_routed_experts
    stacked = state[f"{prefix}.mlp.experts.gate_up_proj"]
    assert torch.equal(ffn["experts"]["gate_up"], stacked.view(experts, 2, 24, 40))  # expert 10 after 9
    assert torch.equal(ffn["experts"]["down"], state[f"{prefix}.mlp.experts.down_proj"])
    assert torch.equal(ffn["router_bias"], state[f"{prefix}.mlp.gate.e_score_correction_bias"])
    assert torch.equal(ffn["router"], state[f"{prefix}.mlp.gate.weight"])
    assert torch.equal(ffn["shared"]["gate_up"][1], state[f"{prefix}.mlp.shared_experts.up_proj.weight"])


def test_an_export_is_read_by_transformers_and_equals_the_import_byte_for_byte(released, tmp_path):
    directory, model = released
    cfg, params = quietly(load, directory)
    save_hf(tmp_path / "out", params, cfg, shard_bytes=90_000)
    assert same(stored_tensors(directory), stored_tensors(tmp_path / "out"))
    again, notes = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert type(again) is type(model) and not any(notes.values())
    assert same(again.state_dict(), model.state_dict())
    before, after = (AutoConfig.from_pretrained(place).to_dict() for place in (directory, tmp_path / "out"))
    differing = {key for key in before if before[key] != after.get(key)}
    assert differing <= {"_name_or_path", "num_nextn_predict_layers"} and not after.get("num_nextn_predict_layers")


def test_experts_that_come_stacked_are_told_apart_by_key_and_read_alike(released, tmp_path):
    directory, model = released
    _, params = quietly(load, directory)
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    assert any(key.endswith("experts.gate_up_proj") for key in tensors)
    shutil.copy(directory / "config.json", tmp_path)
    save_file(tensors, tmp_path / MODEL)
    assert same(flatten(quietly(load, tmp_path)[1]), flatten(params))
    for path, leaf in flatten(quietly(open_model, tmp_path)[1]).items():
        if "experts" in path:
            assert_regions_are_read(leaf, flatten(params)[path])
    single = "model.layers.2.mlp.experts.3.down_proj.weight"
    edit(tmp_path, lambda tensors: tensors.update({single: torch.zeros(40, 24)}))
    with pytest.raises(ValueError, match=f"unexpected: {single}"):
        load(tmp_path)


def assert_regions_are_read(leaf, value):
    for dim, size in enumerate(leaf.shape):
        for part in range(3):
            region = list(whole(leaf.shape))
            region[dim] = start, count = cut(size, 3, part)
            assert torch.equal(leaf.read(tuple(region)), value.narrow(dim, start, count)), region
    corner = tuple((size // 2, size - size // 2) for size in leaf.shape)
    assert torch.equal(leaf.read(corner), value[tuple(slice(start, None) for start, _ in corner)])


def test_any_region_of_experts_is_read_from_either_format(exported, tmp_path):
    directory, params = exported
    save(tmp_path / "native", params, WITH_MTP)
    for place in (directory, tmp_path / "native"):
        for path, leaf in flatten(open_model(place)[1]).items():
            if path.startswith(("layers.1.", "mtp.")):
                assert_regions_are_read(leaf, flatten(params)[path])


def test_only_the_experts_that_are_asked_for_are_read(exported, monkeypatch):
    seen = []
    read = TensorFiles.read
    monkeypatch.setattr(TensorFiles, "read", lambda self, key, region: (seen.append(key), read(self, key, region))[1])
    experts = open_model(exported[0])[1]["layers"]["1"]["ffn"]["experts"]
    experts["gate_up"].read(((6, 2), (1, 1), (5, 7), (0, 40)))
    experts["down"].read(((7, 1), (0, 40), (0, 24)))
    assert [key.partition("experts.")[2] for key in seen] == [
        "6.up_proj.weight",
        "7.up_proj.weight",
        "7.down_proj.weight",
    ]


def test_multi_token_prediction_keeps_keys_and_bytes_from_hf_to_native_and_back(exported, tmp_path):
    directory, params = exported
    assert "model.layers.4.eh_proj.weight" in stored_tensors(directory)
    cfg, stored = open_model(directory)
    save(tmp_path / "native", stored, cfg)
    assert cfg == WITH_MTP and same(flatten(load(tmp_path / "native")[1]), flatten(params))
    cfg, stored = open_model(tmp_path / "native")
    save_hf(tmp_path / "again", stored, cfg)
    assert same(stored_tensors(tmp_path / "again"), stored_tensors(directory))


def test_without_multi_token_prediction_the_export_says_so(exported, tmp_path):
    directory, params = exported
    without = Path(shutil.copytree(directory, tmp_path / "without"))
    edit(without, lambda tensors: [tensors.pop(key) for key in list(tensors) if "layers.4." in key])
    with pytest.warns(UserWarning, match="multi-token prediction is off"):
        cfg, rest = load(without)
    assert cfg == replace(WITH_MTP, num_nextn_predict_layers=0)
    assert same(flatten(rest), {path: leaf for path, leaf in flatten(params).items() if not path.startswith("mtp.")})
    save_hf(tmp_path / "again", rest, cfg)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    with pytest.raises(ValueError, match=r"missing: model\.layers\.4"):
        open_model(without, WITH_MTP)  # asked for by name, it must be there


def test_a_part_of_multi_token_prediction_is_refused_with_all_that_is_missing(exported):
    gone = ["model.layers.4.enorm.weight", "model.layers.4.mlp.experts.5.up_proj.weight"]
    edit(exported[0], lambda tensors: [tensors.pop(key) for key in gone])
    with pytest.raises(ValueError, match=f"missing: {', '.join(gone)}"):
        load(exported[0])


def test_a_second_weight_set_that_is_absent_is_refused(exported):
    edit(exported[0], lambda tensors: None, num_nextn_predict_layers=2)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.5\.enorm\.weight, model\.layers\.5\.hnorm"):
        load(exported[0])


@pytest.mark.parametrize("tied", [False, True])
def test_equal_copies_of_embedding_and_head_in_the_mtp_layer_are_ignored_and_others_refused(tmp_path, tied):
    cfg = replace(WITH_MTP, tie_word_embeddings=tied)
    params = randomized(init_params(cfg))
    save_hf(tmp_path / "hf", params, cfg)
    copies = {
        "model.layers.4.embed_tokens.weight": params["embed"],
        "model.layers.4.shared_head.head.weight": params["embed" if tied else "head"],
    }
    edit(tmp_path / "hf", lambda tensors: tensors.update({key: tensor.clone() for key, tensor in copies.items()}))
    assert same(flatten(load(tmp_path / "hf")[1]), flatten(params))
    edit(tmp_path / "hf", lambda tensors: [tensors.update({key: tensors[key] + 1}) for key in copies])
    with pytest.raises(ValueError) as error:
        load(tmp_path / "hf")
    assert all(f"{key} in {MODEL} differs from" in str(error.value) for key in copies)


def test_indexer_tensors_of_a_layer_that_shares_indices_are_refused_by_name(tmp_path):
    cfg = ModelConfig.from_hf(GLM5 | {"indexer_types": WORDS})
    save_hf(tmp_path / "hf", init_params(cfg), cfg)
    extra = "model.layers.2.self_attn.indexer.wk.weight"
    edit(tmp_path / "hf", lambda tensors: tensors.update({extra: torch.zeros(16, 40)}))
    with pytest.raises(ValueError, match=f"unexpected: {extra}"):
        load(tmp_path / "hf")


def test_the_routers_bias_stays_fp32_in_a_bf16_checkpoint(tmp_path):
    params = init_params(WITH_MTP, dtype=BF16)
    bias = 6.80 + 0.001 * torch.arange(8)
    params["layers"]["1"]["ffn"]["router_bias"].copy_(bias)
    save_hf(tmp_path / "hf", params, WITH_MTP)
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    files = TensorFiles.open(tmp_path / "hf")
    for name, row in files.rows.items():  # what is wide is written as it is held
        wide = name.endswith(("e_score_correction_bias", "indexer.weights_proj.weight"))
        assert row.dtype == (torch.float32 if wide else BF16), name
    for dtype in (None, BF16):
        again = load(tmp_path / "hf", dtype=dtype)[1]["layers"]["1"]
        assert torch.equal(again["ffn"]["router_bias"], bias) and again["attn"]["q_a"].dtype == BF16
        assert again["attn"]["indexer"]["weights"].dtype == torch.float32
    assert torch.equal(files.read(key), bias)
    rounded = tree_map(lambda leaf: leaf.to(BF16), params)
    save_hf(tmp_path / "rounded", rounded, WITH_MTP)  # a caller's cast of the whole tree
    assert TensorFiles.open(tmp_path / "rounded").rows[key].dtype == torch.float32


def test_a_bias_that_was_rounded_is_held_and_written_in_fp32_with_a_notice(tmp_path):
    save_hf(tmp_path / "hf", init_params(WITH_MTP, dtype=BF16), WITH_MTP)
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    edit(tmp_path / "hf", lambda tensors: tensors.update({key: torch.full((8,), 6.8, dtype=BF16)}))
    with pytest.warns(UserWarning, match=key):
        cfg, stored = open_model(tmp_path / "hf")
    assert stored["layers"]["1"]["ffn"]["router_bias"].dtype == torch.float32
    save_hf(tmp_path / "again", stored, cfg)
    before, after = stored_tensors(tmp_path / "hf"), stored_tensors(tmp_path / "again")
    assert same(after, before | {key: before[key].float()})
