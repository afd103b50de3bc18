"""The adapter for lm-evaluation-harness gives our own numbers. Needs lm-eval, of the eval extra."""

import json
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import PLAIN, random_params, tiny

from glm5fn import forward, load, save
from glm5fn.mmlu import measure

pytestmark = pytest.mark.slow
FILES = Path(__file__).parent / "mmlu" / "jsonl"
MODEL = tiny(**PLAIN, vocab_size=263, max_position_embeddings=600)
END = 256
CHOICES = "".join(f"{letter}. {{{{choices[{n}]}}}}\n" for n, letter in enumerate("ABCD"))


@pytest.fixture(scope="module", autouse=True)
def lm_eval():
    """The harness, with our models made known to it."""
    found = pytest.importorskip("lm_eval")
    pytest.importorskip("glm5fn.harness")
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("harness") / "model"
    save(directory, random_params(MODEL), MODEL)
    return directory


@pytest.fixture(scope="module")
def lm(directory, lm_eval):
    made = lm_eval.api.registry.get_model("glm5fn").create_from_arg_string(
        f"path={directory},precision=fp32", {"batch_size": 3, "max_batch_size": None, "device": "cpu"}
    )
    assert isinstance(made, lm_eval.api.model.LM)
    return made


def asked(*args):
    return [SimpleNamespace(args=one) for one in args]


def slowly(directory, context, continuation):
    """The log-probability of ids behind others, and whether they are likeliest."""
    cfg, params = load(directory)
    logs = forward(params, torch.tensor([[*context, *continuation]]), cfg)[0, len(context) - 1 : -1].double()
    wanted = torch.tensor([*continuation])
    log = float(logs.log_softmax(-1).gather(-1, wanted[:, None]).sum())
    return log, bool((logs.argmax(-1) == wanted).all())


def test_loglikelihoods_are_those_of_the_ids(lm, directory):
    pairs = [("What is it?", " a bird"), ("What is it? ", "a bird"), ("", "begin"), (" \n", "x"), ("y" * 700, "zz")]
    ids = [
        (b"What is it?", b" a bird"),
        (b"What is it?", b" a bird"),
        ([END], b"begin"),
        ([END], b" \nx"),
        (b"y" * 599, b"zz"),
    ]
    found = lm.loglikelihood(asked(*pairs))
    for (log, greedy), (context, continuation) in zip(found, ids, strict=True):
        expected = slowly(directory, context, continuation)
        assert log == pytest.approx(expected[0], rel=1e-5) and greedy == expected[1]


def test_a_rolling_loglikelihood_predicts_each_token_once_the_first_from_the_end_of_a_document(lm, directory):
    text = "a text that is longer than the positions of the model. " * 23
    found = lm.loglikelihood_rolling(asked((text,), ("short",), ("",)))
    ids = text.encode()
    pieces = [([END], ids[:600]), (ids[599:600], ids[600:1200]), (ids[664:1200], ids[1200:])]
    log = sum(slowly(directory, *piece)[0] for piece in pieces)
    assert len(ids) == 1265 and found[0] == pytest.approx(log, rel=1e-5)
    assert found[1] == pytest.approx(slowly(directory, [END], b"short")[0], rel=1e-5)
    assert found[2] == 0


def test_generation_is_greedy_and_ends_before_a_stop_text(lm, directory):
    whole = lm.generate_until(asked(("Once", {"until": [], "max_gen_toks": 8}), ("", {"max_gen_toks": 3})))
    cfg, params = load(directory)
    ids = [*b"Once"]
    for _ in range(8):
        ids.append(int(forward(params, torch.tensor([ids]), cfg)[0, -1].argmax()))
    new = ids[4:]
    expected = lm.loaded.tokenizer.decode(new[: new.index(END)] if END in new else new)
    assert whole[0] == expected
    stop = expected[2:4]
    assert lm.generate_until(asked(("Once", {"until": [stop], "max_gen_toks": 8}))) == [
        expected[: expected.index(stop)]
    ]


def task(place, name, files, **settings):
    """The names of a task of the harness on local files, which this writes."""
    cache = {"data_files": {split: str(path) for split, path in files.items()}, "cache_dir": str(place / "cache")}
    held = {"task": name, "dataset_path": "json", "dataset_kwargs": cache, "test_split": "test", **settings}
    (place / f"{name}.yaml").write_text(json.dumps(held))
    return name


def test_a_task_has_the_accuracy_of_our_own_command(lm, lm_eval, tmp_path):
    subjects = ("astronomy", "elementary_mathematics", "geography")
    names = []
    for subject in subjects:
        files = {split: tmp_path / f"{subject}_{split}.jsonl" for split in ("dev", "test")}
        for split, path in files.items():
            rows = (FILES / f"{split}.jsonl").read_text().splitlines(keepends=True)
            path.write_text("".join(row for row in rows if json.loads(row)["subject"] == subject))
        about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        settings = {
            "fewshot_split": "dev",
            "fewshot_config": {"sampler": "first_n"},
            "num_fewshot": 2,
            "output_type": "multiple_choice",
            "description": about,
            "doc_to_text": "{{question.strip()}}\n" + CHOICES + "Answer:",
            "doc_to_choice": [*"ABCD"],
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        names.append(task(tmp_path, f"ours_{subject}", files, **settings))
    tasks = import_module("lm_eval.tasks").TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(model=lm, tasks=names, task_manager=tasks, bootstrap_iters=0)["results"]
    ours = measure(lm.loaded, FILES, 2, 7)[1]["subjects"]
    assert {s: found[f"ours_{s}"]["acc,none"] for s in subjects} == {s: ours[s]["accuracy"] for s in subjects}


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"batch_size": "auto"}, r"batch_size \(auto\) must be"), ({"max_length": 601}, r"max_length \(601\) must be")],
)
def test_settings_that_cannot_be_are_refused(directory, settings, said):
    with pytest.raises(ValueError, match=said):
        import_module("glm5fn.harness").GLM(path=str(directory), device="cpu", **settings)


def test_sampling_is_obeyed(lm):
    drawn = ("x", {"do_sample": True, "temperature": 3.0, "max_gen_toks": 20})
    one, two, three = lm.generate_until(asked(drawn, drawn, ("x", {"max_gen_toks": 20})))
    assert one != two and three not in (one, two)  # each row has draws of its own
    assert lm.generate_until(asked(drawn, drawn)) == [one, two]
    surest = ("x", drawn[1] | {"top_k": 1})
    assert lm.generate_until(asked(surest)) == [three]


def test_the_command_line_of_the_module_is_that_of_the_harness_with_our_models(lm, directory, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "one text"}) + "\n")
    settings = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    task(tmp_path, "roll", {"test": tmp_path / "x.jsonl"}, **settings, metric_list=[{"metric": "byte_perplexity"}])
    argv = ["run", "--model", "glm5fn", "--model_args", f"path={directory}", "--tasks", "roll", "--device", "cpu"]
    command = [sys.executable, "-m", "glm5fn.harness", *argv, "--include_path", tmp_path, "--output_path", "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    [file] = (tmp_path / "out").rglob("results*.json")
    [log] = lm.loglikelihood_rolling(asked(("one text",)))
    assert json.loads(file.read_text())["results"]["roll"]["byte_perplexity,none"] == pytest.approx(math.exp(-log / 8))
