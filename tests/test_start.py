"""Where a run may write to, and what it may start from; what is refused is refused before anything is written."""

import json
import sys
from dataclasses import replace

import pytest
from training import BATCH, TINY, text, train

from configs import RUNS
from glm5fn import ModelConfig, init_params, run, save_hf, settings
from glm5fn.checkpoint import write_state
from glm5fn.command import parse


def holds_run(directory):
    directory.mkdir()
    (directory / "config.yaml").write_text("")
    return directory


def test_a_directory_that_holds_a_run_is_not_written_to_again_unless_asked(refuse, tmp_path):
    holds_run(tmp_path / "x")
    assert "x already holds a run: set --resume auto to go on with it, or another --out" in refuse("--out", "x")
    (tmp_path / "runs").mkdir()
    holds_run(tmp_path / "runs" / "dense-tiny")
    assert "runs/dense-tiny already holds a run" in refuse()


@pytest.mark.parametrize("flag", ["--out", "--export"])
@pytest.mark.parametrize("place", ["file", "file/below/it"])
def test_a_place_at_or_below_a_file_is_refused(refuse, tmp_path, flag, place):
    (tmp_path / "file").write_text("")
    assert f"{flag} {place}: " in (said := refuse(flag, place))
    assert "cannot be written to" in said and "name another place" in said


@pytest.mark.parametrize("flag", ["--out", "--export"])
@pytest.mark.parametrize("place", ["/proc/x", "n" * 300], ids=["no place for files", "a name too long"])
def test_a_place_that_cannot_be_written_to_is_refused(refuse, flag, place):
    assert f"{flag} {place}: cannot be written to" in refuse(flag, place)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_by_its_tensors(refuse, tmp_path):
    flags = [*TINY, *BATCH, "--data.path", text(tmp_path), "--out", tmp_path / "x"]
    with pytest.MonkeyPatch.context() as real:
        real.setattr("train.train", run.train)
        assert train(*flags, "--steps", "1") == 0
    for start in ("auto", tmp_path / "x" / "checkpoints" / "step_00000001"):
        again = [*flags, "--resume", start]
        assert "moments.safetensors" in (said := refuse(*again, "--optim.name", "sgd")), said
        assert "missing: layers.2." in refuse(*again, "--model.num-hidden-layers", "3")


@pytest.mark.parametrize("place", ["there", "new", ".", "new/checkpoints"])
def test_an_export_does_not_take_the_place_of_something_else(refuse, tmp_path, place):
    (tmp_path / "there").mkdir()
    assert f"--export {place} is taken: name another place" in refuse("--out", "new", "--export", place)


def test_a_checkpoint_that_is_not_whole_is_refused_by_name(refuse, tmp_path):
    said = refuse("--resume", "x/step_00000004")
    assert "--resume x/step_00000004 must be auto, or a whole checkpoint such as runs/NAME/checkpoints/step_" in said
    assert "x/step_00000004/state.json cannot be read" in said
    path = tmp_path / "step_00000004"
    path.mkdir()
    write_state(path, {"step": 4, "samples": 4, "tokens": 48, "skipped": 0}, {"a": (1, "0")})
    assert "step_00000004/a is missing" in refuse("--resume", path)


def test_a_run_is_not_overwritten_with_the_checkpoint_of_another(refuse, tmp_path):
    path = holds_run(tmp_path / "x") / "checkpoints" / "step_00000004"
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"step": 4, "samples": 4, "tokens": 48, "skipped": 0, "files": {}}))
    holds_run(tmp_path / "y")
    assert f"--resume {path} is not of the run in y: set another --out" in refuse("--out", "y", "--resume", path)


def test_events_for_tensorboard_need_its_package_and_the_extra_is_named(refuse, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert "--tensorboard needs the tensorboard package: install glm5fn[tensorboard]" in refuse("--tensorboard")


@pytest.fixture
def weights(tmp_path):
    """A Hugging Face directory of a small model, with a key that nobody knows."""
    cfg = parse(TINY, RUNS).run.model
    cfg = replace(cfg, model_type="glm4", max_position_embeddings=64, extra={"novel": [1]})
    save_hf(tmp_path / "weights", init_params(cfg), cfg)
    return tmp_path / "weights"


def edit(weights, **changes):
    path = weights / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_model_of_init_is_taken_and_its_unknown_keys_reach_the_export(tmp_path, weights):
    argv = ["--init", weights, *BATCH, "--data.path", text(tmp_path), "--out", tmp_path / "x"]
    assert train(*argv, "--steps", "1", "--export", tmp_path / "hf") == 0
    assert settings.load(tmp_path / "x" / "config.yaml").model.extra == {"novel": [1]}
    assert ModelConfig.from_hf(tmp_path / "hf") == ModelConfig.from_hf(weights)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "glm4_moe_lite"}, "model_type ('glm4_moe_lite') must be one of glm, "),
        ({"hidden_act": "gelu"}, "hidden_act ('gelu') must be 'silu'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps ('small') must be of type float"),
        ({"attention_bias": "no"}, "attention_bias ('no') must be of type bool"),
        ({"hidden_size": 24.5}, "hidden_size (24.5) must be of type int"),
        ({"num_hidden_layers": 3}, "missing: model.layers.2."),
        ({"intermediate_size": 41}, "has shape (80, 24), must be (82, 24)"),
    ],
    ids=str,
)
def test_an_init_directory_that_cannot_be_trained_is_refused_by_name(refuse, weights, changes, said):
    edit(weights, **changes)
    assert said in (told := refuse("--init", weights, "--data.seq-len", "12"))
    assert f"--init {weights}" in told


def test_a_size_that_is_asked_for_must_be_that_of_the_weights(refuse, weights):
    said = refuse("--init", weights, "--data.seq-len", "12", "--model.vocab-size", "260")
    assert "model.embed_tokens.weight in model.safetensors has shape (261, 24), must be (260, 24)" in said
    assert "must be at most the model's max_position_embeddings (64)" in refuse("--init", weights)


def test_a_run_has_one_start(refuse, weights):
    said = refuse("--init", weights, "--data.seq-len", "12", "--resume", "x")
    assert said.endswith(f"--init {weights} and --resume x are two starts: leave one out")


def test_init_must_be_a_directory_with_weights(refuse, weights):
    assert "--init none: none: is not there" in refuse("--init", "none")
    assert f"--init {weights / 'config.json'}: " in refuse("--init", weights / "config.json", "--data.seq-len", "12")
    (weights / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in refuse("--init", weights, "--data.seq-len", "12")
