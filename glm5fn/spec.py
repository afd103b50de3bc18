"""One row per tensor: shape, init, sharding, HF keys, counts, decay and FLOPs are all read off a `Param`."""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from .tree import leaves

TILE = 256
Region = tuple[tuple[int, int], ...]  # (start, size) for each dim: the part of a tensor that a rank holds


@dataclass(frozen=True)
class Param:
    """A weight, written down once.

    axes: the axis names of its dims, out first; parentheses join the dims that Hugging Face stores as one.
    hf: its Hugging Face key, with {layer} for the prefix of its layer. With {e} there is a key for each entry of the
    leading axis; a tuple of keys is stacked on the next one.
    fan_in: the axes that a matmul sums over. A row with one is a matrix: it has weight decay and costs FLOPs.
    part: what of a model it belongs to: the indexers are trained in stages of their own, and the state of a router
    (its balance bias) has no gradient and is no parameter to count.
    wide: it is never held or computed with in less than fp32.
    exact: a matrix that stays out of FP8, as it does in the published checkpoints.
    """

    axes: str
    hf: str | tuple[str, ...]
    fan_in: str = ""
    init: Literal["normal", "ones", "zeros"] = "normal"
    part: Literal["model", "indexer", "state"] = "model"
    wide: bool = False
    exact: bool = False

    @property
    def quantized(self) -> bool:
        """Whether it is written as FP8 where a checkpoint is."""
        return bool(self.fan_in) and not (self.exact or self.wide)

    @property
    def of_experts(self) -> bool:
        """Whether each expert has a part of it, so that it rests on the mesh that splits experts."""
        return "expert" in self.names

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.axes.replace("(", "").replace(")", "").split())

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.hf,) if isinstance(self.hf, str) else self.hf

    @property
    def stacked(self) -> tuple[str, ...]:
        """The leading axes, each of whose entries has a key of its own."""
        return self.names[: ("{e}" in self.patterns[0]) + (len(self.patterns) > 1)]

    def dtype(self, wanted: torch.dtype) -> torch.dtype:
        """The dtype in which it is held where others are held in `wanted`."""
        return torch.promote_types(wanted, torch.float32) if self.wide else wanted


Specs = Mapping[str, Any]


