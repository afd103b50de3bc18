"""Training state on disk: one directory a step, which appears whole or not at all.

step_00000100/ holds params.safetensors and moments.safetensors (flat, keyed by path), config.yaml, and state.json: the
counters, and the size of every file, by which a damaged checkpoint is told from a whole one.
"""

import json
import re
import shutil
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import settings
from .directory import aside, atomic_directory, settle
from .files import TensorFiles, contract
from .mesh import Grid, agree, place, rank, whole_tensor
from .model import model_specs
from .settings import CONFIG, MOMENTS, RunConfig
from .spec import Param, Region, Specs, rows, shape, trained
from .tree import flatten, unflatten
from .writer import write_tensors

STATE = "state.json"
# A kill while a step is saved again can leave the older save of it set aside: see `directory.settle`.
NAME = re.compile(r"step_(\d{8,})|\.step_(\d{8,})\.replaced")
COUNTERS = ("step", "samples", "tokens", "skipped")
SCALARS = "updates"  # the moments' tree of counters, alike on every rank


@dataclass(frozen=True, kw_only=True)
class State:
    """What a run is, between two steps. samples is the data position: it decides every batch that follows."""

    params: Mapping[str, Any]
    moments: Mapping[str, Any]
    step: int = 0
    samples: int = 0
    tokens: int = 0  # seen in training, padding included
    skipped: int = 0  # steps without an update, all in all


def save(root: Path, state: State, config: str, keep: int) -> Path:
    """Write `root/step_N`; then drop all but the `keep` newest, and those of later steps, which a resume abandoned.

    All ranks call it, since all take part in gathering sharded tensors; rank 0 writes. If that fails, RunError on
    every rank, and what was there before still is: nothing is dropped before the new one is whole.
    """
    path = root / f"step_{state.step:08}"
    items = {"params.safetensors": flatten(state.params), "moments.safetensors": flatten(state.moments)}
    # Whatever becomes of the writing, all ranks must go through all gathers.
    tensors = (whole_tensor(leaf) for leaf in chain.from_iterable(item.values() for item in items.values()))
    problem = None
    if rank() == 0:
        try:
            with atomic_directory(path, overwrite=True) as directory:
                for name, item in items.items():
                    header = [(key, leaf.dtype, tuple(leaf.shape)) for key, leaf in item.items()]
                    write_tensors(directory / name, header, islice(tensors, len(header)), {"format": "glm5fn"})
                (directory / CONFIG).write_text(config, encoding="utf-8")
                sizes = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
                counters = {name: getattr(state, name) for name in COUNTERS}
                (directory / STATE).write_text(json.dumps(counters | {"files": sizes}, indent=2) + "\n")
            prune(root, state.step, keep)
        except (OSError, ValueError) as error:
            problem = f"saving checkpoint {path} failed: {error}"
    deque(tensors, maxlen=0)
    agree(problem)
    return path


def prune(root: Path, step: int, keep: int) -> None:
    # What processes that were killed have left.
    for left in root.glob(".step_*.partial"):
        shutil.rmtree(left)
    for left in root.glob(".step_*.replaced"):
        settle(root / left.stem[1:])
    whole = [path for path in steps(root) if not defects(path)]
    kept = [path for path in whole if number(path) <= step][:keep]
    for path in whole:
        if path not in kept:
            shutil.rmtree(path.rename(aside(path, "partial")))  # so that no half of it can be left under its name


def number(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1] or match[2]) if match else -1


def steps(root: Path) -> list[Path]:
    """What is named like a checkpoint of a run, complete or not, the newest first."""
    found = [path for path in root.iterdir() if number(path) >= 0] if root.is_dir() else []
    return sorted(found, key=lambda path: (number(path), path.name), reverse=True)


def defects(path: Path) -> list[str]:
    """Why a checkpoint cannot be used; empty if it is whole."""
    try:
        counters, sizes = read_state(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{path / STATE} cannot be read ({error!r})"]
    if number(path) not in (-1, counters["step"]):
        return [f"{path} is named for another step than the one that its {STATE} holds, {counters['step']}"]
    found = {name: (path / name).stat().st_size if (path / name).is_file() else None for name in sizes}
    return [
        f"{path / name} is missing" if found[name] is None else f"{path / name} has {found[name]} bytes, not {size}"
        for name, size in sizes.items()
        if found[name] != size
    ]


def read_state(path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """The counters of a checkpoint, and the sizes of its files."""
    state = json.loads((path / STATE).read_text())
    return {name: int(state[name]) for name in COUNTERS}, dict(state["files"])


def newest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, and what is wrong with each newer one."""
    skipped: list[str] = []
    for path in steps(root):
        found = defects(path)
        if not found:
            return path, skipped
        skipped += found
    return None, skipped


def open_tensors(path: Path, run: RunConfig) -> tuple[TensorFiles, TensorFiles]:
    """Parameters and moments of a checkpoint, known to be those of a run's model and optimizer.

    Moments are there for what learned in the stage of the indexers' training that the checkpoint was saved in.
    Raises ValueError that names the file, and every tensor that is missing, unexpected or misshapen.
    """
    specs = model_specs(run.model)
    sizes = {key: shape(row, run.model.dims) for key, row in rows(specs)}
    was = settings.load(path / CONFIG)
    learned = trained(specs, was.indexer.stage, was.mtp_depths)
    kinds = MOMENTS[run.optim.name]
    expected = {f"{kind}.{key}": sizes[key] for kind in kinds for key in learned}
    expected |= {f"{SCALARS}.{key}": () for key in learned if kinds}
    params = TensorFiles.open_file(path / "params.safetensors", lambda rows: contract(rows, sizes))
    return params, TensorFiles.open_file(path / "moments.safetensors", lambda rows: contract(rows, expected))


def restore(path: Path, run: RunConfig, grid: Grid | None, device: str) -> State:
    """Read a checkpoint onto this grid, each rank only its own parts, whatever grid wrote it.

    What learns now and did not when it was saved starts with moments of zero; those of what learned then only are
    dropped. Raises ValueError as `open_tensors` does, and for a checkpoint that is not whole.
    """
    if found := defects(path):
        raise ValueError("; ".join(found))
    params, moments = open_tensors(path, run)
    specs, dims = model_specs(run.model), run.model.dims
    flat = dict(rows(specs))
    learning = trained(specs, run.indexer.stage, run.mtp_depths)

    def tree(files: TensorFiles, specs: Specs, prefix: str = "") -> dict[str, Any]:
        def read(key: str, row: Param, region: Region) -> Tensor:
            known = prefix + key in files.rows
            part = files.read(prefix + key, region) if known else torch.zeros([size for _, size in region])
            return part.to(device)

        return place(specs, dims, grid, run.layout, read)

    trees = {
        kind: tree(moments, unflatten({k: flat[k] for k in learning}), f"{kind}.") for kind in MOMENTS[run.optim.name]
    }
    if trees:
        updates = {key: f"{SCALARS}.{key}" for key in learning}
        trees[SCALARS] = unflatten(
            {k: (moments.read(at) if at in moments.rows else torch.zeros(())).to(device) for k, at in updates.items()}
        )
    return State(params=tree(params, specs), moments=trees, **read_state(path)[0])
