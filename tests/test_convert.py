"""convert.py: in, out and back, bit for bit; what it refuses, and that it then leaves everything as it was."""

import errno
import filecmp
import json
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_hf_experts import edit, randomized, same, stored_tensors
from test_hf_files import SIZES
from test_hf_glm5_config import GLM5, GLM45, WORDS
from training import train
from transformers import AutoConfig, AutoModelForCausalLM

import convert
from glm5fn import ModelConfig, forward, init_params, load, loss, save, save_hf, stored
from glm5fn.files import INDEX, MODEL, TensorFiles
from glm5fn.tree import flatten
from glm5fn.writer import TensorWriter

GLM4 = {"model_type": "glm4", **SIZES}
TWELVE = {"num_hidden_layers": 12, "n_routed_experts": 12, "index_topk_freq": 4, "index_skip_topk_offset": 3}
RELEASED = {  # what transformers is asked to write: a config and a dtype
    "glm_moe_dsa": (GLM5 | {"indexer_types": WORDS}, "float32"),
    "glm_moe_dsa, 12 layers of 12 experts": (GLM5 | TWELVE, "bfloat16"),
    "glm_moe_dsa, square experts, tied": (
        GLM5 | {"moe_intermediate_size": 20, "tie_word_embeddings": True},
        "bfloat16",
    ),
    "glm4_moe, 12 experts": (GLM45 | {"n_routed_experts": 12}, "bfloat16"),
    "glm4_moe, tied": (GLM45 | {"tie_word_embeddings": True}, "float32"),
    "glm4": (GLM4, "bfloat16"),
    "glm4, tied": (GLM4 | {"tie_word_embeddings": True, "attention_bias": False}, "float32"),
    "glm4, 12 layers": (GLM4 | {"num_hidden_layers": 12}, "float32"),
}
WITH_MTP = ModelConfig.from_hf(GLM5 | {"indexer_types": WORDS})
BIAS = "mlp.gate.e_score_correction_bias"


@pytest.fixture
def run(capsys):
    """`run(*argv)`: the exit code of convert.py, and what it printed."""

    def run(*argv):
        capsys.readouterr()
        try:
            code = convert.main([str(word) for word in argv])
        except SystemExit as end:
            code = end.code
        return code, "".join(capsys.readouterr())

    return run


