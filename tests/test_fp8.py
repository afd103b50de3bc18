"""FP8 by blocks: exact on import, as published on export."""

import gzip
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_convert import run  # noqa: F401
from test_hf_experts import edit, randomized, same, stored_tensors
from test_hf_glm5_config import GLM5, WORDS

from glm5fn import ModelConfig, init_params, load, save, save_hf, stored
from glm5fn.files import MODEL, TensorFiles
from glm5fn.fp8 import dequantize, quantize
from glm5fn.hf import open_model
from glm5fn.tree import flatten

# Sizes that leave a short last block in both dims, and several blocks; experts and indexers included.
CFG = ModelConfig.from_hf(
    GLM5
    | {"hidden_size": 200, "q_lora_rank": 130, "moe_intermediate_size": 140, "indexer_types": WORDS}
    | {"num_attention_heads": 10, "n_routed_experts": 3, "intermediate_size": 260, "kv_lora_rank": 134}
)
E4M3 = torch.float8_e4m3fn


def expanded(scales, size):
    """Each block's factor at each place of its block."""
    return scales.repeat_interleave(128, 0)[: size[0]].repeat_interleave(128, 1)[:, : size[1]]


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A checkpoint whose matrices are FP8 of random bits; and what they are, keyed as in the files."""
    directory = tmp_path_factory.mktemp("fp8") / "hf"
    save_hf(directory, randomized(init_params(CFG, dtype=torch.bfloat16)), CFG)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(directory / MODEL)
    for key, tensor in list(tensors.items()):
        if re.search(r"(proj|wq_b|wk|proj_with_mqa)\.weight$", key) and not re.search("weights_proj|eh_proj", key):
            bits = torch.randint(0, 256, tensor.shape, generator=generator).to(torch.uint8)
            bits[bits & 0x7F == 0x7F] = 0x7E  # those are NaN
            size = tuple(-(-n // 128) for n in tensor.shape)
            tensors[key] = bits.view(E4M3)
            tensors[f"{key}_scale_inv"] = torch.rand(size, generator=generator) * 1e-3 + 1e-5
    save_file(tensors, directory / MODEL, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory, tensors


def test_an_import_is_the_product_in_float64_rounded_to_bfloat16(released, tmp_path, run):  # noqa: F811
    directory, tensors = released
    code, said = run("hf-to-native", directory, tmp_path / "native")
    assert code == 0, said
    run("native-to-hf", tmp_path / "native", tmp_path / "hf")
    plain, scaled = stored_tensors(tmp_path / "hf"), 0
    assert plain.keys() == {key for key in tensors if not key.endswith("_scale_inv")}
    for key, tensor in plain.items():
        expected = tensors[key]
        if expected.dtype == E4M3:
            scales = tensors[f"{key}_scale_inv"].double()
            expected = (expected.double() * expanded(scales, expected.shape)).bfloat16()
            scaled += 1
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), key
    assert scaled == len(tensors) - len(plain) > 100
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert same(flatten(load(directory)[1]), flatten(load(tmp_path / "native")[1]))


def test_any_region_is_dequantized_alike(released):
    whole = flatten(load(released[0])[1])
    leaves = flatten(open_model(released[0])[1])
    for path in ("layers.1.attn.q_b", "layers.1.attn.o", "layers.2.ffn.experts.gate_up", "layers.0.ffn.down"):
        leaf, value = leaves[path], whole[path]
        for dim, size in enumerate(leaf.shape):
            for start, count in ((0, size), (size // 2, size - size // 2), (size - 1, 1)):
                region = tuple((start, count) if i == dim else (0, n) for i, n in enumerate(leaf.shape))
                assert torch.equal(leaf.read(region), value.narrow(dim, start, count)), (path, region)
        corner = tuple((n // 3, n - n // 3) for n in leaf.shape)
        assert torch.equal(leaf.read(corner), value[tuple(slice(start, None) for start, _ in corner)])


def test_pieces_of_whole_blocks_are_dequantized_and_quantized_alike(released, tmp_path, run, monkeypatch):  # noqa: F811
    for name, piece in {"one": stored.PIECE, "many": 1}.items():
        monkeypatch.setattr(stored, "PIECE", piece)
        run("hf-to-native", released[0], tmp_path / name)
        run("native-to-hf", tmp_path / name, tmp_path / f"{name} again", "--fp8")
    assert same(flatten(load(tmp_path / "one")[1]), flatten(load(tmp_path / "many")[1]))
    one, many = (read_bits(tmp_path / f"{name} again") for name in ("one", "many"))
    assert one.keys() == many.keys() and all(torch.equal(one[key], many[key]) for key in one)


def read_bits(directory):
    files = TensorFiles.open(directory)
    return {key: files.read(key).flatten().view(torch.uint8) for key in files.rows}


@pytest.mark.parametrize("size", [(130, 200), (128, 128), (1, 300), (257, 1)])
def test_given_the_scales_of_a_matrix_its_fp8_bytes_come_back(size):
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 256, size, generator=generator).to(torch.uint8)
    bits[bits & 0x7F == 0x7F] = 0x7E
    scales = torch.rand(tuple(-(-n // 128) for n in size), generator=generator) * 1e-2 + 1e-6
    values = dequantize(bits.view(E4M3), scales).bfloat16()
    again, same_scales = quantize(values, scales)
    assert torch.equal(again.view(torch.uint8), bits) and same_scales is scales


def test_the_largest_number_of_each_block_becomes_the_largest_of_fp8():
    values = torch.randn(130, 200, generator=torch.Generator().manual_seed(2)) * 10
    values[128:, 128:] = 0  # a block of zeros
    held, scales = quantize(values)
    assert held.dtype == E4M3 and scales.dtype == torch.float32 and scales.shape == (2, 2)
    for i in range(2):
        for j in range(2):
            block = values[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            highest = held[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].float().abs().max()
            assert (highest, scales[i, j]) == ((448, block.abs().max() / 448) if block.any() else (0, 1))
    error = (dequantize(held, scales) - values).abs()
    assert (error <= values.abs() / 16 + scales.max() * 2**-10).all()  # half a step of three bits, or of the smallest
    tiny, ones = quantize(torch.full((3, 3), 1e-43))
    assert not tiny.float().any() and ones.item() == 1  # too small for a factor
    with pytest.raises(ValueError, match="not finite"):
        quantize(torch.tensor([[1.0, float("nan")]]))


def shapes_of_keys(rows):
    """Keys without their numbers, each with its dtypes and whether it has factors beside it."""
    return {(re.sub(r"\.\d+\.", ".N.", key), dtype) for key, dtype in rows}


def test_an_export_keeps_in_bf16_what_the_published_one_keeps(tmp_path, run):  # noqa: F811
    cfg = replace(CFG, num_nextn_predict_layers=1)
    save(tmp_path / "native", randomized(init_params(cfg, dtype=torch.bfloat16)), cfg)
    params = load(tmp_path / "native", dtype=torch.bfloat16)[1]
    for layer in (*params["layers"].values(), params["mtp"]["0"]):
        if "indexer" in layer["attn"]:  # published in bf16
            layer["attn"]["indexer"]["weights"] = layer["attn"]["indexer"]["weights"].bfloat16()
    save(tmp_path / "native", params, cfg, overwrite=True)
    code, said = run("native-to-hf", tmp_path / "native", tmp_path / "hf", "--fp8")
    assert code == 0, said
    codes = {E4M3: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}
    ours = [(key, codes[row.dtype]) for key, row in TensorFiles.open(tmp_path / "hf").rows.items()]
    listing = gzip.decompress((Path(__file__).parent / "keys" / "glm5.2-fp8.tsv.gz").read_bytes()).decode()
    published = [tuple(line.split("\t")[:2]) for line in listing.splitlines()]
    assert shapes_of_keys(ours) == shapes_of_keys(published)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    quantized = config["quantization_config"]
    assert (quantized["quant_method"], quantized["fmt"]) == ("fp8", "e4m3")
    assert quantized["weight_block_size"] == [128, 128]
    matrices = {key.removesuffix(".weight") for key, code in ours if code == "F8_E4M3"}
    kept = set(quantized["modules_to_not_convert"])
    assert not kept & matrices and {"lm_head", "model.layers.6.eh_proj", "model.layers.1.mlp.gate"} <= kept
    assert "model.layers.1.self_attn.indexer.weights_proj" in kept
    code, said = run("hf-to-native", tmp_path / "hf", tmp_path / "again")
    assert code == 0, said
    again = flatten(load(tmp_path / "again")[1])
    # e4m3 has three bits of mantissa: half a step is 2**-4, twice that with the roundings to bf16 before and after.
    for path, leaf in flatten(params).items():
        assert torch.allclose(again[path].float(), leaf.float(), rtol=2**-3, atol=2e-3), path
    said = [run("inspect", tmp_path / "hf", "--verify")[1], said]
    code, other = run("native-to-hf", tmp_path / "native", tmp_path / "hf", "--fp8", "--force")
    assert said[0].split()[-1] == other.split()[-1]  # the checksum that was told when it was written


@pytest.mark.parametrize(
    ("change", "settings", "told"),
    [
        (lambda t, key: t.pop(f"{key}_scale_inv"), {}, "missing: model.layers.0.mlp.gate_proj.weight_scale_inv"),
        (
            lambda t, key: [t.pop(f"{k}_scale_inv") for k in (key, key.replace("gate", "up"))],
            {},
            "is float8_e4m3fn, must be float64 or float32",
        ),
        (lambda t, key: t.update({key: t[key].bfloat16()}), {}, "is bfloat16, must be float8_e4m3fn"),
        (lambda t, key: t.update({f"{key}_scale_inv": torch.ones(1, 3)}), {}, "has shape (1, 3), must be (3, 2)"),
        (lambda t, key: t.update({f"{key}_scale_inv": torch.ones(3, 2).half()}), {}, "is float16, must be float32"),
        (lambda t, key: t[f"{key}_scale_inv"].fill_(-1), {}, "has factors that are negative or not finite"),
        (lambda t, key: t[f"{key}_scale_inv"].fill_(math.nan), {}, "has factors that are negative or not finite"),
        (lambda t, key: None, {"quantization_config": {"quant_method": "gptq"}}, "quant_method ('gptq') must be 'fp8'"),
        (lambda t, key: None, {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size (None) must be"),
    ],
)
def test_what_is_not_fp8_by_blocks_is_refused_by_name(tmp_path, change, settings, told):
    cfg = ModelConfig.from_hf(GLM5 | {"intermediate_size": 260, "hidden_size": 200, "num_nextn_predict_layers": 0})
    save_hf(tmp_path / "hf", init_params(cfg, dtype=torch.bfloat16), cfg)
    key = "model.layers.0.mlp.gate_proj.weight"

    def quantized(tensors):
        tensors[key], tensors[f"{key}_scale_inv"] = quantize(tensors[key])
        tensors["model.layers.0.mlp.up_proj.weight"], scales = quantize(tensors["model.layers.0.mlp.up_proj.weight"])
        tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = scales
        change(tensors, key)

    edit(tmp_path / "hf", quantized, **settings)
    with pytest.raises(ValueError) as error:
        load(tmp_path / "hf")
    assert told in str(error.value)
    if not settings:
        assert key in str(error.value)
