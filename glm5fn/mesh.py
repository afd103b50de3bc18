"""The rank grid: its process group, and parameters at rest on it (`place`)."""

import logging
import math
import os
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .device import BACKENDS
from .settings import Layout, MeshConfig
from .spec import Param, Region, Specs, cut, rows, shape, split_dims, whole
from .tree import unflatten

T = TypeVar("T")


class RunError(RuntimeError):
    """What ends a run on all ranks alike; any other exception is that of one rank."""


def start(kind: str, attempt: int = 0) -> None:
    """Join the process group that the launcher's environment describes, one device for each local rank.

    attempt: how often the launcher has started the group before, whose keys are still in its store.
    """
    if kind != "cpu":
        getattr(torch, kind).set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, world = next(dist.rendezvous("env://"))  # pyright: ignore[reportPrivateImportUsage]
    own = dist.PrefixStore(f"attempt {attempt}", store)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(BACKENDS[kind], timeout=timedelta(minutes=30), store=own, rank=rank, world_size=world)


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of each rank, on every rank; all must call it."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, value, group=group)
    return found


def agree(problem: str | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise RunError on every rank if any of them has a problem; all must call it."""
    if problems := [text for text in gather(problem, group) if text]:
        raise RunError("; ".join(dict.fromkeys(problems)))  # ranks that met the same fault tell it once


def together(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call a function on all ranks; if it fails on one, RunError on all. What fails must not skip an exchange."""
    result, problem = None, None
    try:
        result = function()
    except (ValueError, OSError, RunError) as error:
        problem = str(error)
    except Exception as error:  # a mistake of ours, for which the other ranks must not wait either
        place = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{error!r} in {place.filename}:{place.lineno}"
    agree(problem, group)
    return result  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Grid:
    """The ranks as what rests on them and what is exchanged sees them; fsdp is dp_shard x cp.

    dense: axes (fsdp, replicate, tp), of rows without an expert axis. expert: axes (rest, ep, replicate, tp), of rows
    with one; rest x ep is fsdp, so that ep takes no ranks of its own, and rest has those of tp too where tp does not
    split experts. Of both, axes of one rank behind the first are left out: DTensor tries what each may do with every
    operation together with all others, which takes minutes on four. rows: axis (cp), the ranks that share rows of
    tokens. heads: axis (tp), those that share a block's computation of the same tokens. balanced: of how the tokens of
    a row are cut.

    Copies of the state are farthest apart in rank order and those of tp next to each other, but fsdp stands before
    replicate: a gradient is reduced axis by axis from the left, and so is scattered before what is left of it is summed
    over the copies.
    """

    dense: DeviceMesh
    expert: DeviceMesh
    rows: DeviceMesh
    heads: DeviceMesh
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
    dense = rearrange(ranks, "(replicate fsdp tp) -> fsdp replicate tp", **cfg.dense)
    before = {**cfg.expert, "rest": cfg.dp_shard * cfg.cp // cfg.ep}  # of rest, without the ranks of tp
    expert = rearrange(ranks, "(replicate rest ep more tp) -> (rest more) ep replicate tp", **before)
    tokens = rearrange(ranks, "(data cp tp) -> data cp tp", cp=cfg.cp, tp=cfg.tp)
    sharing = DeviceMesh(kind, tokens, mesh_dim_names=("data", "cp", "tp"))

    def named(axes: Mapping[str, int], ranks: torch.Tensor) -> DeviceMesh:
        first, *others = axes
        kept = (first, *(axis for axis in others if axes[axis] > 1))
        return DeviceMesh(kind, ranks.reshape([axes[axis] for axis in kept]), mesh_dim_names=kept)

    return Grid(
        dense=named(cfg.dense, dense),
        expert=named(cfg.expert, expert),
        rows=sharing["cp"],
        heads=sharing["tp"],
        balanced=cfg.cp_split == "balanced",
    )


def axis_of(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """The ranks along an axis; None for one rank."""
    return mesh[name] if name in (mesh.mesh_dim_names or ()) else None


def data_rank(cfg: MeshConfig) -> tuple[int, int]:
    """The number of this rank among those that read rows of their own, and how many there are."""
    share = cfg.cp * cfg.tp
    return rank() // share, cfg.world // share


def placements(row: Param, mesh: DeviceMesh, table: Mapping[str, tuple[str, ...]]) -> tuple[Shard | Replicate, ...]:
    axes = mesh.mesh_dim_names or ()
    dims = split_dims(row, axes, table)
    return tuple(Shard(dims[axis]) if axis in dims else Replicate() for axis in axes)


def region_at(
    size: tuple[int, ...], mesh: DeviceMesh, placed: Sequence[Placement], coordinate: Sequence[int]
) -> Region:
    """The part of a tensor that the rank at this coordinate holds."""
    region = list(whole(size))
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
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        part = read(path, row, region_at(size, mesh, placed, coordinate)).contiguous()
        stride = torch.empty(size, device="meta").stride()
        flat[path] = DTensor.from_local(part, mesh, placed, run_check=False, shape=torch.Size(size), stride=stride)
    return unflatten(flat)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory; a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor on the CPU; an exchange in which every rank takes part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


class Held(NamedTuple):
    """A tensor at rest, as this rank sees it.

    shape: of the whole. chunk: of a part that is not cut short. parts: which rank has which region, each element once.
    values: what this rank has, on its device.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    parts: tuple[tuple[int, Region], ...]
    values: Tensor

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.values.element_size()

    def written_by(self, rank: int) -> Region | None:
        """The region that is for this rank to write: of copies, the first has one."""
        return next((region for holder, region in self.parts if holder == rank), None)


def held(tensor: Tensor) -> Held:
    """A plain tensor is one that every rank has the whole of."""
    size = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Held(size, size, ((0, whole(size)),), tensor.detach())
    mesh, placed, chunk = tensor.device_mesh, tensor.placements, list(size)
    for axis, placement in enumerate(placed):
        if isinstance(placement, Shard):
            chunk[placement.dim] = cut(size[placement.dim], mesh.size(axis), 0)[1]
    first = [range(mesh.size(axis) if isinstance(p, Shard) else 1) for axis, p in enumerate(placed)]
    regions = [(int(mesh.mesh[at]), region_at(size, mesh, placed, at)) for at in product(*first)]
    parts = tuple((rank, region) for rank, region in regions if all(n for _, n in region))
    return Held(size, tuple(chunk), parts, local_part(tensor).detach())


def copies(tensor: Tensor) -> int:
    """How many ranks hold each element, so that a sum over ranks can count it once."""
    if not isinstance(tensor, DTensor):
        return 1
    assert not any(placement.is_partial() for placement in tensor.placements), "a gradient was not reduced"
    return math.prod(n for n, p in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if p.is_replicate())
