"""Time steps of two ranks against two processes that know nothing of each other: `python benchmarks/parallel.py`.

Each process computes with one thread, on as many tokens. Only one pair works at a time: a step of one, a step of the
next. Then each pair repeats the exchanges of its step without the computation. Prints a table, the bytes that a rank
exchanges in a step, and, last, one JSON line. Those over tp are counted by the textbook too; what two such ranks
exchange beyond them are the parameters of experts, of which each rests on a part, and a few counts.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import tyro
from turns import System, start

from configs import RUNS
from glm5fn import limits
from glm5fn.corpora import open_data
from glm5fn.fetch import scatter_sum
from glm5fn.mesh import make_grid
from glm5fn.rehearsal import Ledger, by_kind
from glm5fn.run import begin, make_setup
from glm5fn.settings import MeshConfig, RunConfig
from glm5fn.step import step
from glm5fn.textbook import textbook
from glm5fn.typed import ConfigError

MESHES = {
    "alone": MeshConfig(),
    "dp2": MeshConfig(dp_shard=2),
    "ep2": MeshConfig(dp_shard=2, ep=2),
    "cp2": MeshConfig(cp=2),
    "tp2": MeshConfig(tp=2),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    config: str = "moe-tiny"  # a run in configs.py
    seq: int = 256
    tokens: int = 2048  # of a rank in a step, in one micro-batch
    steps: int = 9  # counted ones
    rank: tyro.conf.Suppress[int] = 0
    store: tyro.conf.Suppress[str] = ""  # where the two ranks of a pair meet

    def run(self, name: str) -> RunConfig:
        mesh = MESHES[name]
        rows = self.tokens * mesh.cp * mesh.tp // self.seq
        data = replace(RUNS[self.config].data, seq_len=self.seq, micro_batch=rows, global_batch=rows * mesh.data_ranks)
        return replace(RUNS[self.config], mesh=mesh, data=data, device="cpu")


def ranks(options: Options, system: System) -> Iterator[Any]:
    """Of the first step the bytes that each kind of exchange moves, then losses; last, the exchanges' seconds alone."""
    yield 0.0
    torch.set_num_threads(1)
    run = options.run(system.name)
    if run.mesh.world > 1:
        store = f"file://{options.store}/{system.name}"
        dist.init_process_group("gloo", init_method=store, rank=options.rank, world_size=run.mesh.world)
    grid = make_grid(run.mesh, "cpu")
    setup = make_setup(run, "cpu", grid, open_data(run.data, run.model, run.seed))
    state = begin(run, "cpu", grid, None, None)
    with Ledger() as ledger:
        state, _ = step(setup, state, stop=False)  # pyright: ignore[reportGeneralTypeIssues]
    yield by_kind(ledger.exchanges)
    for _ in range(options.steps):
        state, record = step(setup, state, stop=False)  # pyright: ignore[reportGeneralTypeIssues]
        yield record["loss"]
    exchanges = [ledger.exchanges if options.rank == 0 else []]  # to their experts ranks send more or less
    if run.mesh.world > 1:
        dist.broadcast_object_list(exchanges)
    yield median(repeat(exchanges[0]) for _ in range(5))


def repeat(exchanges: list[tuple[str, int]]) -> float:
    """The seconds of so many bytes of each kind of exchange, one after the other."""
    if not exchanges:
        return 0.0
    whole = torch.zeros(max(size for _, size in exchanges) // 4 + 2)
    part = torch.zeros_like(whole)
    dist.barrier()
    began = time.perf_counter()
    for kind, size in exchanges:
        many = max(size // 8, 1)  # numbers of four bytes that each of the two ranks has
        if kind == "all-gather":
            dist.all_gather_into_tensor(whole[: 2 * many], part[:many])
        elif kind == "reduce-scatter":
            scatter_sum(whole[: 2 * many].view(2, -1))()
        elif kind == "all-to-all":
            dist.all_to_all_single(part[: 2 * many], whole[: 2 * many])
        else:
            dist.all_reduce(whole[: 2 * many])
    return time.perf_counter() - began


def measure(options: Options, names: list[str]) -> dict[str, dict[str, Any]]:
    """The figures of each pair: of a step and of its exchanges, the slower rank's median."""
    replies: dict[str, list[list[Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as store:
        pairs = {}
        for name in names:
            system = System(name=name, steps=ranks, weights=torch.float32, compute=torch.float32)
            pairs[name] = [start(replace(options, rank=rank, store=store), system) for rank in range(2)]
        for _ in range(options.steps + 2):
            for name, pair in pairs.items():
                for connection, _ in pair:
                    connection.send("step")
                replies[name].append([connection.recv() for connection, _ in pair])
    found = {}
    for name, steps in replies.items():
        exchanged, (*steps, last) = steps[0][0].loss, steps[1:]  # of the warm-up only what it exchanges
        seconds = [[pair[rank].seconds for pair in steps] for rank in range(2)]
        found[name] = {
            "step_s": max(map(median, seconds)),
            "tokens_per_second": sum(options.tokens / median(each) for each in seconds),
            "exchange_s": max(reply.loss for reply in last),
            "memory_mib": max(reply.mib for reply in last),
            "exchanged_bytes": exchanged,
        }
    return found


def told(exchanged: dict[str, int]) -> str:
    return ", ".join(f"{kind} {n:,} B" for kind, n in sorted(exchanged.items())) or "nothing"


def main(options: Options) -> int:
    """Returns the exit code: 2 for a shape that cannot be."""
    try:
        if options.config not in RUNS or options.tokens % options.seq:
            raise ConfigError(f"--config must be one of {', '.join(RUNS)}, --tokens a multiple of --seq")
        meshes = [name for name, mesh in MESHES.items() if mesh.ep == 1 or RUNS[options.config].model.n_routed_experts]
        for name in meshes:
            limits.refuse(options.run(name))
    except ConfigError as error:
        print(f"parallel.py: {error}", file=sys.stderr)
        return 2
    found = measure(options, meshes)
    print(f"{'':8}{'step s':>10}{'tokens/s':>10}{'of alone':>10}{'exchange s':>12}{'memory MiB':>12}")
    for name, row in found.items():
        row["of_alone"] = row["tokens_per_second"] / found["alone"]["tokens_per_second"]
        print(
            f"{name:8}{row['step_s']:10.3f}{row['tokens_per_second']:10.0f}{row['of_alone']:10.3f}"
            f"{row['exchange_s']:12.4f}{row['memory_mib']:12.0f}"
        )
    for name, row in found.items():
        print(f"{name:8}exchanges {told(row['exchanged_bytes'])}")
        if MESHES[name].tp > 1:
            print(f"{'':8}of them over tp, by the textbook, {told(textbook(options.run(name)))}")
    print(json.dumps({**asdict(options), **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
