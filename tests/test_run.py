"""Whole runs on one process: how a run was cut in parts, watched or computed changes no number of it."""

import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from training import BATCH, RUN, TINY, contents, fixed, numbers, state, text, train
from transformers import AutoModelForCausalLM

import train as script
from configs import RUNS
from glm5fn import model
from glm5fn.checkpoint import newest
from glm5fn.record import occupy, read_metrics
from glm5fn.run import train as train_run
from glm5fn.typed import ConfigError


@pytest.fixture
def go(tmp_path, capsys):
    """`go(name, *flags)` trains on a short text in the directory `name`; returns the exit code and what was said."""
    data = text(tmp_path)

    def go(name, *flags):
        code = train(*RUN, "--data.path", data, "--out", tmp_path / name, *flags)
        return code, "".join(capsys.readouterr())

    return go


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_that_stops_and_goes_on_equals_one_that_does_not(go, tmp_path, optimizer):
    flags = ["--optim.name", optimizer, "--optim.lr", "0.01"]
    assert go("straight", *flags, "--steps", "10")[0] == 0
    for steps in ("3", "7", "10"):
        assert go("parts", *flags, "--steps", steps, "--resume", "auto")[0] == 0
    assert [row[0] for row in numbers(tmp_path / "parts")] == list(range(1, 11))
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "straight")
    assert state(tmp_path / "parts") == state(tmp_path / "straight")


def test_a_seed_gives_the_same_bits_again_and_another_one_other_bits(go, tmp_path):
    for name, seed in (("one", "1"), ("same", "1"), ("other", "2")):
        assert go(name, "--steps", "4", "--seed", seed)[0] == 0
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    assert numbers(one) == numbers(same) and state(one) == state(same)
    assert all(a[1] != b[1] for a, b in zip(numbers(one), numbers(other), strict=True))


@pytest.mark.parametrize("flags", [[], ["--optim.lr", "0.5"], ["--steps", "2"]], ids=str)
@pytest.mark.parametrize("start", ["auto", "x/checkpoints/step_00000004"])
def test_a_run_that_is_done_says_so_and_no_file_changes(go, tmp_path, start, flags):
    go("x", "--steps", "4", "--checkpoint.every", "2")
    before = contents(tmp_path / "x")
    start = start if start == "auto" else tmp_path / start
    code, said = go("x", "--steps", "4", "--resume", start, *flags)
    assert code == 0 and "nothing left to do: 4 steps are done" in said
    assert contents(tmp_path / "x") == before


def test_a_run_that_was_cut_short_goes_on_along_the_same_schedule(go, tmp_path):
    schedule = ["--optim.decay-steps", "8", "--optim.min-lr", "1e-5"]
    go("x", *schedule, "--steps", "6")
    code, said = go("x", *schedule, "--steps", "12", "--resume", "auto")
    rates = [row[3] for row in numbers(tmp_path / "x")]
    assert code == 0 and len(rates) == 12
    assert rates[:5] == sorted(rates[:5]) and rates[5:] == sorted(rates[5:], reverse=True) and rates[-1] == 1e-5
    assert "settings changed since the checkpoint: steps 6 -> 12" in said


def test_going_on_with_other_settings_names_each_that_changed(go):
    go("x", "--steps", "2")
    said = go("x", "--steps", "3", "--resume", "auto", "--optim.clip", "0.5", "--model.eos-token-id", "7", "8")[1]
    assert "model.eos_token_id [] -> [7, 8]; optim.clip 1.0 -> 0.5; steps 2 -> 3" in said


def test_without_a_checkpoint_a_run_starts_at_step_0_and_says_so(go, tmp_path):
    code, said = go("x", "--steps", "2", "--resume", "auto")
    assert code == 0 and f"no checkpoint in {tmp_path / 'x' / 'checkpoints'}: starting at step 0" in said
    assert [row[0] for row in numbers(tmp_path / "x")] == [1, 2]


