"""Two systems, each in a process of its own, that work turn by turn: a step of one, a step of the other."""

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import torch

from glm5fn.device import peak_flops


@dataclass(frozen=True, kw_only=True)
class System:
    """What is timed: `steps(options, system)` yields once when its imports are done, then the loss of each step."""

    name: str
    steps: Callable[[Any, "System"], Iterator[Any]]
    weights: torch.dtype
    compute: torch.dtype


class Reply(NamedTuple):
    """What a step took, its loss, and the peak of memory above imports until now."""

    seconds: float
    loss: Any
    mib: float


def peak_memory() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def serve(connection: Connection, options: Any, system: System) -> None:
    """Answer each message with a step."""
    steps = system.steps(options, system)
    next(steps)
    imported = peak_memory()
    with suppress(EOFError):
        while True:
            connection.recv()
            start = time.perf_counter()
            value = next(steps)
            connection.send(Reply(time.perf_counter() - start, value, peak_memory() - imported))


def start(options: Any, system: System) -> tuple[Connection, Any]:
    """Start a system's process, which ends when its connection closes."""
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    process = context.Process(target=serve, args=(other, options, system), daemon=True)
    process.start()
    other.close()  # so that the death of the child ends our wait
    return mine, process


def collect(
    options: Any, systems: Sequence[System], turns: int, each: int = 1, between: Callable[[], object] = lambda: None
) -> dict[str, list[Reply]]:
    """The replies of systems that work in turns, `each` steps a turn, with something done after each round of turns.

    Ends the program with exit code 1 if a system dies.
    """
    # Before any matmul here, since the peak of a child's memory starts at that of its parent.
    running = [(system, *start(options, system)) for system in systems]
    replies: dict[str, list[Reply]] = {system.name: [] for system in systems}
    for _ in range(turns):
        for system, connection, process in running:
            try:
                for _ in range(each):
                    connection.send("step")
                    replies[system.name].append(connection.recv())
            except (EOFError, OSError):
                process.join()
                sys.exit(f"{system.name} died with exit code {process.exitcode}")
        between()
    return replies


def take_turns(options: Any, systems: Sequence[System], steps: int, warm_up: int = 2) -> dict[str, dict[str, float]]:
    """The figures of each system over so many steps after the warm-up, with a matmul for the peak between them."""
    peaks = dict.fromkeys((system.compute for system in systems), 0.0)

    def measure() -> None:
        for dtype in peaks:
            peaks[dtype] = max(peaks[dtype], peak_flops("cpu", dtype) or 0.0)

    replies = collect(options, systems, warm_up + steps, between=measure)
    return {system.name: figures(replies[system.name][warm_up:], peaks[system.compute]) for system in systems}


def figures(replies: list[Reply], peak: float) -> dict[str, float]:
    seconds = sorted(reply.seconds for reply in replies)
    return {
        "step_s": median(seconds),
        "fastest_s": seconds[0],
        "slowest_s": seconds[-1],  # far from the fastest: the machine was busy with something else
        "memory_mib": replies[-1].mib,
        "matmul_gflops": peak / 1e9,
        "loss": replies[-1].loss,
    }


def ratios(results: dict[str, dict[str, float]], names: Sequence[str]) -> dict[str, float]:
    """Print a table of two systems; the ratios of the figures that are named."""
    (a, one), (b, two) = results.items()
    found = {name: one[name] / two[name] for name in names}
    print(f"{'':20}{a:>16}{b:>16}{'ratio':>9}")
    for name in one:
        ratio = f"{found[name]:9.3f}" if name in found else ""
        print(f"{name:20}{one[name]:16.5g}{two[name]:16.5g}{ratio}")
    return found
