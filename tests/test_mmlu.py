"""`python -m glm5fn evaluate --task mmlu`: the letters that a model finds likeliest, against a slow reference."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny import PLAIN, random_params, tiny

from glm5fn import forward, load, mmlu, save
from glm5fn.__main__ import main
from glm5fn.inference import load_for
from glm5fn.settings import MeshConfig
from glm5fn.text import BYTES
from glm5fn.tree import flatten

FILES = Path(__file__).parent / "mmlu"
SUBJECTS = {"astronomy": 13, "elementary_mathematics": 13, "geography": 14}
EACH_LAYOUT = pytest.mark.parametrize("layout", ["csv", "jsonl"])
MODEL = tiny(**PLAIN, vocab_size=263, max_position_embeddings=700)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mmlu") / "model"
    save(directory, random_params(MODEL), MODEL)
    return directory


@cache
def loaded(directory, grid=None):
    return load_for(directory, mesh=grid or MeshConfig())


def measured(directory, path, shots, batch, grid=None):
    return mmlu.measure(loaded(directory, grid), path, shots, batch)[1]


def rows(name):
    return [json.loads(line) for line in (FILES / "jsonl" / f"{name}.jsonl").read_text().splitlines()]


@cache
def slowly(directory, shots):
    """How many questions of each subject are answered rightly, one forward pass a question, read from the rows."""
    cfg, params = load(directory)
    dev, test = (
        [*map(json.loads, (FILES / "jsonl" / f"{name}.jsonl").read_text().splitlines())] for name in ("dev", "test")
    )

    def block(row):
        lines = (f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
        return "\n".join([row["question"], *lines, "Answer:"])

    right = dict.fromkeys(SUBJECTS, 0)
    for row in test:
        subject = row["subject"]
        shown = [block(one) + f" {'ABCD'[one['answer']]}\n\n" for one in dev if one["subject"] == subject][:shots]
        head = "The following are multiple choice questions (with answers) about {}.\n\n"
        ids = [*(head.format(subject.replace("_", " ")) + "".join(shown) + block(row)).encode(), ord(" ")]
        logs = forward(params, torch.tensor([ids]), cfg)[0, -1]
        right[subject] += int(logs[[*b"ABCD"]].argmax()) == row["answer"]
    return right


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        code = main(["evaluate", "--task", "mmlu", *map(str, argv)])
        return code, " ".join("".join(capsys.readouterr()).split())

    return run


@EACH_LAYOUT
@pytest.mark.parametrize("shots", [0, 3])
def test_the_accuracy_is_that_of_a_slow_reference(model, run, layout, shots):
    code, said = run("--model", model, "--path", FILES / layout, "--shots", shots, "--out", "x.json")
    found, right = json.loads(Path("x.json").read_text()), slowly(model, shots)
    assert code == 0 and found["questions"] == 40 and found["prompts_cut"] == 0
    assert {name: (each["questions"], each["right"]) for name, each in found["subjects"].items()} == {
        name: (count, right[name]) for name, count in SUBJECTS.items()
    }
    assert found["accuracy"] == sum(right.values()) / 40
    assert found["mean_of_subjects"] == pytest.approx(sum(right[n] / SUBJECTS[n] for n in SUBJECTS) / 3)
    assert f"all questions 40 {found['accuracy']:.4f} mean of 3 subjects {found['mean_of_subjects']:.4f}" in said


@pytest.mark.parametrize("grid", [MeshConfig(dp_shard=2), MeshConfig(cp=2)], ids=["shard 2", "cp 2"])
def test_two_ranks_and_any_batch_answer_as_one_does(model, pools, grid):
    one, other = pools(2)(measured, model, FILES / "csv", 1, 7, grid)
    assert one == other == measured(model, FILES / "jsonl", 1, 2)


def test_a_prompt_has_the_examples_of_its_subject_with_their_letters_before_the_question():
    examples, questions = mmlu.read(FILES / "csv", "dev"), mmlu.read(FILES / "csv", "test")
    [question] = [each for each in questions if each.text.startswith("Ann")]
    assert mmlu.prompt_text(question, [each for each in examples if each.subject == question.subject][:1]) == (
        "The following are multiple choice questions (with answers) about elementary mathematics.\n\n"
        "What is 7 times 8?\nA. 54\nB. 56\nC. 63\nD. 64\nAnswer: B\n\n"
        "Ann has 3 bags of 6 apples, and eats 2.\nHow many are left?\nA. 18\nB. 16\nC. 11\nD. 20\nAnswer:"
    )


def test_of_letters_that_are_alike_the_first_is_the_answer(run, tmp_path):
    params = random_params(MODEL)
    flatten(params)["head"].zero_()
    save(tmp_path / "flat", params, MODEL)
    assert run("--model", "flat", "--path", FILES / "csv", "--shots", 0, "--out", "x.json")[0] == 0
    alike = sum(row["answer"] == 0 for row in rows("test"))
    assert json.loads(Path("x.json").read_text())["accuracy"] == alike / 40


def test_a_prompt_that_is_too_long_loses_its_first_examples():
    questions = mmlu.read(FILES / "csv", "test")
    examples = mmlu.read(FILES / "csv", "dev")[:5]
    encode = BYTES.encode
    whole = mmlu.prompt_of(questions[0], examples, encode, 10**6)
    for kept in (4, 0):
        text = mmlu.prompt_text(questions[0], examples[5 - kept :])
        cut = mmlu.prompt_of(questions[0], examples, encode, len(text) + 1)
        assert cut.dropped == 5 - kept and bytes(cut.pairs[0][0].tolist()).decode() == text
        assert [pair[1].tolist() for pair in cut.pairs] == [pair[1].tolist() for pair in whole.pairs]
    with pytest.raises(ValueError, match=r"astronomy_test.csv:1: the question takes 1\d\d tokens without any example"):
        mmlu.prompt_of(questions[0], examples, encode, 100)


def test_it_is_told_how_many_prompts_were_cut(model, run):
    code, said = run("--model", model, "--path", FILES / "csv", "--out", "x.json")
    cut = json.loads(Path("x.json").read_text())["prompts_cut"]
    assert code == 0 and 0 < cut < 40
    assert f"{cut} of 40 prompts have fewer than 5 examples, so that they fit the model's positions" in said


@EACH_LAYOUT
@pytest.mark.parametrize(
    ("csv_row", "json_row", "said"),
    [
        ("q,a,b,c,A", '{"question": "q", "subject": "s", "choices": ["a"], "answer": 0}', "must "),
        ("q,a,b,c,d,E", '{"question": "q", "subject": "s", "choices": ["a", "b", "c", "d"], "answer": 4}', "must "),
        ("q,a,b,c,d,AB", '{"question": "q", "subject": "s", "choices": ["a", "b", "c", "d"], "answer": "A"}', "must "),
        ("q,a,b,c,d,", '{"question": "q", "choices": ["a", "b", "c", "d"], "answer": 0}', "must "),
        ('q,a,b,c,"d"x,A', "[1]", ""),
        ('"q', '{"question"', ""),
        ("q\xff", "\xff", "UTF-8"),
    ],
)
def test_a_bad_row_ends_it_with_file_and_line(model, run, tmp_path, layout, csv_row, json_row, said):
    shutil.copytree(FILES / layout, tmp_path / "bad")
    name = "test/geography_test.csv" if layout == "csv" else "test.jsonl"
    file = tmp_path / "bad" / name
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines, (csv_row if layout == "csv" else json_row).encode("latin-1")]))
    code, printed = run("--model", model, "--path", "bad", "--shots", 0)
    assert code == 1 and f"bad/{name}:{len(lines) + 1}: " in printed and said in printed


def test_examples_that_lack_are_told_with_their_subject(model, run, tmp_path):
    shutil.copytree(FILES / "csv", tmp_path / "few")
    (tmp_path / "few" / "dev" / "geography_dev.csv").unlink()
    code, said = run("--model", model, "--path", "few", "--shots", 2)
    assert code == 1 and "few: has 0 examples of geography in dev, --shots (2) needs as many: set a smaller one" in said
    assert (
        "few: has 5 examples of astronomy in dev, --shots (6)"
        in run("--model", model, "--path", "few", "--shots", 6)[1]
    )
    shutil.rmtree(tmp_path / "few" / "dev")
    assert "--path few: has no questions for dev" in run("--model", model, "--path", "few", "--shots", 1)[1]
