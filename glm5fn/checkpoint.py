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

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .config import ModelConfig
from .files import TensorFiles, atomic_directory, contract, write_tensors
from .mesh import agree, place, rank, whole_tensor
from .model import model_specs
from .settings import Layout, OptimConfig
from .spec import rows, shape
from .tree import flatten, unflatten

STATE = "state.json"
NAME = re.compile(r"step_(\d{8})")
SCALARS = "updates"  # the moments' tree of counters, alike on every rank


@dataclass(frozen=True, kw_only=True)
class State:
    """What a run is, between two steps. samples is the data position: it decides every batch that follows."""

    params: Mapping[str, Any]
    moments: Mapping[str, Any]
    step: int = 0
    samples: int = 0
    skipped: int = 0  # steps without an update, all in all


def save(root: Path, state: State, config: str, keep: int) -> Path:
    """Write `root/step_N`; then drop all but the `keep` newest, and those of later steps, which a resume abandoned.

    All ranks call it, since all take part in gathering sharded tensors; rank 0 writes. If that fails, RuntimeError on
    every rank, and what was there before still is.
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
                (directory / "config.yaml").write_text(config)
                sizes = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
                counters = {name: getattr(state, name) for name in ("step", "samples", "skipped")}
                (directory / STATE).write_text(json.dumps(counters | {"files": sizes}, indent=2) + "\n")
            prune(root, state.step, keep)
        except (OSError, ValueError) as error:
            problem = f"checkpoint {path} could not be written: {error}"
    deque(tensors, maxlen=0)
    agree(problem)
    return path


def prune(root: Path, step: int, keep: int) -> None:
    whole = [path for path in steps(root) if not defects(path)]
    for path in whole:
        if number(path) > step:
            shutil.rmtree(path)
    for path in [path for path in whole if number(path) <= step][keep:]:
        shutil.rmtree(path)


def number(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def steps(root: Path) -> list[Path]:
    """The checkpoints of a run, complete or not, the newest first."""
    found = [path for path in root.iterdir() if number(path) >= 0 and path.is_dir()] if root.is_dir() else []
    return sorted(found, key=number, reverse=True)


def defects(path: Path) -> list[str]:
    """Why a checkpoint cannot be used; empty if it is whole."""
    try:
        state = json.loads((path / STATE).read_text())
        sizes = dict(state["files"])
        if number(path) not in (-1, state["step"]):
            return [f"{path} holds step {state['step']}"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{path / STATE} cannot be read ({error})"]
    found = {name: (path / name).stat().st_size if (path / name).is_file() else None for name in sizes}
    return [
        f"{path / name} is missing" if found[name] is None else f"{path / name} has {found[name]} bytes, not {size}"
        for name, size in sizes.items()
        if found[name] != size
    ]


def newest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, and what is wrong with each newer one."""
    skipped: list[str] = []
    for path in steps(root):
        found = defects(path)
        if not found:
            return path, skipped
        skipped += found
    return None, skipped


def restore(
    path: Path, cfg: ModelConfig, optim: OptimConfig, mesh: DeviceMesh | None, layout: Layout, device: str
) -> State:
    """Read a checkpoint onto this grid, each rank only its own parts, whatever grid wrote it.

    Raises ValueError that names the file, and every tensor that is missing, unexpected or misshapen.
    """
    if found := defects(path):
        raise ValueError("; ".join(found))
    specs, dims = model_specs(cfg), cfg.dims
    sizes = {key: shape(row, dims) for key, row in rows(specs)}
    kinds = ("mean", "square") if optim.name == "adamw" else ()
    expected = {f"{kind}.{key}": size for kind in kinds for key, size in sizes.items()}
    expected |= {f"{SCALARS}.{key}": () for key in sizes if kinds}
    params = TensorFiles.open_file(path / "params.safetensors", lambda rows: contract(rows, sizes))
    moments = TensorFiles.open_file(path / "moments.safetensors", lambda rows: contract(rows, expected))

    def tree(files: TensorFiles, prefix: str = "") -> dict[str, Any]:
        return place(specs, dims, mesh, layout, lambda key, _, region: files.read(prefix + key, region).to(device))

    trees: dict[str, Any] = {kind: tree(moments, f"{kind}.") for kind in kinds}
    if kinds:
        trees[SCALARS] = unflatten({key: scalar(moments, f"{SCALARS}.{key}", device) for key in sizes})
    state = json.loads((path / STATE).read_text())
    counters = {name: state[name] for name in ("step", "samples", "skipped")}
    return State(params=tree(params), moments=trees, **counters)


def scalar(files: TensorFiles, key: str, device: str) -> Tensor:
    return files.read(key).to(device)
