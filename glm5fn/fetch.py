"""A block's parameters in one exchange: what each rank holds is gathered, and the gradients are scattered back."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .comm import Tree
from .mesh import Grid
from .spec import Param, cut
from .tree import flatten, unflatten

ALIGNED = 16  # bytes at a multiple of which each tensor begins, whatever its dtype


@dataclass(frozen=True)
class Part:
    """One tensor of an exchange. size: what a block gets. dim: which of its dims is cut over the ranks, -1 for none.

    step: the size of the largest cut, as which each is sent. dtype: that a block computes in. shared: whether all ranks
    of tp get the same, and each a share of its gradient.
    """

    size: tuple[int, ...]
    dim: int
    step: tuple[int, ...]
    dtype: torch.dtype
    shared: bool

    @classmethod
    def of(cls, tensor: DTensor, dtype: torch.dtype) -> "Part":
        """Only the mesh's first axis is gathered; along the others a block gets what the rank holds."""
        mesh, (first, *others) = tensor.device_mesh, tensor.placements
        size = list(tensor.shape)
        for axis, placed in enumerate(others, 1):
            if isinstance(placed, Shard):
                size[placed.dim] //= mesh.size(axis)
        dim = first.dim if isinstance(first, Shard) and mesh.size(0) > 1 else -1
        step = [cut(n, mesh.size(0), 0)[1] if i == dim else n for i, n in enumerate(size)]
        shared = "tp" in (mesh.mesh_dim_names or ()) and not isinstance(others[-1], Shard)
        return cls(tuple(size), dim, tuple(step), dtype, shared)

    @property
    def room(self) -> int:
        """The bytes of a rank's part on the way."""
        return -(-math.prod(self.step) * self.dtype.itemsize // ALIGNED) * ALIGNED

    def joined(self, pieces: Tensor) -> Tensor:
        """The whole tensor of the ranks' parts; those of the last ranks may be filled up."""
        whole = pieces.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        return whole.narrow(self.dim, 0, self.size[self.dim]).contiguous()

    def cut_up(self, whole: Tensor, ranks: int) -> Tensor:
        """The ranks' parts of a whole tensor, the last filled up with zeros."""
        missing = ranks * self.step[self.dim] - self.size[self.dim]
        return padded(whole, self.dim, missing).unflatten(self.dim, (ranks, -1)).movedim(self.dim, 0)

    def own(self, piece: Tensor, ranks: int, rank: int) -> Tensor:
        """A rank's part without what it is filled up with."""
        if self.dim < 0:
            return piece.view(self.size)
        n = cut(self.size[self.dim], ranks, rank)[1]
        return piece.view(self.step).narrow(self.dim, 0, n).contiguous()


def padded(x: Tensor, dim: int, missing: int) -> Tensor:
    """With so many zeros behind the end of a dim."""
    return F.pad(x, (*[0, 0] * (x.dim() - 1 - dim), 0, missing)) if missing else x


class Exchange:
    """The tensors of a block on one mesh, gathered in the background from when this is made."""

    def __init__(self, mesh: DeviceMesh, parts: Sequence[Part], held: Sequence[Tensor], grad_dtype: torch.dtype):
        self.mesh, self.parts, self.grad_dtype = mesh, parts, grad_dtype
        self.ranks, self.rank, self.device = mesh.size(0), mesh.get_local_rank(0), held[0].device
        self.sent = [i for i, part in enumerate(parts) if part.dim >= 0]
        self.work: Any = None
        self.coming: list[tuple[Sequence[int], Callable[[], Tensor]]] = []  # gradients on their way: whose, and a wait
        if self.sent:
            own = torch.cat([self.raw(parts[i], held[i]) for i in self.sent])
            self.gathered = own.new_empty(self.ranks * len(own))
            self.work = dist.all_gather_into_tensor(self.gathered, own, mesh.get_group(0), async_op=True)

    def raw(self, part: Part, held: Tensor) -> Tensor:
        """A rank's part as bytes, as many as that of any other rank."""
        missing = part.step[part.dim] - held.shape[part.dim]
        full = padded(held.detach().to(part.dtype), part.dim, missing)
        raw = full.contiguous().view(-1).view(torch.uint8)
        return padded(raw, 0, part.room - len(raw))

    def finish(self, held: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the block gets."""
        found = [tensor.detach().to(part.dtype) for tensor, part in zip(held, self.parts, strict=True)]
        if self.work is None:
            return tuple(found)
        self.work.wait()
        at, rows = 0, self.gathered.view(self.ranks, -1)
        del self.work, self.gathered  # of this only the way back is kept, from the forward pass to the backward one
        for i in self.sent:
            part = self.parts[i]
            count = math.prod(part.step)
            pieces = rows[:, at : at + count * part.dtype.itemsize].view(part.dtype).view(self.ranks, *part.step)
            found[i] = part.joined(pieces)
            at += part.room
        return tuple(found)

    def send_back(self, grads: Sequence[Tensor | None]) -> None:
        """Begin to add up the gradients of all ranks: each rank gets the sum of what it holds."""
        wide = [
            torch.zeros(part.size, dtype=self.grad_dtype, device=self.device) if grad is None else grad
            for grad, part in zip(grads, self.parts, strict=True)
        ]
        if self.sent:
            sizes = [math.prod(self.parts[i].step) for i in self.sent]
            rows = wide[0].new_empty(self.ranks, sum(sizes), dtype=self.grad_dtype)
            for i, target in zip(self.sent, rows.split(sizes, 1), strict=True):
                target.view(self.ranks, *self.parts[i].step).copy_(self.parts[i].cut_up(wide[i], self.ranks))
            self.coming.append((self.sent, scatter_sum(rows, self.mesh.get_group(0))))
        if whole := [i for i, part in enumerate(self.parts) if part.dim < 0]:
            flat = torch.cat([wide[i].to(self.grad_dtype).flatten() for i in whole])
            self.coming.append((whole, total(flat, self.mesh.get_group(0)) if self.ranks > 1 else lambda: flat))

    def come_back(self) -> list[Tensor]:
        """The gradients of what this rank holds, summed over all ranks, of copies and of shares too."""
        found: dict[int, Tensor] = {}
        while self.coming:
            numbers, wait = self.coming.pop()
            own = wait()
            self.sum_over("replicate", own)
            sizes = [math.prod(self.parts[i].step) for i in numbers]
            for i, piece in zip(numbers, own.split(sizes), strict=True):
                found[i] = self.parts[i].own(piece, self.ranks, self.rank)
        if shared := [i for i, part in enumerate(self.parts) if part.shared]:
            flat = torch.cat([found[i].flatten() for i in shared])
            self.sum_over("tp", flat)
            for i, piece in zip(shared, flat.split([found[i].numel() for i in shared]), strict=True):
                found[i] = piece.view(found[i].shape)
        return [found[i] for i in range(len(self.parts))]

    def sum_over(self, axis: str, flat: Tensor) -> None:
        if axis in (self.mesh.mesh_dim_names or ()):
            dist.all_reduce(flat, group=self.mesh.get_group(axis))


def total(flat: Tensor, group: Any) -> Callable[[], Tensor]:
    """Begin to add up a tensor over ranks, in place; what is returned waits for it."""
    work: Any = dist.all_reduce(flat, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return flat

    return wait


def scatter_sum(rows: Tensor, group: Any = None) -> Callable[[], Tensor]:
    """Begin to sum over ranks the row that is this rank's, of [ranks, n]; what is returned waits for it.

    Gloo would sum up all rows on all ranks: there each gets the others' and sums them up itself, in their order.
    """
    gloo = dist.get_backend(group) == "gloo"
    found = torch.empty_like(rows) if gloo else rows.new_empty(rows.shape[1])
    exchange = dist.all_to_all_single if gloo else dist.reduce_scatter_tensor
    work: Any = exchange(found, rows if gloo else rows.view(-1), group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return found.sum(0) if gloo else found

    return wait


class Rest(torch.autograd.Function):
    """What a rank holds, before it is gathered. Its backward pass waits for the gradients that `Gather` has sent.

    Autograd runs what was made later first. So an exchange that began before another block computed is not waited for
    until that block's backward pass is done.
    """

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *held: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return held

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        return None, *ctx.exchange.come_back()


class Gather(torch.autograd.Function):
    """What a block gets of what ranks hold. Its backward pass sends the gradients, and leaves the rest to `Rest`."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *held: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return exchange.finish(held)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.exchange.send_back(grads)
        return None, *(None for _ in grads)


Started = Mapping[str, tuple[Exchange, tuple[Tensor, ...]]]  # by mesh, with what the rank holds


def start(
    params: Tree, specs: Tree, grid: Grid, dtype: torch.dtype, expert_dtype: torch.dtype, grad_dtype: torch.dtype
) -> Started:
    """Begin to gather a block's parameters, those of experts in a dtype of their own."""
    rows, leaves = flatten(specs), flatten(params)
    started = {}
    for name, mesh, own in (("dense", grid.dense, dtype), ("expert", grid.expert, expert_dtype)):
        if paths := paths_on(mesh, rows, grid):
            parts = [Part.of(leaves[path], rows[path].dtype(own)) for path in paths]
            held = [leaves[path].to_local(grad_placements=leaves[path].placements) for path in paths]
            exchange = Exchange(mesh, parts, held, grad_dtype)
            started[name] = exchange, Rest.apply(exchange, *held)
    return started


def finish(started: Started, specs: Tree, grid: Grid) -> dict[str, Any]:
    """The plain tensors that a block computes with; their gradients take the way back."""
    rows = flatten(specs)
    found: dict[str, Tensor] = {}
    for exchange, held in started.values():
        found |= dict(zip(paths_on(exchange.mesh, rows, grid), Gather.apply(exchange, *held), strict=True))
    return unflatten({path: found[path] for path in rows})


def paths_on(mesh: DeviceMesh, rows: Mapping[str, Param], grid: Grid) -> list[str]:
    return [path for path, row in rows.items() if grid.of(row) is mesh]
