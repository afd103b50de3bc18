"""One rank's step on tensors without data, among ranks that are not there: what it would hold and exchange."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .collectives import experts_on
from .data import Batch, Data, Samples
from .kernels import kernels_for
from .mesh import local_part, make_grid, place
from .optim import grad_norm
from .run import compute_dtype, make_setup
from .settings import RunConfig
from .spec import Param, Region, cut
from .step import gradient, tally
from .tree import leaves

# Each collective's kind, and which argument is the whole of what it moves; None: what it returns.
EXCHANGES: Mapping[str, tuple[str, int | None]] = {
    "c10d::_allgather_base_": ("all-gather", 0),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", None),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", 0),
    "c10d::alltoall_base_": ("reduce-scatter", 1),  # `fetch.scatter_sum` by gloo
    "c10d::allreduce_": ("all-reduce", 0),
    "_c10d_functional::all_reduce": ("all-reduce", 0),
    "_c10d_functional::all_to_all_single": ("all-to-all", 0),
}


class Ledger(TorchDispatchMode):
    """Counts bytes while it is entered: those of the tensors that are made and live, and those that are exchanged.

    held, peak: what lives now, and the most that did. exchanges: one after the other, the kind, and the bytes of all
    that is gathered, scattered, summed or sent, a rank's own part included. known: tensors that were there before, and
    do not count.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.held = self.peak = self.made = self.made_at_peak = self.watched = 0
        self.exchanges: list[tuple[str, int]] = []
        self.number = {part.untyped_storage()._cdata: 0 for part in map(local_part, known)}  # of each living storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self.hold(local_part(tensor).untyped_storage())
        kind, place = EXCHANGES.get(func.name(), ("", None))
        if kind:
            whole = tree_leaves(found if place is None else args[place])
            self.exchanges.append((kind, sum(tensor.numel() * tensor.itemsize for tensor in whole)))
        return found

    def hold(self, storage: Any) -> None:
        if storage._cdata in self.number:
            return
        size = storage.nbytes()
        self.made += 1
        self.number[storage._cdata] = self.made
        weakref.finalize(storage, self.drop, storage._cdata, size).atexit = False
        self.held += size
        if self.held > self.peak:
            self.peak, self.made_at_peak = self.held, self.made

    def drop(self, key: int, size: int) -> None:
        self.held -= size
        del self.number[key]

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with the most bytes that it ever holds beyond those that it finds kept in `watched`."""

        def watched(*args: Any) -> Any:
            outer, base = (self.peak, self.made_at_peak), self.held
            self.peak = base
            result = function(*args)
            self.watched = max(self.watched, self.peak - base)
            if outer[0] > self.peak:
                self.peak, self.made_at_peak = outer
            return result

        return watched

    def held_at_peak(self, tensors: Iterable[Tensor]) -> int:
        """How many bytes of these, which still live, were there when the most bytes were."""
        storages = {part.untyped_storage()._cdata: part.untyped_storage() for part in map(local_part, tensors)}
        return sum(part.nbytes() for key, part in storages.items() if 0 < self.number[key] <= self.made_at_peak)


class Rehearsal(NamedTuple):
    """What the rank that holds the most would hold and exchange, in bytes.

    peak: the most at once beside parameters and moments, gradients included. gradients: how many were there then.
    head: the most for the logits of a chunk of rows and the gradient of the head. exchanged: in a step, by kind.
    """

    peak: int
    gradients: int
    head: int
    exchanged: dict[str, int]


@contextmanager
def imagined(rank: int, world: int) -> Iterator[None]:
    """A process group of which this process is such a rank, and no other is there; none for one rank."""
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        if world > 1:
            dist.destroy_process_group()


def evenly(counts: Tensor, rows: int) -> list[list[int]]:
    """As many rows to each rank as to any other, and as many from it."""
    ranks = counts.shape[1]
    return [[cut(rows, ranks, rank)[1] for rank in range(ranks)]] * 2


def fused_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float | None) -> Tensor:
    """As the portable one; on tensors without data torch would take its slow attention, of all scores at once."""
    settings = {"attn_mask": allowed, "scale": scale}
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, allowed is None, **settings)[0]


def rehearse(run: RunConfig) -> Rehearsal:
    """Run what a step does up to the norm of the gradient; every expert gets as many tokens as any other.

    What works inside of one operation is not seen: the chunks of a kernel, and the buffers of a collective.
    """
    last = run.mesh.cp * run.mesh.tp - 1  # of those that share the first rows, it has the most keys before its own
    with imagined(last, run.mesh.world):
        grid = make_grid(run.mesh, run.device)
        none = Samples(*np.zeros((2, 0, run.data.seq_len), np.int64))
        data = Data(train=[none], held_out=none, seed=None)
        setup = make_setup(replace(run, compile=False), run.device, grid, data)

        def empty(path: str, row: Param, region: Region) -> Tensor:
            return torch.empty([size for _, size in region], device="meta")

        params = place(setup.specs, run.model.dims, grid, run.layout, empty)
        ledger = Ledger(leaf for _, leaf in leaves(params))
        kernels, comm = kernels_for(run.device, compute_dtype(run)), setup.comm
        kernels = kernels._replace(
            attention=partial(kernels.attention, fused=fused_attention), token_loss=ledger.watch(kernels.token_loss)
        )
        if grid is not None:
            comm = replace(comm, experts=experts_on(grid, shares_of=evenly))
        setup = replace(setup, comm=comm, loss=partial(setup.loss, kernels=kernels, comm=comm))
        tokens = torch.empty(run.data.micro_batch, run.data.seq_len, dtype=torch.int64, device="meta")
        batch = {"tokens": tokens, "targets": tokens}
        times = run.data.global_batch // (run.mesh.data_ranks * run.data.micro_batch)
        begun: list[int] = []

        def batches() -> Iterator[Batch]:  # the gradients of the first are there when the second comes; then no more
            for _ in range(min(times, 2)):
                begun.append(len(ledger.exchanges))
                yield batch

        with ledger:
            names, _ = tally(setup, [batch], False, False)
            _, grads = gradient(setup, params, batches(), dict.fromkeys(names, 1.0))
            grad_norm(grads, setup.comm)
        exchanges = ledger.exchanges + (times - 2) * ledger.exchanges[begun[0] : begun[-1]]
        there = ledger.held_at_peak(leaf for _, leaf in leaves(grads))
        return Rehearsal(ledger.peak, there, ledger.watched, by_kind(exchanges))


def by_kind(exchanges: Iterable[tuple[str, int]]) -> dict[str, int]:
    """How many bytes are exchanged, of each kind."""
    total: Counter[str] = Counter()
    for kind, size in exchanges:
        total[kind] += size
    return dict(total)
