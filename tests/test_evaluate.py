"""`python -m glm5fn evaluate`: what documents cost a model, to the last digit, in any batches and on any ranks."""

import json
import math
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from test_layouts import HEADS, SMALL
from tiny import EXPERTS, GLM5, PLAIN, random_params, tiny
from training import contents
from training import save as save_checkpoint

from configs import LAYOUTS
from glm5fn import forward, load, mesh, perplexity, save, score
from glm5fn.__main__ import main
from glm5fn.checkpoint import State
from glm5fn.inference import load_for
from glm5fn.model import model_specs
from glm5fn.settings import DataConfig, MeshConfig, RunConfig, dump
from glm5fn.spec import rows
from glm5fn.tree import flatten

ROOT = Path(__file__).parent.parent
BYTES = {"vocab_size": 263, "max_position_embeddings": 48}
MODELS = {
    "dense": tiny(**PLAIN | BYTES),
    "experts": tiny(**EXPERTS | BYTES, model_type="glm4_moe"),
    "glm5": tiny(**GLM5 | SMALL | HEADS | BYTES | {"vocab_size": 264}),
}
TEXTS = [
    "",
    "x",
    "a word",
    "w\u00f6rter \u4e16\u754c",
    "one text that does not fit into a window, " * 3,
    'a "line"\nand one',
]
GRIDS = {
    "shard 2": MeshConfig(dp_shard=2),
    "replicate 2": MeshConfig(dp_replicate=2),
    "ep 2": MeshConfig(dp_shard=2, ep=2),
    "cp 2": MeshConfig(cp=2),
    "cp 2, contiguous": MeshConfig(cp=2, cp_split="contiguous"),
    "tp 2": MeshConfig(tp=2),
    "tp 2, in experts": MeshConfig(tp=2, tp_experts="ffn"),
}
SEQ_LEN = 32


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory of models by name, texts.jsonl and more.txt."""
    place = tmp_path_factory.mktemp("evaluate")
    for name, cfg in MODELS.items():
        save(place / name, random_params(cfg), cfg)
    (place / "texts.jsonl").write_text("".join(json.dumps({"text": text, "own": "y"}) + "\n" for text in TEXTS))
    (place / "more.txt").write_text("a file that is one text")
    return place


@cache
def loaded(directory, grid=None):
    return load_for(directory, mesh=grid or MeshConfig())


def measured(directory, paths, batch, packing, grid=None):
    cfg = DataConfig(path=tuple(map(str, paths)), seq_len=SEQ_LEN)
    return perplexity.measure(loaded(directory, grid), cfg, packing, batch)[1]


@cache
def alone(directory, texts, seq_len=SEQ_LEN):
    """(nats, tokens) by running each piece of each text on its own."""
    cfg, params = load(directory)
    nats = count = 0
    for ids in [[*text.encode(), 256] for text in texts if text]:
        for start in range(0, len(ids) - 1, seq_len):
            piece = torch.tensor([ids[start : start + seq_len + 1]])
            logs = forward(params, piece[:, :-1], cfg).double().log_softmax(-1)
            nats -= float(logs.gather(-1, piece[:, 1:, None]).sum())
            count += piece.shape[1] - 1
    return nats, count


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """`run(*argv)`: the exit code and what was said, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        code = main(["evaluate", *map(str, argv)])
        return code, " ".join("".join(capsys.readouterr()).split())

    return run


@pytest.mark.parametrize("packing", ["best-fit", "none"])
@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("name", MODELS)
def test_packed_or_not_in_any_batches_the_loss_is_that_of_each_piece_alone(place, name, batch, packing):
    found = measured(place / name, [place / "texts.jsonl"], batch, packing)["all"]
    nats, count = alone(place / name, tuple(TEXTS))
    assert found["tokens"] == count and found["documents"] == len(TEXTS) - 1
    assert found["nll"] == pytest.approx(nats / count, rel=1e-6)


CELLS = [("shard 2", 1, "best-fit"), ("replicate 2", 2, "none"), ("ep 2", 7, "best-fit")]
CELLS += [("cp 2", 7, "best-fit"), ("cp 2", 1, "none"), ("cp 2, contiguous", 2, "best-fit")]
CELLS += [("tp 2", 2, "best-fit"), ("tp 2, in experts", 7, "none")]


