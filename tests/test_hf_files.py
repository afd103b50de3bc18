import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
)

from configs import MODELS
from glm5fn.config import ModelConfig
from glm5fn.files import INDEX, MODEL, TensorFiles
from glm5fn.hf import load, open_model
from glm5fn.model import init_params, model_specs
from glm5fn.save import save, save_hf
from glm5fn.spec import cut, hf_keys, hf_shape, rows, whole
from glm5fn.tree import flatten, tree_map

SIZES = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 2,
    "eos_token_id": [2, 3, 5],
}
ALL_DENSE = {"first_k_dense_replace": 2, "num_nextn_predict_layers": 0}
FAMILIES = {
    "glm4": (Glm4Config, Glm4ForCausalLM, {"attention_bias": True}),
    "glm4 tied bf16": (Glm4Config, Glm4ForCausalLM, {"tie_word_embeddings": True, "dtype": "bfloat16"}),
    "glm4 of 12 layers": (Glm4Config, Glm4ForCausalLM, {"num_hidden_layers": 12, "attention_bias": False}),
    "glm": (GlmConfig, GlmForCausalLM, {"dtype": "bfloat16"}),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, ALL_DENSE | {"use_qk_norm": True}),
    "glm4_moe tied": (Glm4MoeConfig, Glm4MoeForCausalLM, ALL_DENSE | {"tie_word_embeddings": True}),
}
PUBLISHED = {  # list of keys -> the models that it is the list of
    "glm4-9b": ("glm4-9b",),
    "glm4-32b": ("glm4-32b",),
    "glm5": ("glm5-744b", "glm5.1-744b"),
    "glm5.2": ("glm5.2-744b",),
}
TINY = ModelConfig(model_type="glm4_moe", **SIZES | {"eos_token_id": (2, 3, 5)})