def test_the_record_is_cut_back_to_the_step_that_a_run_goes_on_from(go, tmp_path):
    go("x", "--steps", "6", "--checkpoint.every", "2", "--checkpoint.keep", "3")
    straight = numbers(tmp_path / "x")
    with (tmp_path / "x" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # as a kill would leave it
    assert go("x", "--steps", "5", "--resume", tmp_path / "x" / "checkpoints" / "step_00000002")[0] == 0
    assert numbers(tmp_path / "x") == straight[:5]


def test_evaluation_changes_no_number_of_the_training(go, tmp_path):
    go("often", "--steps", "4", "--eval-every", "1")
    go("once", "--steps", "4")
    assert numbers(tmp_path / "often") == numbers(tmp_path / "once")
    assert state(tmp_path / "often") == state(tmp_path / "once")
    for name, times in (("often", 4), ("once", 1)):
        assert sum("eval_loss" in row for row in read_metrics(tmp_path / name)) == times


def test_recomputed_layers_have_the_same_gradient_to_the_bit(go, tmp_path, monkeypatch):
    layers = Mock(wraps=model.checkpoint)
    monkeypatch.setattr("glm5fn.model.checkpoint", layers)
    for name, calls in (("none", 0), ("layer", 3 * 2 * 2)):  # steps, micro-batches, layers
        go(name, "--steps", "3", "--recompute", name)
        assert layers.call_count == calls
    assert numbers(tmp_path / "none") == numbers(tmp_path / "layer")
    assert state(tmp_path / "none") == state(tmp_path / "layer")


def test_a_compiled_run_compiles_its_block(go, tmp_path, monkeypatch):
    compiled = Mock(wraps=lambda block, dynamic: block)
    monkeypatch.setattr("torch.compile", compiled)
    go("plain", "--steps", "2")
    compiled.assert_not_called()
    go("compiled", "--steps", "2", "--compile")
    compiled.assert_called_once_with(model.block, dynamic=None)
    assert numbers(tmp_path / "plain") == numbers(tmp_path / "compiled")


def test_the_count_of_tokens_goes_on_when_the_samples_change_their_length(go, tmp_path):
    go("x", "--steps", "2")
    go("x", "--steps", "3", "--resume", "auto", "--data.seq-len", "6")
    assert [row[4] for row in numbers(tmp_path / "x")] == [48, 96, 96 + 24]


def test_a_directory_in_which_another_process_trains_is_left_alone(go, tmp_path):
    go("x", "--steps", "2")
    before = contents(tmp_path / "x")
    with occupy(tmp_path / "x"):
        code, said = go("x", "--steps", "4", "--resume", "auto")
        assert code == 1 and "x: another process trains in it: wait for its end, or set another --out" in said
        assert contents(tmp_path / "x") == before
    assert go("x", "--steps", "4", "--resume", "auto")[0] == 0


def test_the_run_refuses_what_the_command_line_refuses(tmp_path):
    with pytest.raises(ConfigError, match="steps"):
        train_run(replace(RUNS["dense-tiny"], steps=0), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_data_that_cannot_be_read_ends_the_run_before_anything_is_written(go, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "abc"}\n{"text": 3}\n')
    code, said = go("x", "--data.path", tmp_path / "rows.jsonl")
    assert code == 1 and "rows.jsonl:2: 'text' is of type int, must be a string" in said
    assert not (tmp_path / "x").exists()


def test_an_export_is_read_by_transformers_and_goes_on_at_the_same_loss(tmp_path):
    data = fixed(tmp_path / "fixed.safetensors", 1, 2, 3, 4)
    flags = ["--config", "glm4-9b", *TINY, *BATCH, "--mesh.dp-shard", "1", "--precision", "fp32", "--data.path", data]
    flags += ["--model.pad-token-id", "0", "--optim.lr", "0.01"]
    x, y, hf = (tmp_path / name for name in ("x", "y", "hf"))
    assert train(*flags, "--out", x, "--steps", "3", "--export", hf) == 0
    assert train(*flags, "--out", x, "--steps", "4", "--resume", "auto") == 0
    assert train(*flags, "--out", y, "--steps", "1", "--init", hf) == 0
    loss = numbers(x)[3][1]
    assert numbers(y)[0][1] == loss
    batch = load_file(data)
    logits = AutoModelForCausalLM.from_pretrained(hf)(batch["tokens"]).logits
    assert cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).item() == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_goes_on_as_if_it_had_not_been(go, tmp_path, monkeypatch, number):
    go("straight", "--steps", "5")
    monkeypatch.setattr("glm5fn.record.tell", lambda text: text.startswith("step 2 ") and signal.raise_signal(number))
    code, said = go("x", "--steps", "5")
    assert code == 1 and "interrupted after step 2" in said
    monkeypatch.undo()
    assert go("x", "--steps", "5", "--resume", "auto")[0] == 0
    assert numbers(tmp_path / "x") == numbers(tmp_path / "straight")
    assert state(tmp_path / "x") == state(tmp_path / "straight")


def test_a_second_ctrl_c_ends_a_run_at_once(go, tmp_path, monkeypatch):
    def twice(text):
        for _ in range(2 if text.startswith("step 2 ") else 0):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("glm5fn.record.tell", twice)
    code, said = go("x", "--steps", "5")
    assert code == 1 and "interrupted before it could save" in said
    assert len(numbers(tmp_path / "x")) == 2 and not (tmp_path / "x" / "checkpoints").exists()


def test_ctrl_c_reaches_a_run_of_its_own_process(tmp_path):
    argv = [*RUN, "--data.path", text(tmp_path), "--steps", "100000", "--out", tmp_path / "x"]
    command = [sys.executable, script.__file__, *map(str, argv)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step 2 "):
            process.send_signal(signal.SIGINT)
    assert process.wait() == 1 and said[-1].startswith("interrupted after step ")
    steps = int(said[-1].split()[-1])
    assert 2 <= steps < 100000 and [row[0] for row in numbers(tmp_path / "x")] == list(range(1, steps + 1))
    assert newest(tmp_path / "x" / "checkpoints") == (tmp_path / "x" / "checkpoints" / f"step_{steps:08}", [])


def test_a_record_that_cannot_be_read_ends_the_run_with_its_name(go, tmp_path):
    go("x", "--steps", "1")
    (tmp_path / "x" / "metrics.jsonl").write_text("nonsense\n")
    code, said = go("x", "--steps", "2", "--resume", "auto")
    assert code == 1 and "x/metrics.jsonl must hold one JSON object with a step on each line" in said


def test_events_for_tensorboard_are_the_record_from_the_step_gone_on_from(go, tmp_path, monkeypatch):
    written = []

    class Writer:
        """Stands in for TensorBoard's own."""

        def __init__(self, directory, purge_step):
            written.append((directory, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    monkeypatch.setattr("glm5fn.command.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    go("x", "--steps", "2", "--tensorboard")
    go("x", "--steps", "3", "--tensorboard", "--resume", "auto")
    assert [entry for entry in written if len(entry) == 2] == [(str(tmp_path / "x"), step) for step in (1, 3)]
    assert written[-1] == "closed"
    values = [("loss", row[1], row[0]) for row in numbers(tmp_path / "x")]
    assert [entry for entry in written if entry[0] == "loss"] == values