@pytest.mark.parametrize(("grid", "batch", "packing"), [(GRIDS[name], *how) for name, *how in CELLS])
def test_two_ranks_give_the_loss_of_one(place, pools, grid, batch, packing):
    paths = place / "texts.jsonl", place / "more.txt"
    one, other = pools(2)(measured, place / "glm5", paths, batch, packing, grid)
    assert one == other
    for name, found in one["files"].items():
        nats, count = alone(place / "glm5", tuple(TEXTS) if name.endswith("jsonl") else (paths[1].read_text(),))
        assert found["tokens"] == count and found["nll"] == pytest.approx(nats / count, rel=1e-6)


def test_bits_per_byte_are_of_all_bytes_of_the_texts(place, run):
    code, _ = run("--model", place / "dense", "--data", place / "texts.jsonl", place / "more.txt", "--out", "x.json")
    found = json.loads(Path("x.json").read_text())
    texts = [*TEXTS, "a file that is one text"]
    nats, count = alone(place / "dense", tuple(texts), 48)
    size = sum(len(text.encode()) for text in texts)
    assert code == 0 and found["seq_len"] == 48 and found["tokenizer"] == "bytes"
    assert found["all"]["bytes"] == size
    assert found["all"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    assert found["all"]["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)


def test_evaluation_changes_no_file_and_writes_none_unasked(place, run, tmp_path):
    before = contents(place)
    code, said = run("--model", place / "dense", "--data", place / "more.txt", "--seq-len", 16)
    assert code == 0 and "nats/token perplexity bits/byte" in said and "more.txt 1 23 " in said
    assert contents(place) == before and not [*tmp_path.iterdir()]


def test_token_shards_cost_what_their_texts_do_and_have_no_bits_per_byte(place, run):
    assert main(["prepare", str(place / "texts.jsonl"), "--out", "shards", "--workers", "1"]) == 0
    for flags in (["shards"], ["shards", place / "texts.jsonl"]):
        assert run("--model", place / "glm5", "--data", *flags, "--seq-len", SEQ_LEN, "--out", "x.json")[0] == 0
        found = json.loads(Path("x.json").read_text())
        nats, count = alone(place / "glm5", tuple(TEXTS))
        assert found["files"]["shards"]["nll"] == pytest.approx(nats / count, rel=1e-6)
        assert found["all"]["bytes"] is found["all"]["bits_per_byte"] is None
    assert (
        "shards: token shards hold no text, so there are no bits per byte"
        in run("--model", place / "glm5", "--data", "shards", "--seq-len", SEQ_LEN)[1]
    )


def test_a_checkpoint_is_evaluated_with_the_tokenizer_of_its_run(place, run, tmp_path):
    cfg = tiny(**PLAIN, vocab_size=288, eos_token_id=(256,))
    data = DataConfig(tokenizer=str(ROOT / "examples" / "chat"))
    config = dump(RunConfig(name="x", model=cfg, layout=LAYOUTS["fsdp"], data=data))
    saved = save_checkpoint(tmp_path, State(params=random_params(cfg), moments={}, step=1), config)
    before = contents(saved)
    code, said = run("--model", saved, "--data", place / "more.txt", "--out", "x.json")
    found = json.loads(Path("x.json").read_text())
    assert code == 0, said
    assert found["tokenizer"] == data.tokenizer and found["all"]["tokens"] == found["all"]["bytes"] == 23
    assert contents(saved) == before


def test_parameters_rest_in_the_dtype_that_is_computed_in_but_for_those_that_stay_wide(place):
    held = flatten(load_for(place / "glm5", precision="bf16").params)
    specs = dict(rows(model_specs(MODELS["glm5"])))
    assert {path: leaf.dtype for path, leaf in held.items()} == {
        path: torch.float32 if row.wide else torch.bfloat16
        for path, row in specs.items()
        if not path.startswith("mtp.")
    }


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--model nowhere --data more.txt", "--model nowhere: nowhere: is not there, must be a model's directory"),
        ("--model dense", "one of --data and --task must be set"),
        ("--model dense --data more.txt --task mmlu --path .", "one of --data and --task must be set"),
        ("--model dense --task mmlu", "--path must be set with --task"),
        ("--model dense --data more.txt --path .", "--path must be set with --task"),
        ("--model dense --task mmlu --path .", "--path .: has no questions for test"),
        ("--model dense --data more.txt --batch 0", "--batch (0) must be at least 1"),
        ("--model dense --data more.txt --seq-len 49", "--seq-len (49) must be from 1 to the model's max_position_em"),
        ("--model dense --data no.jsonl", "no.jsonl: is not there: data.path must be a file"),
        ("--model dense --data more.md", "more.md: data.path must end in one of"),
        ("--model dense --data x.safetensors", "x.safetensors: is a file of fixed batches"),
        ("--model dense --data more.txt more.txt", "more.txt: --data names it more than once"),
        ("--model dense --data more.txt --out .", "--out .: cannot be written to (it is a directory)"),
        ("--model dense --data more.txt --out no/x.json", "--out no/x.json: cannot be written to"),
        ("--model dense --data more.txt --tokenizer no", "no: is not there: a tokenizer must be"),
        ("--model dense --data more.txt --mesh.cp 0", "mesh.cp (0) must be at least 1"),
        ("--model glm5 --data more.txt --mesh.dp-shard 3 --mesh.ep 2", "mesh.ep (2) must divide mesh.dp-shard (3)"),
        ("--model dense --data more.txt --mesh.dp-shard 2 --mesh.ep 2", "n_routed_experts (0) must be above 0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_a_process_is_started(place, run, monkeypatch, argv, said):
    monkeypatch.setattr("glm5fn.inference.launch", lambda *_: pytest.fail("processes were started"))
    for name in ("dense", "glm5", "more.txt"):
        Path(name).symlink_to(place / name)
    Path("more.md").write_text("x")
    code, printed = run(*argv.split())
    assert code == 2 and said in printed


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bad.jsonl", b'{"text": "good"}\n{"text": 5}\n', "bad.jsonl:2: 'text' is of type int, must be a string"),
        ("bad.jsonl", b'{"text": ""}\n', "bad.jsonl: has no document of at least two tokens"),
        ("bad.txt", b"\xff", "bad.txt:1: must be UTF-8 text"),
    ],
)
def test_bad_documents_end_it_with_file_and_line_and_exit_code_1(place, run, name, content, said):
    Path(name).write_bytes(content)
    code, printed = run("--model", place / "dense", "--data", name)
    assert code == 1 and said in printed


def test_bad_rows_are_left_out_on_request_and_the_text_may_have_another_key(place, run):
    Path("bad.jsonl").write_bytes(b'{"own": "good"}\n{"own": 5}\n')
    code, said = run("--model", place / "dense", "--data", "bad.jsonl", "--field", "own", "--skip-bad")
    assert code == 0 and "bad.jsonl: 1 bad rows left out: bad.jsonl:2" in said and "bad.jsonl 1 4 " in said


def test_ids_that_the_model_lacks_are_named_before_anything_is_computed(place, run):
    assert main(["prepare", str(place / "more.txt"), "--out", "shards", "--workers", "1"]) == 0
    path = next(Path("shards").glob("*.bin"))
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\xff")
    code, said = run("--model", place / "dense", "--data", "shards")
    assert code == 1 and "has token 65535, must be from 0 to vocab_size (263) - 1" in said


def test_weights_that_are_not_finite_are_told_and_no_figure_is(place, run, tmp_path):
    params = random_params(MODELS["dense"])
    params["norm"][0] = math.nan
    save(tmp_path / "nan", params, MODELS["dense"])
    code, said = run("--model", "nan", "--data", place / "more.txt", "--out", "x.json")
    assert code == 1 and "log-probabilities are not finite: are all of the model's weights?" in said
    assert not Path("x.json").exists()


def failing(directory, path, grid):
    try:
        measured(directory, [path if mesh.rank() else directory.parent / "more.txt"], 1, "none", grid)
    except mesh.RunError as error:
        return str(error)


def test_what_one_rank_cannot_read_ends_all_of_them(place, pools):
    assert set(pools(2)(failing, place / "glm5", place / "no.txt", GRIDS["shard 2"])) == {
        f"[Errno 2] No such file or directory: '{place / 'no.txt'}'"
    }


@pytest.mark.slow
def test_the_command_starts_the_processes_of_its_mesh_which_give_the_figures_of_one(place, run, tmp_path):
    argv = ["--model", place / "experts", "--data", place / "texts.jsonl", "--device", "cpu", "--batch", "2"]
    assert run(*argv, "--out", "one.json")[0] == 0
    hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTEST_XDIST_WORKER"}
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "glm5fn", "evaluate", *map(str, argv), "--out", "two.json", "--mesh.dp-shard", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("nats/token", done.stdout)) == 1
    one, two = (json.loads((tmp_path / f"{name}.json").read_text())["all"] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-6)