@pytest.fixture(scope="module", params=FAMILIES)
def released(request, tmp_path_factory):
    """A directory as transformers writes it, in shards, with every weight random; and its model."""
    config, model, more = FAMILIES[request.param]
    more = dict(more)
    dtype = getattr(torch, more.pop("dtype", "float32"))
    model = model(config(**SIZES | more)).to(dtype)
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    directory = tmp_path_factory.mktemp("hf")
    model.save_pretrained(directory, max_shard_size="40KB")
    return directory, model


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Our own export in three shards."""
    directory = tmp_path_factory.mktemp("ours") / "hf"
    save_hf(directory, init_params(TINY), TINY, shard_bytes=60_000)
    assert len(list(directory.glob("*.safetensors"))) == 3
    return directory


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


def same_tree(a, b):
    a, b = flatten(a), flatten(b)
    return list(a) == list(b) and all(same(a[path], b[path]) for path in a)


def stored_tensors(directory):
    files = TensorFiles.open(directory)
    return {key: files.read(key) for key in files.rows}


def test_a_loaded_model_has_the_values_of_transformers_in_our_shapes(released):
    directory, model = released
    state = model.state_dict()
    cfg, params = load(directory)
    flat, layer = flatten(params), params["layers"]["1"]
    assert list(flat) == [path for path, _ in rows(model_specs(cfg))]  # in the model's order, layer 10 after 9
    for path, row in rows(model_specs(cfg)):
        parts = [state[key].reshape(hf_shape(row, cfg.dims)) for key in hf_keys(row, cfg.dims)]
        values = torch.stack(parts) if len(parts) > 1 else parts[0]
        assert same(flat[path].flatten(), values.flatten()), path
    assert same(layer["attn"]["q"], state["model.layers.1.self_attn.q_proj.weight"].view(6, 16, 40))
    assert same(layer["attn"]["o"], state["model.layers.1.self_attn.o_proj.weight"].view(40, 6, 16))
    key = "gate_up_proj" if cfg.fused_gate_up else "gate_proj"
    assert same(layer["ffn"]["gate_up"][0], state[f"model.layers.1.mlp.{key}.weight"][:56])


def test_an_export_is_read_by_transformers_and_equals_the_import_byte_for_byte(released, tmp_path):
    directory, model = released
    cfg, params = load(directory)
    save_hf(tmp_path / "out", params, cfg, shard_bytes=30_000)
    before, after = stored_tensors(directory), stored_tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(same(before[key], after[key]) for key in before)
    again, notes = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert type(again) is type(model) and not any(notes.values())
    assert all(same(tensor, again.state_dict()[key]) for key, tensor in model.state_dict().items())


def test_the_exported_config_is_read_by_transformers_as_the_original(released, tmp_path):
    directory, _ = released
    cfg, params = load(directory)
    save_hf(tmp_path / "out", params, cfg)
    before, after = (AutoConfig.from_pretrained(place).to_dict() for place in (directory, tmp_path / "out"))
    differing = {key for key in before if before[key] != after.get(key)}
    assert differing <= {"_name_or_path"}


def test_a_native_directory_holds_what_was_imported(released, tmp_path):
    directory, _ = released
    cfg, params = load(directory)
    save(tmp_path / "native", params, cfg)
    again, native = load(tmp_path / "native")
    assert again == cfg and same_tree(native, params)
    config = json.loads((tmp_path / "native" / "config.json").read_text())
    assert config["format"] == "glm5fn" and config["dtype"] == str(params["embed"].dtype).removeprefix("torch.")
    with safe_open(tmp_path / "native" / MODEL, "pt") as file:
        assert file.metadata() == {"format": "glm5fn"} and set(file.keys()) == set(flatten(params))


def test_any_region_of_a_parameter_is_read_from_either_format(released, tmp_path):
    directory, _ = released
    cfg, params = load(directory)
    save(tmp_path / "native", params, cfg)
    for place in (directory, tmp_path / "native"):
        _, stored = open_model(place)
        for path, leaf in flatten(stored).items():
            if path.startswith("layers.1.") or "layers" not in path:
                value = flatten(params)[path]
                assert (leaf.shape, leaf.dtype) == (tuple(value.shape), value.dtype)
                for dim, size in enumerate(leaf.shape):
                    for part in range(3):
                        region = list(whole(leaf.shape))
                        region[dim] = start, count = cut(size, 3, part)
                        assert same(leaf.read(tuple(region)), value.narrow(dim, start, count)), (path, region)


@pytest.mark.parametrize("listed, name", [(f, n) for f, names in PUBLISHED.items() for n in names])
def test_the_rows_are_exactly_the_published_keys_and_shapes(listed, name):
    listing = gzip.decompress((Path(__file__).parent / "keys" / f"{listed}.tsv.gz").read_bytes()).decode()
    lines = [line.split("\t") for line in listing.splitlines()]
    cfg = MODELS[name]
    ours = {key: (row, hf_shape(row, cfg.dims)) for _, row in rows(model_specs(cfg)) for key in hf_keys(row, cfg.dims)}
    assert {key: list(size) for key, (_, size) in ours.items()} == {key: json.loads(size) for key, _, size in lines}
    state = {key for key, (row, _) in ours.items() if row.part == "state"}
    assert {key: dtype for key, dtype, _ in lines} == {key: "F32" if key in state else "BF16" for key in ours}


def test_only_the_region_that_is_asked_for_is_read(exported, monkeypatch):
    seen = []
    read = TensorFiles.read

    def watched(self, key, region=None):
        seen.append(tuple(size for _, size in region))
        return read(self, key, region)

    monkeypatch.setattr(TensorFiles, "read", watched)
    _, stored = open_model(exported)
    layer = stored["layers"]["0"]
    layer["attn"]["q"].read(((0, 6), (0, 16), (10, 4)))
    layer["attn"]["q"].read(((2, 3), (0, 16), (0, 40)))
    layer["attn"]["q"].read(((2, 3), (5, 2), (10, 4)))
    layer["ffn"]["gate_up"].read(((1, 1), (7, 2), (0, 40)))
    assert seen == [(96, 4), (48, 40), (48, 4), (2, 40)]


def test_a_loaded_model_can_be_cast_and_each_stored_dtype_is_kept_otherwise(tmp_path):
    params = init_params(TINY, dtype=torch.bfloat16)
    params["norm"] = torch.randn(40)
    save(tmp_path / "x", params, TINY)
    _, kept = load(tmp_path / "x")
    assert same_tree(kept, params) and kept["norm"].dtype == torch.float32
    _, cast = load(tmp_path / "x", dtype=torch.float64)
    assert same_tree(cast, tree_map(lambda tensor: tensor.double(), params))


def test_params_are_saved_in_the_models_order_whatever_theirs_is(tmp_path):
    params = init_params(TINY)
    save(tmp_path / "x", dict(reversed(params.items())), TINY)
    assert same_tree(load(tmp_path / "x")[1], params)


def test_a_model_is_converted_without_being_loaded(exported, tmp_path):
    cfg, stored = open_model(exported)
    save(tmp_path / "native", stored, cfg)
    cfg, stored = open_model(tmp_path / "native")
    save_hf(tmp_path / "hf", stored, cfg)
    assert same_tree(load(tmp_path / "native")[1], load(exported)[1])
    before, after = stored_tensors(exported), stored_tensors(tmp_path / "hf")
    assert before.keys() == after.keys() and all(same(before[key], after[key]) for key in before)


@pytest.mark.parametrize("write", [save, save_hf])
def test_ranks_that_do_not_write_take_part_in_the_same_gathers(tmp_path, write):
    params = init_params(TINY)
    gathers = []
    for rank in range(2):
        asked = []
        write(tmp_path / "x", params, TINY, gather=lambda t, asked=asked: (asked.append(id(t)), t)[1], writer=rank == 0)
        gathers.append(asked)
    assert gathers[0] == gathers[1] == [id(leaf) for leaf in flatten(params).values()]
    asked = []
    with pytest.raises(ValueError, match="exists already"):
        write(tmp_path / "x", params, TINY, gather=lambda t: (asked.append(id(t)), t)[1])
    assert asked == gathers[1]  # a writer that fails does not leave the others waiting


def test_a_second_export_with_fewer_shards_leaves_no_stale_one(exported, tmp_path):
    target = Path(shutil.copytree(exported, tmp_path / "hf"))
    save_hf(target, init_params(TINY, seed=1), TINY, overwrite=True)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", MODEL]
    assert same_tree(load(target)[1], init_params(TINY, seed=1))


def test_shards_stay_within_their_bound_and_the_index_counts_them(exported):
    index = json.loads((exported / INDEX).read_text())
    tensors = stored_tensors(exported)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for shard in set(index["weight_map"].values()):
        assert sum(tensors[key].nbytes for key, file in index["weight_map"].items() if file == shard) <= 60_000
    with pytest.raises(ValueError, match=r"shard_bytes \(0\)"):
        save_hf(exported.parent / "never", init_params(TINY), TINY, shard_bytes=0)


@pytest.mark.parametrize("write", [save, save_hf])
def test_params_that_are_not_the_configs_are_refused_by_name_before_anything_is_written(tmp_path, write):
    params = init_params(TINY)
    params["extra"] = params["layers"]["0"].pop("ffn_norm")
    params["embed"] = params["embed"][:-1]
    with pytest.raises(ValueError) as error:
        write(tmp_path / "x", params, TINY)
    message = str(error.value)
    assert "missing: layers.0.ffn_norm" in message and "unexpected: extra" in message
    assert "embed in the parameters has shape (95, 40), must be (96, 40)" in message
    assert not list(tmp_path.iterdir())
