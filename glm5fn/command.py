"""The command line of train.py: what was asked, resolved into one RunConfig or refused."""

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from . import checkpoint, settings
from .config import ConfigError, ModelConfig
from .record import METRICS
from .settings import RunConfig


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is asked of one start of a run, and not part of its settings.

    config: a name in configs.py, or the config.yaml of an earlier run.
    out: the run directory; by default runs/NAME.
    resume: "auto" for the newest checkpoint of the run directory, or the path of one.
    init: start from the weights of this directory, native or Hugging Face, whose model is taken too.
    export: write the trained model there as a Hugging Face directory.
    """

    config: str = "dense-tiny"
    out: Path | None = None
    resume: str | None = None
    init: Path | None = None
    export: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Command(Ask):
    """Train a model."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]

    @property
    def directory(self) -> Path:
        return self.out or Path("runs") / self.run.name


def parse(argv: Sequence[str], runs: Mapping[str, RunConfig]) -> Command:
    """Read the command line in two passes: the config gives the defaults that the second pass overrides.

    Raises ConfigError for settings that cannot be run; tyro itself ends the process with exit code 2 for a flag or a
    value that it does not know, naming the nearest one, and with 0 after `--help`.
    """
    ask, _ = tyro.cli(Ask, args=argv, add_help=False, return_unknown_args=True)
    run = find(ask.config, runs)
    if ask.init is not None:
        run = replace(run, model=ModelConfig.from_hf(ask.init))
    default = Command(**vars(ask), run=run)
    return tyro.cli(Command, args=argv, default=default, config=(tyro.conf.SuppressFixed,))


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
    out, mesh = command.directory, command.run.mesh
    found = int(os.environ.get("WORLD_SIZE", mesh.world))
    if found != mesh.world:
        raise ConfigError(
            f"the launcher started {found} processes, the mesh needs mesh.dp-replicate ({mesh.dp_replicate}) x "
            f"mesh.dp-shard ({mesh.dp_shard}) = {mesh.world}"
        )
    if command.resume is None and ((out / METRICS).exists() or checkpoint.steps(out / "checkpoints")):
        raise ConfigError(f"{out} already holds a run: set --resume auto to go on with it, or --out to another place")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file, must be a directory")
    if command.resume not in (None, "auto") and (found := checkpoint.defects(Path(str(command.resume)))):
        raise ConfigError(f"--resume {command.resume}: {'; '.join(found)}")
    if command.export is not None and command.export.exists():
        raise ConfigError(f"--export {command.export} exists already: name another place")
