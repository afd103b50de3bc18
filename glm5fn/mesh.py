"""The rank grid: its process group, and parameters at rest on it (`place`)."""

import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .device import BACKENDS
from .settings import Layout, MeshConfig
from .spec import Param, Region, Specs, cut, rows, shape, split_dims, whole
from .tree import unflatten


class RunError(RuntimeError):
    """What ends a run on all ranks alike; any other exception is that of one rank."""


def start(kind: str) -> None:
    """Join the process group that the launcher's environment describes, one device for each local rank."""
    if kind != "cpu":
        getattr(torch, kind).set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS[kind], timeout=timedelta(minutes=30))


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def agree(problem: str | None) -> None:
    """Raise RunError on every rank if any of them has a problem; all ranks must call it."""
    problems: list[str | None] = [problem]
    if dist.is_initialized():
        problems = [None] * world()
        dist.all_gather_object(problems, problem)
    if any(problems):
        # Ranks that met the same fault tell it once.
        raise RunError("; ".join(dict.fromkeys(text for text in problems if text)))


@dataclass(frozen=True)
class Grid:
    """The ranks as what rests on them and what is exchanged sees them; fsdp is dp_shard x cp.

    dense: axes (fsdp, replicate), of rows without an expert axis. expert: axes (rest, ep, replicate), of rows with one;
    rest x ep is fsdp, so that ep takes no ranks of its own. rows: axis (cp), the ranks that share rows of tokens.
    balanced: of how the tokens of a row are cut.

    Copies of the state are farthest apart in rank order, but fsdp stands before replicate: a gradient is reduced
    axis by axis from the left, and so is scattered before what is left of it is summed over the copies.
    """

    dense: DeviceMesh
    expert: DeviceMesh
    rows: DeviceMesh
    balanced: bool

    def of(self, row: Param) -> DeviceMesh:
        return self.expert if row.of_experts else self.dense


def make_grid(cfg: MeshConfig, kind: str) -> Grid | None:
    """None on one process without a group."""
    if not dist.is_initialized():
        return None
    # DTensor advises to flatten axes that are reduced one after the other; its flattened meshes gather wrongly.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # The newest torch calls two exchanges by other names, which the oldest that serves does not know.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    ranks = torch.arange(cfg.world)
    dense = rearrange(ranks, "(replicate fsdp) -> fsdp replicate", **cfg.dense)
    expert = rearrange(ranks, "(replicate rest ep) -> rest ep replicate", **cfg.expert)
    rows = rearrange(ranks, "(data cp) -> data cp", cp=cfg.cp)
    return Grid(
        dense=DeviceMesh(kind, dense.contiguous(), mesh_dim_names=tuple(cfg.dense)),
        expert=DeviceMesh(kind, expert.contiguous(), mesh_dim_names=tuple(cfg.expert)),
        rows=DeviceMesh(kind, rows.contiguous(), mesh_dim_names=("data", "cp"))["cp"],
        balanced=cfg.cp_split == "balanced",
    )


def data_rank(cfg: MeshConfig) -> tuple[int, int]:
    """The number of this rank among those that read rows of their own, and how many there are."""
    return rank() // cfg.cp, cfg.world // cfg.cp


def placements(row: Param, mesh: DeviceMesh, table: Mapping[str, tuple[str, ...]]) -> tuple[Shard | Replicate, ...]:
    axes = mesh.mesh_dim_names or ()
    dims = split_dims(row, axes, table)
    return tuple(Shard(dims[axis]) if axis in dims else Replicate() for axis in axes)


def held_region(size: tuple[int, ...], mesh: DeviceMesh, placed: tuple[Shard | Replicate, ...]) -> Region:
    """The part of a tensor that this rank holds."""
    region = list(whole(size))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(placed):
        if isinstance(placement, Shard):
            region[placement.dim] = cut(size[placement.dim], mesh.size(axis), coordinate[axis])
    return tuple(region)


def place(
    specs: Specs,
    dims: Mapping[str, int],
    grid: Grid | None,
    layout: Layout,
    read: Callable[[str, Param, Region], Tensor],
) -> dict[str, Any]:
    """Build the tree at rest: `read(path, row, region)` gives this rank's part of each tensor, on its device."""
    flat: dict[str, Tensor] = {}
    for path, row in rows(specs):
        size = shape(row, dims)
        if grid is None:
            flat[path] = read(path, row, whole(size))
            continue
        mesh = grid.of(row)
        placed = placements(row, mesh, layout.store)
        part = read(path, row, held_region(size, mesh, placed)).contiguous()
        stride = torch.empty(size, device="meta").stride()
        flat[path] = DTensor.from_local(part, mesh, placed, run_check=False, shape=torch.Size(size), stride=stride)
    return unflatten(flat)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory; a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor on the CPU; an exchange in which every rank takes part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def copies(tensor: Tensor) -> int:
    """How many ranks hold each element, so that a sum over ranks can count it once."""
    if not isinstance(tensor, DTensor):
        return 1
    assert not any(placement.is_partial() for placement in tensor.placements), "a gradient was not reduced"
    return math.prod(n for n, p in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if p.is_replicate())
