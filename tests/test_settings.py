"""Settings and config.yaml: all can be set, what is saved is what ran, and a wrong file is refused by name."""

import re
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from training import RUN, numbers, text, train

from configs import RUNS
from glm5fn import limits, settings
from glm5fn.command import parse
from glm5fn.settings import RunConfig


def places(kind, kinds, prefix=""):
    """The dotted names of all settings of one kind of type, and their types."""
    for name, type_ in get_type_hints(kind).items():
        if hasattr(type_, "__dataclass_fields__"):
            yield from places(type_, kinds, f"{prefix}{name}.")
        elif kinds(type_):
            yield prefix + name, type_


def value_at(run, place):
    for name in place.split("."):
        run = getattr(run, name)
    return run


BOOLEANS = dict(places(RunConfig, lambda kind: kind is bool))
CHOICES = dict(places(RunConfig, lambda kind: get_origin(kind) is Literal))
LESS = {"model.model_type", "model.attention", "device"}  # two have no flag, the others of one may not be there


ROWS = {
    "data.skip_bad": ["--data.path", "x.jsonl"],
    "mesh.cp_split": ["--mesh.cp", "2"],
    "mesh.tp_experts": ["--mesh.tp", "2"],
}


FLAGS = {"checkpoint.background": "checkpoint.async"}  # which is no name for Python


def config_with(place):
    """A config in which the setting would change something."""
    return [
        "--config",
        "glm5-tiny" if place.startswith(("mtp.", "indexer.", "mesh.tp_experts")) else "dense-tiny",
        *ROWS.get(place, []),
    ]


@pytest.mark.parametrize("place", BOOLEANS)
def test_a_boolean_of_a_config_can_be_turned_on_and_off(tmp_path, place):
    *groups, name = FLAGS.get(place, place).replace("_", "-").split(".")
    prefix = "".join(f"{group}." for group in groups)
    on = parse([*config_with(place), f"--{prefix}{name}"], RUNS).run
    assert value_at(on, place) is True
    (tmp_path / "on.yaml").write_text(settings.dump(on))
    assert value_at(parse(["--config", str(tmp_path / "on.yaml")], RUNS).run, place) is True
    assert value_at(parse(["--config", str(tmp_path / "on.yaml"), f"--{prefix}no-{name}"], RUNS).run, place) is False


@pytest.mark.parametrize("place", sorted(CHOICES.keys() - LESS))
def test_each_choice_of_a_setting_can_be_asked_for(place):
    for choice in get_args(CHOICES[place]):
        assert value_at(parse([*config_with(place), f"--{place}", choice], RUNS).run, place) == choice


def test_the_device_must_be_there_and_auto_is_one_that_is(refuse, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert parse([], RUNS).run.device == "cpu"
    assert "device (cuda) must be one that this machine has: cpu" in refuse("--device", "cuda")


def test_the_config_that_a_run_saves_is_what_ran_and_runs_the_same_again(tmp_path):
    argv = [*RUN, "--data.path", str(text(tmp_path)), "--steps", "3", "--optim.lr", "1e-2", "--deterministic"]
    assert train(*argv, "--out", tmp_path / "one") == 0
    assert settings.load(tmp_path / "one" / "config.yaml") == parse(argv, RUNS).run
    assert [row[3] for row in numbers(tmp_path / "one")] == [1e-2 * step / 5 for step in (1, 2, 3)]
    assert train("--config", tmp_path / "one" / "config.yaml", "--out", tmp_path / "two") == 0
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")
    saved = ("one", "two", "one/checkpoints/step_00000003")
    assert len({(tmp_path / place / "config.yaml").read_text() for place in saved}) == 1


@pytest.mark.parametrize("name", RUNS)
def test_every_config_can_be_run_and_reads_back_equal(tmp_path, name):
    limits.refuse(RUNS[name])
    (tmp_path / "config.yaml").write_text(settings.dump(RUNS[name]))
    assert settings.load(tmp_path / "config.yaml") == RUNS[name]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optm": {}}, "optm is no setting: did you mean optim?"),
        ({"optim": {"lrr": 1}}, "optim.lrr is no setting: did you mean lr?"),
        ({"optim": {"lr": "fast"}}, "optim.lr ('fast') must be of type float"),
        ({"optim": {"lr": True}}, "optim.lr (True) must be of type float"),
        ({"optim": {"lr": None}}, "optim.lr (None) must be of type float"),
        ({"optim": {"name": "adam"}}, "optim.name ('adam') must be one of adamw, sgd"),
        ({"optim": 3}, "optim must be a mapping of settings, is 3"),
        ({"steps": "3"}, "steps ('3') must be of type int"),
        ({"steps": 3.0}, "steps (3.0) must be of type int"),
        ({"deterministic": 1}, "deterministic (1) must be of type bool"),
        ({"data": {"path": 3}}, "data.path (3) must be of type tuple"),
        ({"model": {"vocab_size": 300}}, "model.model_type, model.hidden_size, "),
        ({"layout": {"store": {"fsdp": "embed"}}}, "layout.store.fsdp ('embed') must be of type tuple"),
        ({"layout": {"store": {"fsdp": [1]}}}, "layout.store.fsdp (1) must be of type str"),
    ],
    ids=str,
)
def test_a_wrong_config_file_is_refused_with_its_name_and_the_setting(refuse, tmp_path, changes, said):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(yaml.safe_load(settings.dump(RUNS["dense-tiny"])) | changes))
    assert f"c.yaml: {said}" in refuse("--config", "c.yaml")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("", "the file must be a mapping of settings, is None"),
        ("a: [", "expected"),
        ("{}", "name, model, layout must be set"),
        ("\0", "unacceptable character"),
    ],
    ids=["empty", "broken", "nothing", "binary"],
)
def test_a_file_that_is_no_config_is_refused_with_its_name(refuse, tmp_path, raw, said):
    (tmp_path / "c.yaml").write_text(raw)
    assert said in (told := refuse("--config", "c.yaml")) and "c.yaml" in told


def test_a_rate_that_yaml_takes_for_text_is_read_as_the_number(tmp_path):
    raw = settings.dump(RUNS["dense-tiny"])
    (tmp_path / "c.yaml").write_text(re.sub(r"\n  lr: .*", "\n  lr: 1e-4", raw))
    assert settings.load(tmp_path / "c.yaml").optim.lr == 1e-4
