"""The rank grid: its process group, parameters at rest on it (`place`), the exchanges of model code (`comm_for`)."""

import logging
import math
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .comm import Comm, Tree, local
from .device import BACKENDS
from .settings import Layout, MeshConfig
from .spec import Param, Region, Specs, cut, rows, shape, split_dims, whole
from .tree import tree_map, unflatten


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


def make_mesh(cfg: MeshConfig, kind: str) -> DeviceMesh | None:
    """The mesh of dense rows, axes (fsdp, replicate); None on one process without a group.

    Copies of the state are farthest apart in rank order, but fsdp stands before replicate: a gradient is reduced
    axis by axis from the left, and so is scattered before what is left of it is summed over the copies.
    """
    if not dist.is_initialized():
        return None
    # DTensor advises to flatten axes that are reduced one after the other; its flattened meshes gather wrongly.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    ranks = torch.arange(cfg.world).view(cfg.dp_replicate, cfg.dp_shard)
    return DeviceMesh(kind, ranks.T.contiguous(), mesh_dim_names=("fsdp", "replicate"))


def placements(row: Param, mesh: DeviceMesh, layout: Layout) -> tuple[Shard | Replicate, ...]:
    axes = mesh.mesh_dim_names or ()
    dims = split_dims(row, axes, layout.store)
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
    mesh: DeviceMesh | None,
    layout: Layout,
    read: Callable[[str, Param, Region], Tensor],
) -> dict[str, Any]:
    """Build the tree at rest: `read(path, row, region)` gives this rank's part of each tensor, on its device."""
    flat: dict[str, Tensor] = {}
    for path, row in rows(specs):
        size = shape(row, dims)
        if mesh is None:
            flat[path] = read(path, row, whole(size))
            continue
        placed = placements(row, mesh, layout)
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


def comm_for(mesh: DeviceMesh | None, dtype: torch.dtype, grad_dtype: torch.dtype) -> Comm:
    """The exchanges on this mesh. Blocks compute in dtype; gradients are reduced in grad_dtype."""
    if mesh is None:
        return local(dtype)

    def gather(row: Param, tensor: DTensor) -> Tensor:
        everywhere = [Replicate()] * tensor.device_mesh.ndim
        forward = row.dtype(dtype)
        full = tensor.redistribute(placements=everywhere, forward_dtype=forward, backward_dtype=grad_dtype)
        return full.to_local(grad_placements=[Partial()] * tensor.device_mesh.ndim)

    def fetch(params: Tree, specs: Tree) -> Tree:
        return tree_map(gather, specs, params)

    def total(value: Tensor) -> Tensor:
        value = value.detach().clone()
        dist.all_reduce(value)
        return value

    return Comm(fetch=fetch, sum=total)