# --- scores of continuations ---


def slowly(directory, context, continuation):
    cfg, params = load(directory)
    ids = torch.tensor([[*context, *continuation]])
    logs = forward(params, ids[:, :-1], cfg)[0, len(context) - 1 :].double().log_softmax(-1)
    wanted = torch.tensor(continuation)
    return float(logs.gather(-1, wanted[:, None]).sum()), bool((logs.argmax(-1) == wanted).all())


def likeliest(directory, context, count):
    cfg, params = load(directory)
    ids = [*context]
    for _ in range(count):
        ids.append(int(forward(params, torch.tensor([ids]), cfg)[0, -1].argmax()))
    return ids[len(context) :]


LONG = [*range(3, 33)]
PAIRS = [([5, 9, 7], [n]) for n in (1, 2, 3)] + [
    ([5, 9], [7, 1, 4]),
    ([5], [9]),
    (LONG, [8, 8]),
    (LONG[:4], [8]),
    ([200], []),
    ([1, 2], [262, 0, 1, 2, 3, 4]),
    ([5, 9, 7], [1]),
]


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_each_pair_alone_in_their_order(place, name, batch):
    directory = place / name
    pairs = [*PAIRS, (LONG[:5], likeliest(directory, LONG[:5], 3)), ([9], [*likeliest(directory, [9], 1), 1])]
    found = score.score(loaded(directory), pairs, batch)
    for scored, (context, continuation) in zip(found, pairs, strict=True):
        log, greedy = slowly(directory, context, continuation) if continuation else (0.0, True)
        assert scored.log == pytest.approx(log, rel=1e-5) and scored.greedy == greedy
    assert [scored.greedy for scored in found[-2:]] == [True, False]


