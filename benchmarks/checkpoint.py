"""Time checkpoints of a large state in one process: `python benchmarks/checkpoint.py`.

Both stores, and torch.distributed.checkpoint on the same tensors, in turns: the seconds for which a save in the
background holds up training (after the first, which makes its buffers), those of a save that is waited for, and the
most memory that a save in the background takes beyond the state. Beside them: copying the state in memory, and writing
as many bytes to the same disk, in pieces of 1 MiB and synced. Prints medians and, last, a JSON line.
"""

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import tyro
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from configs import RUNS
from glm5fn.checkpoint import State
from glm5fn.manager import CheckpointManager
from glm5fn.peers import Peers
from glm5fn.settings import CheckpointConfig, dump
from glm5fn.tree import flatten

PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Options:
    gib: float = 2.0  # of the state
    rounds: int = 3
    place: Path | None = None  # for the files; a temporary directory by default


def make(options: Options) -> State:
    """Parameters and two moments, in matrices of 16 MiB and vectors."""
    layers = round(options.gib * 2**30 / 3 / 2**24)
    trees = [
        {str(n): {"w": torch.randn(2048, 2048), "norm": torch.randn(2048)} for n in range(layers)} for _ in range(3)
    ]
    return State(params=trees[0], moments={"mean": trees[1], "square": trees[2]})


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def write_raw(path: Path, size: int) -> None:
    piece = os.urandom(PIECE)
    with path.open("wb", buffering=0) as file:
        for _ in range(size // PIECE):
            file.write(piece)
        os.fsync(file.fileno())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most memory that this process had while the block ran, beyond what it had before."""

    def __enter__(self) -> "Peak":
        self.before = self.most = resident()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.ended.wait(0.01):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.taken = self.most - self.before


def main(options: Options) -> int:
    state, config = make(options), dump(RUNS["dense-tiny"])
    trees = {"params": state.params, "moments": state.moments}
    tensors = list(flatten(trees).values())
    size = sum(leaf.nbytes for leaf in tensors)
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory(dir=options.place) as name:
        root = Path(name)
        dist.init_process_group("gloo", init_method=f"file://{root}/ranks", rank=0, world_size=1)
        peers = Peers()
        managers = {
            (store, way): CheckpointManager(
                root / store, CheckpointConfig(keep=1, store=store, background=way == "background"), config, peers
            )
            for store in ("safetensors", "tensorstore")
            for way in ("background", "waited for")
        }
        copies = [torch.empty_like(leaf) for leaf in tensors]
        for n in range(options.rounds + 1):  # the first round makes buffers and is not counted
            warm = n > 0
            seconds = timed(lambda: [copy.copy_(leaf) for copy, leaf in zip(copies, tensors, strict=True)])
            if warm:
                note("copy", seconds)
                note("raw write", timed(lambda: write_raw(root / "raw", size)))
                (root / "raw").unlink()
            for (store, way), manager in managers.items():
                with Peak() as peak:
                    seconds = timed(lambda manager=manager: manager.save(state))
                    manager.wait()
                if warm:
                    note(f"{store}, {way}", seconds)
                elif way == "background":
                    note(f"{store}, extra memory", peak.taken / size)
            if warm:
                shutil.rmtree(root / "dcp", ignore_errors=True)
                note("dcp, waited for", timed(lambda: save(trees, checkpoint_id=root / "dcp")))
                shutil.rmtree(root / "dcp")
                begin = time.perf_counter()
                handle = async_save(trees, checkpoint_id=root / "dcp")
                note("dcp, background", time.perf_counter() - begin)
                assert isinstance(handle, Future)
                handle.result()
        dist.destroy_process_group()
    rates = {name: median(values) for name, values in found.items()}
    for name, value in rates.items():
        unit = "of the state" if "memory" in name else f"s{size / value / 1e9:9.2f} GB/s"
        print(f"{name:30}{value:9.3f} {unit}")
    for store in ("safetensors", "tensorstore"):
        blocked = rates[f"{store}, background"] / rates["copy"]
        share = rates["raw write"] / rates[f"{store}, waited for"]
        print(f"{store}: training held up for {blocked:.2f} of a copy; written at {share:.2f} of the disk's speed")
    print(json.dumps({**asdict(options), "place": None, "bytes": size, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
