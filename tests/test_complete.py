"""`python -m glm5fn generate`: texts, chats and files of rows, as a person calls it."""

import gzip
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_generate import slow
from test_layouts import SMALL
from tiny import GLM5, random_params, tiny

from glm5fn import save, save_hf
from glm5fn.__main__ import main
from glm5fn.chat import encode_question, open_template
from glm5fn.complete import stops_of
from glm5fn.text import BYTES, Stream, open_tokenizer

ROOT = Path(__file__).parent.parent
CHAT = str(ROOT / "examples" / "chat")
CFG = tiny(**GLM5 | SMALL | {"vocab_size": 260, "max_position_embeddings": 200})
PARAMS = random_params(CFG)
PROMPTS = ["once", "a longer one than that", "x", "w\u00f6rter", "and the last"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generate") / "model"
    save(directory, PARAMS, CFG)
    return directory


@pytest.fixture(scope="module")
def expected():
    """What the model writes behind each prompt: 9 tokens, fewer if it ends."""
    found = []
    for prompt in PROMPTS:
        ids, _ = slow(PARAMS, list(prompt.encode()), CFG, 9)
        found.append(ids[: ids.index(256) + 1] if 256 in ids else ids)
    return found


def generate(*argv):
    return main(["generate", *map(str, argv), "--max-new-tokens", "9"])


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_text_behind_a_prompt_is_shown_with_what_it_took(drafts, model, expected, capsys, tmp_path):
    assert generate("--model", model, "--prompt", PROMPTS[1], "--drafts", drafts) == 0
    shown = capsys.readouterr()
    assert shown.out == BYTES.decode([token for token in expected[1] if token != 256]) + "\n"
    assert (
        "[22 tokens of prompt in" in shown.err and "tokens/s" in shown.err and ("a round" in shown.err) == bool(drafts)
    )
    (tmp_path / "prompt.txt").write_text(PROMPTS[1])
    assert generate("--model", model, tmp_path / "prompt.txt") == 0
    assert capsys.readouterr().out == shown.out


def test_compiled_layers_run_all_but_the_prompt(model, expected, capsys, monkeypatch):
    steps = []

    def compiled(function, dynamic):
        assert dynamic
        return lambda params, x, *rest, **how: steps.append(x.shape[1]) or function(params, x, *rest, **how)

    monkeypatch.setattr("torch.compile", compiled)
    assert generate("--model", model, "--prompt", PROMPTS[1], "--compile") == 0
    assert capsys.readouterr().out == BYTES.decode([token for token in expected[1] if token != 256]) + "\n"
    assert steps == [1] * CFG.num_hidden_layers * (len(expected[1]) - 1)


@pytest.mark.slow
def test_a_compiled_model_writes_the_text_of_one_that_is_not(model, capsys):
    texts = []
    for flags in ([], ["--compile"]):
        assert generate("--model", model, "--prompt", PROMPTS[1], *flags) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_each_row_of_a_file_is_completed_once_wherever_a_run_was_stopped(batch, model, expected, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt, "id": n}) + "\n" for n, prompt in enumerate(PROMPTS)))
    command = ["--model", model, "--jsonl", source, "--out", out, "--batch", batch]
    assert generate(*command) == 0
    found = rows_of(out)
    for number, (row, prompt, ids) in enumerate(zip(found, PROMPTS, expected, strict=True)):
        text = BYTES.decode([token for token in ids if token != 256])
        finish = "stop" if 256 in ids else "length"
        made = {"text": text, "tokens": len(ids), "finish": finish}
        assert row == {"prompt": prompt, "id": number, "generated": made}
    whole = out.read_bytes()
    ends = [n for n, byte in enumerate(whole, 1) if byte == ord("\n")]
    for cut in (0, ends[1], ends[2] + 9, len(whole)):  # after a row, and in the midst of one
        out.write_bytes(whole[:cut])
        assert generate(*command) == 0
        assert out.read_bytes() == whole


def test_drawn_rows_do_not_depend_on_the_batch(model, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS[:3] * 2))
    drawn = ["--field", "text", "--temperature", "1.5", "--top-p", "0.9", "--seed", "3"]
    for batch in (1, 4):
        out = tmp_path / f"{batch}.jsonl"
        assert generate("--model", model, "--jsonl", source, "--out", out, "--batch", batch, *drawn) == 0
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "4.jsonl").read_bytes()
    first, *_, again, _, _ = rows_of(tmp_path / "1.jsonl")
    assert first["text"] == again["text"] and first["generated"] != again["generated"]