def scored(directory, grid):
    return score.score(loaded(directory, grid), PAIRS, 2)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=[*GRIDS])
def test_two_ranks_give_the_scores_of_one(place, pools, grid):
    one, other = pools(2)(scored, place / "glm5", grid)
    assert one == other
    for found, expected in zip(one, scored(place / "glm5", None), strict=True):
        assert found.log == pytest.approx(expected.log, rel=1e-6) and found.greedy == expected.greedy


def test_pairs_that_one_row_answers_share_it(place, monkeypatch):
    shapes, trunk = [], score.trunk
    monkeypatch.setattr(score, "trunk", lambda *args, **how: shapes.append(args[1].shape) or trunk(*args, **how))
    score.score(loaded(place / "dense"), [(LONG, [n]) for n in range(4)] + [(LONG[:5], LONG[5:9]), (LONG[:9], [])], 8)
    assert shapes == [(1, len(LONG))]


@pytest.mark.parametrize(("context", "said"), [([], "context 1 has 0 tokens"), ([1] * 48, "context 1 has 48 tokens")])
def test_a_context_that_cannot_be_scored_is_named(place, context, said):
    with pytest.raises(ValueError, match=said):
        score.score(loaded(place / "dense"), [([1], [2]), (context, [1, 2])])


def test_a_pair_is_encoded_as_one_text_and_spaces_at_its_seam_belong_to_the_continuation():
    def encode(texts):
        return [torch.tensor([len(word) for word in re.findall(" *[^ ]+| +$", text)]).numpy() for text in texts]

    [(context, continuation)] = score.encode_pair(encode, "one two  ", "three")
    assert context.tolist() == [3, 4] and continuation.tolist() == [7]