def shape(param: Param, dims: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(dims[name] for name in param.names)


def hf_keys(param: Param, dims: Mapping[str, int]) -> tuple[str, ...]:
    """Its Hugging Face keys, in the order in which they are stacked.

    >>> hf_keys(Param("expert pair ffn embed", hf=("{e}.gate", "{e}.up")), {"expert": 2})
    ('0.gate', '0.up', '1.gate', '1.up')
    """
    count = dims[param.names[0]] if "{e}" in param.patterns[0] else 1
    return tuple(key.replace("{e}", str(e)) for e in range(count) for key in param.patterns)


def hf_groups(param: Param, dims: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """For each dim of its Hugging Face tensors, the sizes of the dims that it joins; stacked axes are taken off.

    >>> hf_groups(Param("(heads head_dim) embed", hf="q"), {"heads": 4, "head_dim": 8, "embed": 10})
    ((4, 8), (10,))
    """
    groups = [joined or alone for joined, alone in re.findall(r"\((.+?)\)|(\w+)", param.axes)]
    return tuple(tuple(dims[name] for name in group.split()) for group in groups[len(param.stacked) :])


def hf_shape(param: Param, dims: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of each of its Hugging Face tensors.

    >>> hf_shape(Param("(heads head_dim) embed", hf="q"), {"heads": 4, "head_dim": 8, "embed": 10})
    (32, 10)
    """
    return tuple(math.prod(group) for group in hf_groups(param, dims))


def in_layer(specs: Specs, layer: str) -> dict[str, Any]:
    """Fill `{layer}` into the Hugging Face keys of a block's rows."""
    filled: dict[str, Any] = {}
    for name, row in specs.items():
        if isinstance(row, Param):
            keys = tuple(key.replace("{layer}", layer) for key in row.patterns)
            filled[name] = replace(row, hf=keys[0] if isinstance(row.hf, str) else keys)
        else:
            filled[name] = in_layer(row, layer)
    return filled


def split_dims(param: Param, mesh_axes: tuple[str, ...], table: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Which dim of the tensor each mesh axis splits; a mesh axis that splits none is left out.

    The table's order is the order of choice, and no dim is split twice. Of the tensor axes that a mesh axis may
    split, dim 0 is taken where it can be, since gathering it needs no copy; else the first that the table names.
    """
    chosen: dict[str, int] = {}
    for mesh_axis, wanted in table.items():
        if mesh_axis not in mesh_axes:
            continue
        free = [param.names.index(name) for name in wanted if name in param.names]
        free = [dim for dim in free if dim not in chosen.values()]
        if free:
            chosen[mesh_axis] = 0 if 0 in free else free[0]
    return chosen


def whole(size: tuple[int, ...]) -> Region:
    return tuple((0, n) for n in size)


def slices(region: Region) -> tuple[slice, ...]:
    """A region as an index.

    >>> slices(((2, 3), (0, 4)))
    (slice(2, 5, None), slice(0, 4, None))
    """
    return tuple(slice(start, start + size) for start, size in region)


def cut(size: int, parts: int, index: int) -> tuple[int, int]:
    """The (start, size) of one part of a dim, in DTensor's uneven cut: ceil-sized parts, the last ones short or empty.

    >>> [cut(7, 3, i) for i in range(3)], [cut(2, 3, i) for i in range(3)]
    ([(0, 3), (3, 3), (6, 1)], [(0, 1), (1, 1), (2, 0)])
    """
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def init_region(path: str, param: Param, size: tuple[int, ...], region: Region, seed: int, std: float) -> Tensor:
    """Initial values of one region of a tensor, fp32 on the CPU.

    Values are drawn in tiles that are seeded by path and place, so they depend on no layout, and a rank draws only
    the tiles that its region meets.
    """
    values = torch.empty([n for _, n in region])
    if param.init != "normal":
        return values.fill_(1.0 if param.init == "ones" else 0.0)
    steps = [1] * max(0, len(size) - 2) + [TILE] * min(2, len(size))
    grids = [
        range(start // step * step, start + n, step) if n else ()
        for (start, n), step in zip(region, steps, strict=True)
    ]
    generator = torch.Generator()
    for corner in product(*grids):
        extent = [min(step, n - low) for low, step, n in zip(corner, steps, size, strict=True)]
        digest = hashlib.blake2b(f"{seed} {path} {corner}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little", signed=True))
        count = math.prod(extent)
        # A draw of fewer than 16 numbers takes another path in torch, so none is made.
        tile = torch.empty(max(count, 16)).normal_(0.0, std, generator=generator)[:count].view(extent)
        source, target = [], []
        for low, n, (start, wanted) in zip(corner, extent, region, strict=True):
            first, last = max(low, start), min(low + n, start + wanted)
            source.append(slice(first - low, last - low))
            target.append(slice(first - start, last - start))
        values[tuple(target)] = tile[tuple(source)]
    return values


def rows(specs: Specs) -> Iterator[tuple[str, Param]]:
    """Yield `(path, row)` in the model's order. Walk these for order, never the params: files list keys sorted."""
    yield from leaves(specs)


TRAINED = {  # the parts of a model that learn in each stage of its indexers' training
    "frozen": ("model",),
    "dense-warmup": ("indexer",),
    "sparse": ("model", "indexer"),
}


def trained(specs: Specs, stage: str, depths: int) -> list[str]:
    """The paths of the rows that learn in a stage, in the model's order.

    depths: how many depths of multi-token prediction are trained; weight sets beyond them are left as they are.
    """
    return [path for path, row in rows(specs) if row.part in TRAINED[stage] and not unused(path, depths)]


def unused(path: str, depths: int) -> bool:
    """Whether a path is of a weight set of multi-token prediction that so many depths do not reach."""
    return path.startswith("mtp.") and int(path.split(".")[1]) >= depths


def count(specs: Specs, dims: Mapping[str, int]) -> int:
    """Number of parameters; a router's state is none."""
    return sum(math.prod(shape(row, dims)) for _, row in rows(specs) if row.part != "state")