@pytest.mark.slow
def test_several_processes_write_the_rows_of_one(model, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    for name, mesh in {"one": [], "two": ["--mesh.dp-shard", "2", "--mesh.ep", "2", "--drafts", "1"]}.items():
        command = ["generate", "--model", model, "--jsonl", source, "--out", tmp_path / name, "--max-new-tokens", "5"]
        done = subprocess.run(
            [sys.executable, "-m", "glm5fn", *map(str, command), *mesh],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A model with the tokenizer and the template of the examples."""
    directory = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = open_tokenizer(CHAT, None)
    ends = tuple(tokenizer.control[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>"))
    cfg = tiny(vocab_size=tokenizer.size, max_position_embeddings=400, eos_token_id=ends)
    save_hf(directory, random_params(cfg), cfg)
    for file in Path(CHAT).iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory, cfg


def test_a_chat_answers_each_line_with_all_that_was_said_before_it(chatty, capsys, monkeypatch):
    directory, _ = chatty
    asked = []
    monkeypatch.setattr("glm5fn.complete.encode_question", lambda row, *rest: noted(row, *rest))

    def noted(row, *rest):
        asked.append([(message["role"], message["content"]) for message in row["messages"]])
        return encode_question(row, *rest)

    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nand now?\n"))
    assert generate("--model", directory, "--chat") == 0
    first, second = asked
    assert first == [("user", "hello")]
    assert [role for role, _ in second] == ["user", "assistant", "user"] and second[2][1] == "and now?"
    assert second[1][1] in capsys.readouterr().out


def test_a_message_that_cannot_be_answered_is_told_and_the_chat_goes_on(chatty, capsys, monkeypatch):
    directory, _ = chatty
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'long ' * 300}\nshort\n"))
    assert generate("--model", directory, "--chat") == 0
    said = capsys.readouterr().err
    assert "must have fewer than max_position_embeddings" in said and said.count("tokens of prompt") == 1


def test_a_question_ends_where_the_answer_begins_and_its_control_tokens_are_text():
    tokenizer, render = open_tokenizer(CHAT, None), open_template(CHAT, None)
    row = {"messages": [{"role": "user", "content": "say <|assistant|> twice"}]}
    ids = encode_question(row, tokenizer, render, False)
    names = [name for name in tokenizer.control if tokenizer.control[name] in ids]
    assert sorted(names) == sorted(["[gMASK]", "<sop>", "<|user|>", "<|assistant|>"])
    assert ids[-1] == tokenizer.control["<|assistant|>"]
    assert all((ids == tokenizer.control[name]).sum() == 1 for name in names)
    assert (encode_question(row, tokenizer, render, True) == ids[-1]).sum() == 2


def test_the_text_and_the_rows_of_a_chat_go_through_the_template(chatty, tmp_path, capsys):
    directory, _ = chatty
    assert generate("--model", directory, "--chat", "--prompt", "hello") == 0
    shown = capsys.readouterr().out.removesuffix("\n")
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    assert generate("--model", directory, "--jsonl", source, "--out", tmp_path / "out") == 0
    (row,) = rows_of(tmp_path / "out")
    assert row["generated"]["text"] == shown
    source.write_text(json.dumps({"prompt": "hello"}) + "\n")
    assert generate("--model", directory, "--jsonl", source, "--out", tmp_path / "chat", "--chat") == 0
    assert rows_of(tmp_path / "chat")[0]["generated"]["text"] == shown


def test_what_ends_a_text_is_said_by_generation_config_and_else_by_config(tmp_path):
    tokenizer = open_tokenizer(CHAT, None)
    cfg = tiny(vocab_size=tokenizer.size, eos_token_id=(2, 3, 5))
    assert stops_of(tmp_path, cfg, tokenizer) == {2, 3, 5}
    assert stops_of(tmp_path, cfg, BYTES) == {256}
    for given, wanted in (([7, 8], {7, 8}), (4, {4}), (None, {2, 3, 5})):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
        assert stops_of(tmp_path, cfg, tokenizer) == wanted
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [10**6]}))
    with pytest.raises(ValueError, match="must be ids below vocab_size"):
        stops_of(tmp_path, cfg, tokenizer)


def test_rows_may_be_written_in_every_way_that_texts_may(model, expected, tmp_path):
    lines = [json.dumps({"prompt": prompt}).encode() for prompt in PROMPTS[:2]]
    source, out = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    source.write_bytes(gzip.compress(b"\xef\xbb\xbf" + lines[0] + b"\r\n\n" + lines[1]))
    assert generate("--model", model, "--jsonl", source, "--out", out) == 0
    assert [row["generated"]["tokens"] for row in rows_of(out)] == [len(ids) for ids in expected[:2]]


@pytest.mark.parametrize("text", ["a\u00e9\u4e2d\U0001f642b", "\U0001f642\U0001f642", "plain", ""])
def test_a_stream_shows_whole_characters_as_soon_as_they_are_there(text):
    stream = Stream(BYTES)
    parts = [stream.add(byte) for byte in text.encode()]
    assert [part for part in parts if part] == list(text) and stream.end() == ""


@pytest.mark.parametrize("tokenizer", [BYTES, open_tokenizer(CHAT, None)], ids=["bytes", "byte pairs"])
def test_the_parts_of_a_stream_are_the_text_of_all_its_tokens(tokenizer):
    random = np.random.default_rng(0)
    smile = [int(token) for token in tokenizer.encode(["\U0001f642\u4e2d"])[0]]
    for _ in range(200):
        ids = random.integers(0, tokenizer.size, 12).tolist()
        cut = [token for token in smile * 6 if random.random() < 0.9]
        for tokens in (ids, cut, [*ids[:3], *smile, *ids[3:6], *smile[:2]]):
            stream = Stream(tokenizer)
            parts = [stream.add(token) for token in tokens]
            assert "".join(parts) + stream.end() == tokenizer.decode(tokens)


def test_characters_that_tokens_cut_across_are_shown_whole():
    pieces = {"a": b"\xf0\x9f\x98", "b": b"\x80\xf0", "c": b"\x9f\x98", "d": b"\x80"}
    across = replace(BYTES, decode=lambda ids: b"".join(pieces["abcd"[i]] for i in ids).decode(errors="replace"))
    stream = Stream(across)
    ids = [0, *[1, 2] * 8, 3]
    assert "".join(map(stream.add, ids)) == "\U0001f600" * 9


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "one of --prompt, FILE, --jsonl and --chat must be set"),
        (["--prompt", "x", "--jsonl", "in.jsonl"], "one of --prompt"),
        (["--jsonl", "in.jsonl"], "--out must be set with --jsonl"),
        (["--prompt", "x", "--out", "o"], "--out must be set with --jsonl"),
        (["--prompt", ""], "prompt 1 has no token"),
        (["--prompt", "x" * 200], "prompt 1 has 200 tokens: must have fewer than max_position_embeddings"),
        (["--prompt", "x", "--batch", "0"], "--batch (0) must be at least 1"),
        (["--prompt", "x", "--compile", "--drafts", "2"], "--compile and --drafts (2) exclude each other"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature (-1.0) must be at least 0"),
        (["--chat", "--prompt", "x"], "has no chat template"),
        (["--jsonl", "bad.jsonl", "--out", "o"], "bad.jsonl:2: the line must be one JSON object"),
        (
            ["--jsonl", "in.jsonl", "--out", "o", "--field", "text"],
            "in.jsonl:1: must have messages, or a text in 'text'",
        ),
        (["--jsonl", "in.jsonl", "--out", "other.jsonl"], "other.jsonl:1: is not of a row of --jsonl"),
        (["--jsonl", "in.jsonl", "--out", "notes"], "notes:1: is not of a row of --jsonl"),
        (["--jsonl", "in.jsonl", "--out", "in.jsonl"], "in.jsonl:1: is not of a row of --jsonl"),
        (["--jsonl", "in.jsonl", "--out", "none/o"], "--out none/o: cannot be written to"),
        (["--jsonl", "made.jsonl", "--out", "o"], "made.jsonl:1: the object has 'generated'"),
        (["--jsonl", "half.jsonl", "--out", "o"], "half.jsonl:1: the object has half a surrogate pair"),
        (["--jsonl", "in.txt", "--out", "o"], "in.txt: must be in one of .jsonl"),
        (["--jsonl", "none.jsonl", "--out", "o"], "No such file"),
        (["--prompt", "x", "--mesh.ep", "3"], "mesh"),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_model_is_read(argv, message, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("glm5fn.complete.load_for", lambda *_, **__: pytest.fail("the model was read"))
    Path("in.jsonl").write_text('{"prompt": "x"}\n')
    Path("bad.jsonl").write_text('{"prompt": "x"}\n{"prompt"\n')
    Path("other.jsonl").write_text('{"prompt": "y", "generated": {}}\n')
    Path("notes").write_text("a file that is no such thing")
    Path("made.jsonl").write_text('{"prompt": "x", "generated": "y"}\n')
    Path("half.jsonl").write_text('{"prompt": "x", "id": "\\ud800"}\n')
    before = sorted(Path().iterdir())
    assert generate("--model", model, *argv) == 2
    assert message in capsys.readouterr().err
    assert sorted(Path().iterdir()) == before


def test_a_model_that_is_not_there_is_refused(tmp_path, capsys):
    assert generate("--model", tmp_path / "none", "--prompt", "x") == 2
    assert "is not there" in capsys.readouterr().err
    assert torch.is_grad_enabled()
