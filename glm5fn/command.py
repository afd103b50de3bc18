"""The command line of train.py: what was asked, resolved into one RunConfig or refused."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import tyro

from . import checkpoint, corpora, limits, settings
from .device import choose, widest
from .hf import open_model, verify
from .launch import launched, refuse_count
from .record import METRICS, steps_on_record
from .settings import CONFIG, RunConfig
from .typed import ConfigError


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is asked of one start of a run, and not part of its settings.

    config: a name in configs.py, or the config.yaml of an earlier run.
    out: the run directory; by default runs/NAME.
    resume: "auto" for the newest checkpoint of the run directory, or the path of one.
    init: start from the weights of this directory, native or Hugging Face, whose model is taken too.
    export: write the trained model there as a Hugging Face directory.
    plan: tell what the run will need, and do nothing.
    max_restarts: how often the processes start again, from the newest checkpoint, after one of them failed.
    """

    config: str = "dense-tiny"
    out: Path | None = None
    resume: str | None = None
    init: Path | None = None
    export: Path | None = None
    plan: bool = False
    max_restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class Command(Ask):
    """Train a model."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]

    @property
    def directory(self) -> Path:
        return self.out or Path("runs") / self.run.name

    @property
    def start(self) -> Path | None:
        """The checkpoint that is asked for by its path."""
        return None if self.resume in (None, "auto") else Path(str(self.resume))


def parse(argv: Sequence[str], runs: Mapping[str, RunConfig]) -> Command:
    """Read the command line in two passes: the config gives the defaults that the second pass overrides.

    The device of the result is the one that is taken, never "auto".
    Raises ConfigError for settings that cannot be run; tyro itself ends the process with exit code 2 for a flag or a
    value that it does not know, naming the nearest one, and with 0 after `--help`.
    """
    ask, _ = tyro.cli(Ask, args=argv, add_help=False, return_unknown_args=True)
    base = find(ask.config, runs)
    if ask.init is not None:
        try:
            base = replace(base, model=open_model(ask.init)[0])
        except (ValueError, OSError) as error:
            raise ConfigError(f"--init {ask.init}: {error}") from error
    default = Command(**vars(ask), run=base)
    run = tyro.cli(Command, args=argv, default=default, config=(tyro.conf.SuppressFixed,)).run
    limits.refuse(run)
    asked = settings.differences(settings.dump(base), settings.dump(run))
    for name, why in limits.idle(run).items():
        if name in asked:
            raise ConfigError(f"--{name.replace('_', '-')} would change nothing, since {why}: leave it out")
    return replace(default, run=replace(run, device=choose(run.device)))


def find(name: str, runs: Mapping[str, RunConfig]) -> RunConfig:
    if name in runs:
        return runs[name]
    if name.endswith((".yaml", ".yml")):
        return settings.load(Path(name))
    near = difflib.get_close_matches(name, runs, 1)
    hint = f"did you mean {near[0]}?" if near else f"must be one of {', '.join(runs)}, or a config.yaml"
    raise ConfigError(f"--config {name} is not known: {hint}")


def refuse(command: Command) -> None:
    """Raise ConfigError for what is in the way of a run on this machine; nothing has been written yet."""
    run = command.run
    if command.max_restarts < 0:
        raise ConfigError(f"--max-restarts ({command.max_restarts}) must be at least 0")
    refuse_count(run.mesh)
    if run.deterministic and widest(run.device) != torch.float64:
        raise ConfigError(f"--deterministic sums in fp64, which {run.device} does not have: leave it out")
    if run.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard needs the tensorboard package: install glm5fn[tensorboard], or leave it out")
    refuse_data(run)
    refuse_places(command)
    refuse_start(command)


def refuse_data(run: RunConfig) -> None:
    """Refuse what can be seen without reading the data: names, and a tokenizer that does not fit the model."""
    try:
        corpora.refuse(run.data, run.model)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def refuse_start(command: Command) -> None:
    """Refuse weights or a checkpoint that cannot be started from."""
    if command.init is not None:
        if command.start is not None:
            raise ConfigError(f"--init {command.init} and --resume {command.start} are two starts: leave one out")
        try:
            open_model(command.init, command.run.model)
            if not launched():
                verify(command.init)
        except (ValueError, OSError) as error:
            raise ConfigError(f"--init {command.init}: {error}") from error
    if command.start is not None and (found := checkpoint.defects(command.start)):
        whole = "auto, or a whole checkpoint such as runs/NAME/checkpoints/step_00000100"
        raise ConfigError(f"--resume {command.start} must be {whole}: {'; '.join(found)}")
    saved = command.start or (checkpoint.newest(command.directory / "checkpoints")[0] if command.resume else None)
    if saved is not None:
        try:
            checkpoint.open_tensors(saved, command.run)
        except (ValueError, OSError) as error:
            if command.resume == "auto" and checkpoint.harmed(saved):
                return  # the run will take the one before
            raise ConfigError(f"--resume {command.resume}: not of this model and optimizer: {error}") from error


def again(command: Command) -> Command:
    """The command as it is to be when its processes start again: from what they have saved since, if they have."""
    path, _ = checkpoint.newest(command.directory / "checkpoints")
    if command.start is None:
        return replace(command, resume="auto")
    done = steps_on_record(command.directory)
    own = path is not None and checkpoint.number(command.start) < checkpoint.number(path) <= done
    return replace(command, resume="auto") if own else command


def refuse_places(command: Command) -> None:
    """Refuse places to write to that are taken, or can be none."""
    out, saves, export = command.directory, command.directory / "checkpoints", command.export
    for flag, path in {"--out": out, "--export": export or out}.items():
        try:
            there = next(place for place in (path, *path.resolve().parents) if place.exists())
            TemporaryDirectory(dir=there).cleanup()
        except OSError as error:
            raise ConfigError(f"{flag} {path}: cannot be written to ({error}): name another place") from error
    if (out / CONFIG).exists() or (out / METRICS).exists() or checkpoint.steps(saves):
        if command.resume is None:
            raise ConfigError(f"{out} already holds a run: set --resume auto to go on with it, or another --out")
        if command.start is not None and command.start.resolve().parent != saves.resolve():
            raise ConfigError(f"--resume {command.start} is not of the run in {out}: set another --out")
    if export is not None and (export.exists() or saves.resolve().is_relative_to(export.resolve())):
        raise ConfigError(f"--export {export} is taken: name another place")
