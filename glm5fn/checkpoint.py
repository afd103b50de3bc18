"""Training state on disk: one directory a step, which appears whole or not at all.

step_00000100/ holds the items `params` and `moments` (flat, keyed by path) in one of two stores (see `stores.py`),
config.yaml, and state.json: the counters, of which one is the data position, and the size and the checksum of every
file, by which a damaged checkpoint is told from a whole one. The state of the routers is among the parameters; nothing
random is drawn once a run has begun.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from . import settings
from .files import contract
from .mesh import Grid, place
from .model import model_specs
from .peers import Peers
from .settings import CONFIG, MOMENTS, RunConfig
from .spec import Param, Region, Specs, rows, shape, trained
from .stores import STATE, Print, Tensors, altered, as_prints, open_item, prints_in
from .tree import unflatten

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


def number(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1] or match[2]) if match else -1


def steps(root: Path) -> list[Path]:
    """What is named like a checkpoint of a run, complete or not, the newest first."""
    found = [path for path in root.iterdir() if number(path) >= 0] if root.is_dir() else []
    return sorted(found, key=lambda path: (number(path), path.name), reverse=True)


def defects(path: Path) -> list[str]:
    """Why a checkpoint cannot be used, as far as it can be told without reading it; empty if it is whole."""
    try:
        counters, prints = read_state(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{path / STATE} cannot be read ({error!r})"]
    if number(path) not in (-1, counters["step"]):
        return [f"{path} is named for another step than the one that its {STATE} holds, {counters['step']}"]
    here = {name: size for name, (size, _) in prints.items() if "://" not in name}
    found = {name: (path / name).stat().st_size if (path / name).is_file() else None for name in here}
    return [
        f"{path / name} is missing" if found[name] is None else f"{path / name} has {found[name]} bytes, not {size}"
        for name, size in here.items()
        if found[name] != size
    ]


def damage(path: Path, peers: Peers) -> list[str]:
    """Why a checkpoint cannot be used, by all that is in it, of which each rank reads a share; alike on all ranks.

    RunError on all ranks for what one cannot read: a disk that does not answer says nothing of what is on it.
    """

    def faults() -> list[str]:
        if found := defects(path):
            return found
        prints = prints_in(path)
        return altered(path, {name: prints[name] for name in sorted(prints)[peers.rank :: peers.world]})

    parts = peers.gather(peers.together(faults))
    return list(dict.fromkeys(fault for part in parts for fault in part))


def harmed(path: Path) -> bool:
    """Whether a checkpoint is damaged, by all that is in it, in one process."""
    try:
        return bool(defects(path) or altered(path, prints_in(path)))
    except OSError:
        return True


def read_state(path: Path) -> tuple[dict[str, int], dict[str, Print]]:
    """The counters of a checkpoint, and what its files are."""
    state = json.loads((path / STATE).read_text())
    prints = as_prints(state["files"])
    counters = {name: int(state[name]) for name in COUNTERS}
    if state["checksum"] != checksum_of(counters, prints):
        raise ValueError("its checksum differs")
    return counters, prints


def checksum_of(counters: Mapping[str, int], prints: Mapping[str, Print]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([counters, prints], sort_keys=True).encode())


def write_state(path: Path, counters: Mapping[str, int], prints: Mapping[str, Print]) -> None:
    """Write what `read_state` reads."""
    state = {**counters, "files": prints, "checksum": checksum_of(counters, prints)}
    (path / STATE).write_text(json.dumps(state, indent=2) + "\n")


def newest(root: Path, peers: Peers | None = None) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, and what is wrong with each newer one.

    peers: all ranks, which look at those that the first of them finds, and read all of them; else sizes alone tell.
    """
    paths = steps(root) if peers is None else peers.gather(steps(root))[0]
    skipped: list[str] = []
    for path in paths:
        found = defects(path) if peers is None else damage(path, peers)
        if not found:
            return path, skipped
        skipped += found
    return None, skipped


def open_tensors(path: Path, run: RunConfig) -> tuple[Tensors, Tensors]:
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
    params = open_item(path, "params", lambda rows: contract(rows, sizes))
    return params, open_item(path, "moments", lambda rows: contract(rows, expected))


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

    def tree(files: Tensors, specs: Specs, prefix: str = "") -> dict[str, Any]:
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