@pytest.fixture(scope="module", params=RELEASED)
def released(request, tmp_path_factory):
    """A directory as transformers writes it, every number random, and its model."""
    config, dtype = RELEASED[request.param]
    directory = tmp_path_factory.mktemp("hf")
    (directory / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).to(getattr(torch, dtype))
    torch.manual_seed(0)
    for name, tensor in model.state_dict().items():
        torch.nn.init.normal_(tensor, 6.9 if name.endswith(BIAS) else 0.0, 0.1 if name.endswith(BIAS) else 0.3)
    model.save_pretrained(directory, max_shard_size="100KB")
    return directory, model


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Our own export of a model with shared indices and multi-token prediction, in several shards."""
    directory = tmp_path_factory.mktemp("ours") / "hf"
    save_hf(directory, randomized(init_params(WITH_MTP, dtype=torch.bfloat16)), WITH_MTP, shard_bytes=60_000)
    return directory


def listing(directory):
    """Every path of a directory and what each file holds."""
    return {str(path.relative_to(directory)): path.is_file() and path.read_bytes() for path in directory.rglob("*")}


def closing(text):
    """Number of tensors and of parameters, bytes, and the checksum of the line that ends a conversion."""
    found = re.search(r"([\d,]+) tensors, ([\d,]+) parameters, ([\d,]+) bytes .* checksum (\w{32})", text)
    return (*(int(number.replace(",", "")) for number in found.groups()[:3]), found[4])


def forward_of(directory, tokens):
    cfg, params = load(directory, dtype=torch.float32)
    return forward(params, tokens, cfg)


# --- there and back ---


def test_what_transformers_wrote_comes_back_byte_for_byte_and_it_reads_that(released, tmp_path, run):
    directory, model = released
    code, said = run("hf-to-native", directory, tmp_path / "native")
    assert code == 0, said
    code, said = run("native-to-hf", tmp_path / "native", tmp_path / "hf", "--shard-size", "90KB")
    assert code == 0, said
    before, after = stored_tensors(directory), stored_tensors(tmp_path / "hf")
    rounded = {key for key in before if key.endswith(BIAS) and before[key].dtype == torch.bfloat16}
    assert same(after, before | {key: before[key].float() for key in rounded})
    again, notes = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto", output_loading_info=True)
    assert type(again) is type(model) and not any(notes.values())
    tokens = torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(1))
    one, other = (AutoModelForCausalLM.from_pretrained(at, dtype="float32") for at in (directory, tmp_path / "hf"))
    with torch.no_grad():
        expected, logits = one(tokens).logits, other(tokens).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    few = tokens[:, :4]  # as many as are selected: of equal index scores transformers takes any
    assert (forward_of(tmp_path / "native", few) - expected[:, :4]).abs().max() <= 1e-5 * expected.abs().max()


def test_either_kind_of_directory_loads_the_same_numbers_and_has_the_same_checksum(exported, tmp_path, run):
    _, said = run("hf-to-native", exported, tmp_path / "native", "--shard-size", "100KB")
    written = closing(said)
    native = load(tmp_path / "native")
    assert native[0] == load(exported)[0] == WITH_MTP and same(flatten(native[1]), flatten(load(exported)[1]))
    assert len(list((tmp_path / "native").glob("*.safetensors"))) > 1
    _, said = run("native-to-hf", tmp_path / "native", tmp_path / "hf")
    tensors, parameters, size, checksum = closing(said)
    assert same(stored_tensors(tmp_path / "hf"), stored_tensors(exported))
    files = TensorFiles.open(tmp_path / "hf")
    assert (tensors, parameters) == (
        len(files.rows),
        sum(t.numel() for k, t in flatten(native[1]).items() if "bias" not in k.split("_")[-1] or "router" not in k),
    )
    assert checksum == written[3] and parameters == written[1] and size == written[2]
    assert size == sum(files.read(key).nbytes for key in files.rows)
    for place in (exported, tmp_path / "native", tmp_path / "hf"):
        code, said = run("inspect", place, "--verify")
        assert code == 0 and f"checksum {checksum}" in said


def test_experts_that_come_stacked_give_the_same_native_file(released, tmp_path, run):
    directory, model = released
    state = {key: tensor.contiguous() for key, tensor in model.to(stored_dtype(directory)).state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    shutil.copytree(directory, tmp_path / "hf", ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(state, tmp_path / "hf" / MODEL, {"format": "pt"})
    for name, place in {"single": directory, "stacked": tmp_path / "hf"}.items():
        code, said = run("hf-to-native", place, tmp_path / name)
        assert code == 0, said
    assert filecmp.cmp(tmp_path / "single" / MODEL, tmp_path / "stacked" / MODEL, shallow=False)


def stored_dtype(directory):
    return TensorFiles.open(directory).rows["model.norm.weight"].dtype


@pytest.mark.parametrize("block", [1, 3])
def test_tensors_are_copied_in_pieces_of_any_size(exported, tmp_path, run, monkeypatch, block):
    whole = run("hf-to-native", exported, tmp_path / "whole")[1]
    monkeypatch.setattr(stored, "PIECE", 1)
    monkeypatch.setattr(stored, "BLOCK", block)
    longest = []
    write = TensorWriter.write
    monkeypatch.setattr(TensorWriter, "write", lambda *args: (longest.append(args[2].numel()), write(*args))[1])
    pieces = run("hf-to-native", exported, tmp_path / "pieces")[1]
    assert max(longest) <= block * 96 and closing(pieces) == closing(whole)
    assert filecmp.cmp(tmp_path / "whole" / MODEL, tmp_path / "pieces" / MODEL, shallow=False)
    run("native-to-hf", tmp_path / "pieces", tmp_path / "hf", "--shard-size", "60KB")
    assert same(stored_tensors(tmp_path / "hf"), stored_tensors(exported))


def test_files_beside_the_tensors_come_along_both_ways_and_others_do_not(exported, tmp_path, run):
    source = Path(shutil.copytree(exported, tmp_path / "source"))
    carried = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE"]
    for name in [*carried, "old.bin", "model-00009-of-00009.safetensors", "README.md"]:
        (source / name).write_text(name)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("tool")
    run("hf-to-native", source, tmp_path / "native")
    run("native-to-hf", tmp_path / "native", tmp_path / "hf")
    for place in ("native", "hf"):
        found = listing(tmp_path / place)
        assert set(found) == {*carried, "additional_chat_templates", "additional_chat_templates/tool.jinja"} | {
            "config.json",
            MODEL,
        }
        assert all(found[name] == name.encode() for name in carried)


# --- dtypes ---


def test_a_cast_rounds_to_the_nearest_even_and_spares_what_is_wide(tmp_path, run):
    params = randomized(init_params(WITH_MTP))
    bias = 6.80 + 0.001 * torch.arange(8)
    params["layers"]["1"]["ffn"]["router_bias"] = bias
    halfway = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=torch.int32).view(torch.float32)
    params["embed"][0, :4] = halfway
    save(tmp_path / "native", params, WITH_MTP)
    code, _ = run("native-to-hf", tmp_path / "native", tmp_path / "hf", "--dtype", "bfloat16")
    tensors = stored_tensors(tmp_path / "hf")
    bits = tensors["model.embed_tokens.weight"][0, :4].view(torch.int16).tolist()
    assert code == 0 and bits == [0x3F80, 0x3F82, 0x3F81, 0x3F80]
    wide = ("e_score_correction_bias", "indexer.weights_proj.weight")  # those would change what is chosen
    for key, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if key.endswith(wide) else torch.bfloat16), key
    assert torch.equal(tensors[f"model.layers.1.{BIAS}"], bias)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    run("hf-to-native", tmp_path / "hf", tmp_path / "again", "--dtype", "float32")
    again = flatten(load(tmp_path / "again")[1])
    assert all(
        torch.equal(again[path], leaf.bfloat16().float())
        for path, leaf in flatten(params).items()
        if "router_bias" not in path and "indexer.weights" not in path
    )
    assert {leaf.dtype for leaf in again.values()} == {torch.float32}


@pytest.mark.parametrize(("number", "dtype"), [(7e4, "float16"), (3.4e38, "bfloat16"), (1e300, "float32")])
def test_numbers_that_a_cast_would_make_infinite_are_refused_by_name(tmp_path, run, number, dtype):
    params = init_params(WITH_MTP, dtype=torch.float64 if number > 1e39 else torch.float32)
    params["layers"]["1"]["attn"]["o"][0, 0, 0] = number
    save(tmp_path / "native", params, WITH_MTP)
    code, said = run("native-to-hf", tmp_path / "native", tmp_path / "hf", "--dtype", dtype)
    assert code == 1 and f"model.layers.1.self_attn.o_proj.weight has numbers above the largest of {dtype}" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native"]


def test_a_rounded_router_bias_is_told_of(exported, tmp_path, run):
    source = Path(shutil.copytree(exported, tmp_path / "source"))
    key = f"model.layers.1.{BIAS}"
    path = source / TensorFiles.open(source).rows[key].file
    save_file({name: t.bfloat16() if name == key else t for name, t in load_file(path).items()}, path, {"format": "pt"})
    code, said = run("hf-to-native", source, tmp_path / "native")
    assert code == 0 and said.startswith("notice: ") and f"float32, which is held from here on: {key}" in said


# --- safety ---


def broken(exported, tmp_path):
    """A copy with one defect of each kind, and what must be said of them."""
    source = Path(shutil.copytree(exported, tmp_path / "broken"))
    rows = TensorFiles.open(source).rows
    renamed, reshaped = "model.layers.2.mlp.experts.3.up_proj.weight", "model.layers.2.self_attn.q_b_proj.weight"
    lost, cut = rows["model.embed_tokens.weight"].file, rows["lm_head.weight"].file

    def change(key, new, value):
        path = source / rows[key].file
        tensors = load_file(path)
        tensors[new] = value(tensors.pop(key))
        save_file(tensors, path, {"format": "pt"})
        index = json.loads((source / INDEX).read_text())
        index["weight_map"][new] = index["weight_map"].pop(key)
        (source / INDEX).write_text(json.dumps(index))

    change(renamed, renamed.replace("up", "upp"), lambda tensor: tensor)
    change(reshaped, reshaped, lambda tensor: tensor.T.contiguous())
    (source / lost).unlink()
    os.truncate(source / cut, (source / cut).stat().st_size - 100)
    return source, [
        f"{lost} is missing",
        f"{cut} is truncated",
        f"missing: {renamed}",
        f"{renamed.replace('up', 'upp')} in {rows[renamed].file}",
        f"{reshaped} in {rows[reshaped].file} has shape (20, 72), must be (72, 20)",
    ]


@pytest.mark.parametrize("there", [False, True])
def test_all_defects_are_named_at_once_and_the_destination_stays_as_it_was(exported, tmp_path, run, there):
    source, defects = broken(exported, tmp_path)
    if there:
        shutil.copytree(exported, tmp_path / "native")
    before = listing(tmp_path)
    code, said = run("hf-to-native", source, tmp_path / "native", "--force")
    assert code == 1 and all(defect in said for defect in defects), said
    assert listing(tmp_path) == before
    code, said = run("inspect", source)
    assert code == 1 and all(defect in said for defect in defects), said


def test_what_is_there_is_only_written_over_with_force(exported, tmp_path, run):
    assert run("hf-to-native", exported, tmp_path / "x")[0] == 0
    before = listing(tmp_path)
    code, said = run("hf-to-native", exported, tmp_path / "x")
    assert code == 1 and "x exists already: set --force" in said and listing(tmp_path) == before
    assert run("hf-to-native", exported, tmp_path / "x", "--shard-size", "100KB", "--force")[0] == 0
    assert len(list((tmp_path / "x").glob("*.safetensors"))) > 1
    assert run("hf-to-native", exported, tmp_path / "x", "--force")[0] == 0
    assert listing(tmp_path) == before  # no shard of the second time is left


def test_the_source_is_never_taken_for_the_destination(exported, tmp_path, run):
    source = Path(shutil.copytree(exported, tmp_path / "a" / "source"))
    for target in (source, tmp_path / "a", tmp_path / "a" / ".." / "a"):
        code, said = run("hf-to-native", source, target, "--force")
        assert code == 1 and "name another place" in said
    assert listing(source) == listing(exported)


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_everything_as_it_was(exported, tmp_path, run, monkeypatch, there):
    if there:
        shutil.copytree(exported, tmp_path / "native")
    before, calls, write = listing(tmp_path), [], TensorWriter.write

    def fail(*args):
        calls.append(args)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args)

    monkeypatch.setattr(TensorWriter, "write", fail)
    code, said = run("hf-to-native", exported, tmp_path / "native", "--force")
    assert code == 1 and "No space left on device" in said and listing(tmp_path) == before
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    code, said = run("hf-to-native", exported, tmp_path / "native", "--force")
    assert code == 1 and "bytes are needed there, 1,000 are free" in said and listing(tmp_path) == before


def test_it_can_be_run_again_after_a_kill(exported, tmp_path, run, monkeypatch):
    calls, write = [], TensorWriter.write

    def die(*args):
        calls.append(args)
        if len(calls) > 20:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*args)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(TensorWriter, "write", die)
        convert.main(["hf-to-native", str(exported), str(tmp_path / "x")])
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not (tmp_path / "x").exists()
    code, said = run("hf-to-native", exported, tmp_path / "x")
    assert code == 0 and [path.name for path in tmp_path.iterdir()] == ["x"], said
    assert same(flatten(load(tmp_path / "x")[1]), flatten(load(exported)[1]))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: config(d, model_type=[]), "model_type ([]) must be the name of a family"),
        (lambda d: config(d, format={}), None),
        (lambda d: (d / "config.json").write_text("[" * 200000), "cannot be read as a model's config.json"),
        (lambda d: index(d, 5), "cannot be read as an index"),
        (lambda d: index(d, "../hf/model.safetensors"), "it must name files in this directory"),
        (lambda d: index(d, "/tmp/model.safetensors"), "it must name files in this directory"),
        (lambda d: index(d, "."), "it must name files in this directory"),
        (lambda d: shape(d, [40.0]), "model.norm.weight has shape [40.0], must be whole numbers"),
    ],
)
def test_files_that_say_nonsense_are_refused_without_a_traceback(exported, tmp_path, run, change, told):
    source = Path(shutil.copytree(exported, tmp_path / "hf"))
    change(source)
    code, said = run("hf-to-native", source, tmp_path / "native")
    assert code == (1 if told else 0) and (told or "checksum") in said and "Traceback" not in said
    assert (tmp_path / "native").exists() == (told is None)


def config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def index(directory, file):
    path = directory / INDEX
    held = json.loads(path.read_text())
    held["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(held))


def shape(directory, size):
    path = directory / TensorFiles.open(directory).rows["model.norm.weight"].file
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["shape"] = size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_shards_in_a_subdirectory_are_read_from_there(exported, tmp_path, run):
    source = Path(shutil.copytree(exported, tmp_path / "hf"))
    held = json.loads((source / INDEX).read_text())
    file = held["weight_map"]["model.norm.weight"]
    (source / "sub").mkdir()
    shutil.copy(source / file, source / "sub" / file)
    content = (source / file).read_bytes()
    (source / file).write_bytes(content[:-4000] + bytes(4000))  # a stale one of the same name
    held["weight_map"] = {k: f"sub/{v}" if v == file else v for k, v in held["weight_map"].items()}
    (source / INDEX).write_text(json.dumps(held))
    assert same(flatten(load(source)[1]), flatten(load(exported)[1]))


def test_a_directory_that_holds_more_than_a_model_is_not_written_over(exported, tmp_path, run):
    target = Path(shutil.copytree(exported, tmp_path / "x"))
    (target / ".git").mkdir()
    code, said = run("hf-to-native", exported, target, "--force")
    assert code == 1 and "it has .git" in said and (target / ".git").exists()


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (["hf-to-native", "SRC"], 2, "required"),
        (["hf-to-native", "SRC", "x", "--dtype", "float8"], 2, "float8"),
        (["hf-to-native", "SRC", "x", "--fp8"], 2, "fp8"),
        (
            ["hf-to-native", "SRC", "x", "--shard-size", "5 apples"],
            1,
            "--shard-size 5 apples must be a number with a unit",
        ),
        (["hf-to-native", "SRC", "x", "--shard-size", "0GB"], 1, "must be a number with a unit"),
        (["hf-to-native", "SRC", "x", "--shard-size", "9" * 400], 1, "must be a number with a unit"),
        (["native-to-hf", "SRC", "x"], 1, "is a Hugging Face directory, must be native"),
        (["hf-to-native", "nowhere", "x"], 1, "nowhere: is not there, must be a model's directory"),
        (["inspect", "."], 1, "config.json"),
    ],
)
def test_a_command_that_cannot_be_done_says_why_and_writes_nothing(
    exported, tmp_path, run, monkeypatch, argv, code, told
):
    monkeypatch.chdir(tmp_path)
    found, said = run(*(str(exported) if word == "SRC" else word for word in argv))
    assert found == code and told in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_verify_notices_one_changed_bit_and_a_copy_that_differs(exported, tmp_path, run):
    source = Path(shutil.copytree(exported, tmp_path / "source"))
    before = run("inspect", source, "--verify")[1].splitlines()[-1]
    row = TensorFiles.open(source).rows["model.layers.3.mlp.experts.5.down_proj.weight"]
    with (source / row.file).open("r+b") as file:
        file.seek(row.start + 7)
        byte = file.read(1)[0]
        file.seek(row.start + 7)
        file.write(bytes([byte ^ 1]))
    code, said = run("inspect", source, "--verify")
    assert code == 0 and before.startswith("checksum ") and said.splitlines()[-1].startswith("checksum ")
    assert said.splitlines()[-1] != before
    save_hf(tmp_path / "one", init_params(WITH_MTP), WITH_MTP)
    copy = "model.layers.6.embed_tokens.weight"
    edit(tmp_path / "one", lambda tensors: tensors.update({copy: tensors["model.embed_tokens.weight"] + 1}))
    assert run("inspect", tmp_path / "one")[0] == 0  # which reads no tensor
    code, said = run("inspect", tmp_path / "one", "--verify")
    assert code == 1 and f"{copy} in {MODEL} differs from model.embed_tokens.weight" in said


def test_inspect_reads_no_tensor_and_counts_what_the_files_hold(exported, run, monkeypatch):
    monkeypatch.setattr(TensorFiles, "read", lambda *_: pytest.fail("a tensor was read"))
    monkeypatch.setattr(TensorFiles, "read_flat", lambda *_: pytest.fail("a tensor was read"))
    code, said = run("inspect", exported)
    rows = TensorFiles.open(exported).rows.values()
    counted = Counter(row.dtype for row in rows)
    assert code == 0 and "glm_moe_dsa, Hugging Face" in said and "nothing missing, nothing unexpected" in said
    for name, dtype in {"BF16": torch.bfloat16, "F32": torch.float32}.items():
        values = sum(torch.Size(row.shape).numel() for row in rows if row.dtype == dtype)
        assert re.search(rf"{name} +{counted[dtype]} +{values:,} +{values * dtype.itemsize:,}", said)


@pytest.mark.slow
def test_a_model_that_was_fine_tuned_has_the_loss_of_transformers_on_the_same_batch(tmp_path, run):
    config = GLM5 | {"indexer_types": WORDS, "vocab_size": 259, "index_topk": 64, "num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    settings = ["--data.seq-len", "32", "--optim.warmup-steps", "2", "--optim.lr", "1e-2", "--out", tmp_path / "run"]
    ends = ["--init", tmp_path / "hf", "--export", tmp_path / "tuned", "--steps", "20", "--precision", "fp32"]
    assert train("--config", "dsa-tiny", *settings, *ends) == 0
    assert (tmp_path / "tuned" / "tokenizer.json").read_text() == "{}"
    tuned, notes = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", output_loading_info=True)
    assert not any(notes.values())
    tokens = torch.randint(259, (3, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = tuned(tokens, labels=tokens).loss
    cfg, params = load(tmp_path / "tuned")
    ours, _ = loss(params, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, cfg)
    assert torch.allclose(ours, theirs, rtol=1e-5)
    assert not same(stored_tensors(tmp_path / "tuned"), stored_tensors(tmp_path / "hf"))
