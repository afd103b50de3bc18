"""A model that is ready to answer: its parameters on the ranks of a grid, and how its layers are run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .block import Params, block
from .collectives import comm_for
from .comm import LOCAL
from .config import ModelConfig
from .corpora import tokenizer_for
from .device import choose
from .hf import open_model, verify
from .kernels import kernels_for
from .launch import end_with_launcher, launch, launched, refuse_count, restarts
from .limits import mesh_faults
from .mesh import Grid, make_grid, place, start, together
from .model import Engine, compiled, model_specs
from .settings import CONFIG, FSDP, DataConfig, MeshConfig, load
from .spec import Param, Region
from .stores import STATE
from .text import Tokenizer
from .tree import flatten
from .typed import ConfigError

Precision = Literal["fp32", "bf16"]
Device = Literal["auto", "cpu", "cuda", "npu"]
ONE = MeshConfig()


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model on this rank.

    params: at rest, in the dtype in which they are computed with, so that no use of them casts. engine: how its layers
    are run. tokenizer: whose end is the model's first `eos_token_id`. mesh, grid: the ranks, None for one process.
    """

    cfg: ModelConfig
    params: Params
    engine: Engine
    tokenizer: Tokenizer
    device: str
    mesh: MeshConfig
    grid: Grid | None


def load_for(
    path: Path,
    *,
    mesh: MeshConfig = ONE,
    device: str = "auto",
    precision: Precision = "fp32",
    tokenizer: str | None = None,
    mtp: bool = False,
    compile: bool = False,
) -> Loaded:
    """Open a model's directory, or a run's checkpoint, on a grid whose processes are there; all ranks call it alike.

    Each rank reads only its own parts. tokenizer: see `tokenizer_name`. mtp: also the weights of multi-token
    prediction. compile: the layers, for steps of decoding. Raises RunError, on all ranks together, for what cannot be
    read.
    """
    device = choose(device)
    grid = make_grid(mesh, device)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def opened() -> Loaded:
        cfg, tree = open_model(path)
        stored = flatten(tree)

        def read(key: str, row: Param, region: Region) -> Tensor:
            return stored[key].read(region).to(device, row.dtype(dtype))

        specs = {name: rows for name, rows in model_specs(cfg).items() if mtp or name != "mtp"}
        comm = LOCAL if grid is None else comm_for(grid, dtype, torch.float32)
        return Loaded(
            cfg=cfg,
            params=place(specs, cfg.dims, grid, FSDP, read),
            engine=Engine(
                comm=comm, kernels=kernels_for(device, dtype), block=compiled(dynamic=True) if compile else block
            ),
            tokenizer=tokenizer_for(DataConfig(tokenizer=tokenizer_name(path, tokenizer)), cfg),
            device=device,
            mesh=mesh,
            grid=grid,
        )

    return together(opened)


def tokenizer_name(path: Path, asked: str | None) -> str:
    """The one that is asked for, else the one in the model's directory, that of a checkpoint's run, or bytes."""
    if asked is not None or (path / "tokenizer.json").is_file():
        return asked or str(path)
    return load(path / CONFIG).data.tokenizer if (path / STATE).is_file() else "bytes"


def refuse(path: Path, mesh: MeshConfig, tokenizer: str | None) -> ModelConfig:
    """A model's config. Raises ConfigError for what keeps it from being loaded, before a process is started for it."""
    try:
        cfg, _ = open_model(path)
        tokenizer_for(DataConfig(tokenizer=tokenizer_name(path, tokenizer)), cfg)
        if not launched():
            verify(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--model {path}: {error}") from error
    if faults := mesh_faults(mesh, cfg):
        raise ConfigError("; ".join(faults))
    refuse_count(mesh)
    return cfg


class Job(NamedTuple):
    """What a command does on each rank of a grid, which all call it alike."""

    mesh: MeshConfig
    device: str
    work: Callable[[], None]


def run(job: Job, argv: Sequence[str]) -> int:
    """Do a job in this process, or in as many as its grid has ranks; the exit code.

    argv: of `python -m glm5fn`, by which each of the processes makes the same job. They are started here, unless this
    is one of them already.
    """
    if not launched() and job.mesh.world > 1:
        return launch("-m", ["glm5fn", *argv], job.mesh.world)
    if launched():
        end_with_launcher()
        start(job.device, restarts())
    job.work()
    return 0
