"""What a run will need, from sizes alone: parameters, FLOPs, and the memory of the rank that holds the most."""

import math
from collections.abc import Mapping

import torch

from .device import widest
from .flops import flops_per_token, parameters
from .model import model_specs
from .settings import MOMENTS, RunConfig
from .spec import Param, cut, rows, shape, split_dims, trained

FP32 = torch.float32.itemsize  # parameters at rest, moments, and gradients unless the run is deterministic


def plan(run: RunConfig) -> str:
    """The text of `--plan`. Nothing is allocated; activations, which depend on kernels and recompute, are left out."""
    cfg, counted = run.model, parameters(run.model)
    flops = flops_per_token(cfg, run.data.seq_len, run.terms)
    table = [
        ("run", run.name),
        ("parameters", both(counted.total, counted.total - counted.embedding)),
        ("active for a token", both(counted.active, counted.active - counted.embedding)),
    ]
    if counted.mtp:
        more = f"{counted.mtp:,}, active {counted.mtp_active:,}; depths {cfg.mtp_depths}"
        table.append(("multi-token prediction", f"{more}; not counted above"))
    tokens = run.data.global_batch * run.data.seq_len
    table += [
        ("FLOPs of a token", f"{human(flops, 'FLOP', 1000)}, forward and backward in {run.data.seq_len:,} tokens"),
        ("FLOPs of a step", f"{human(flops * tokens, 'FLOP', 1000)}, {tokens:,} tokens"),
        *memory(run),
    ]
    width = max(len(name) for name, _ in table)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in table)


def memory(run: RunConfig) -> list[tuple[str, str]]:
    """What the parameters take on the first rank: of an uneven cut it holds the larger part, so no rank holds more."""
    dims = run.model.dims
    specs = model_specs(run.model)
    learning = set(trained(specs, run.indexer.stage, run.mtp_depths))
    held = learned = 0
    largest = (0, "", ())
    for path, row in rows(specs):
        size = shape(row, dims)
        mesh = run.mesh.expert if row.of_experts else run.mesh.dense
        part = math.prod(held_size(row, size, mesh, run.layout.store))
        held += part
        learned += part if path in learning else 0
        largest = max(largest, (math.prod(size), path, size))
    accumulated = widest(run.device).itemsize if run.deterministic else FP32
    parts = {
        "parameters": held * FP32,
        "gradients": learned * accumulated,
        "moments": learned * FP32 * len(MOMENTS[run.optim.name]),
    }
    parts["together"] = sum(parts.values())
    grid = {"dp-replicate": run.mesh.dp_replicate, "dp-shard": run.mesh.dp_shard, "cp": run.mesh.cp}
    ranks = " x ".join(f"{axis} {n}" for axis, n in grid.items()) + f", ep {run.mesh.ep} of them"
    count, path, size = largest
    return [
        ("ranks", f"{run.mesh.world} ({ranks})"),
        *((f"{name} on a rank", human(n, "B", 1024)) for name, n in parts.items()),
        ("largest tensor", f"{path} {size}, whole {human(count * FP32, 'B', 1024)}"),
    ]


def held_size(
    row: Param, size: tuple[int, ...], mesh: Mapping[str, int], store: Mapping[str, tuple[str, ...]]
) -> tuple[int, ...]:
    """The size of the first rank's part of a tensor."""
    split = {dim: mesh[axis] for axis, dim in split_dims(row, tuple(mesh), store).items()}
    return tuple(cut(n, split.get(dim, 1), 0)[1] for dim, n in enumerate(size))


def both(with_embedding: int, without: int) -> str:
    return f"{with_embedding:,} ({human(with_embedding, '', 1000)}), without the embedding {without:,}"


def human(number: float, unit: str, base: int) -> str:
    """A number with three digits and a prefix.

    >>> human(743_911_199_232, "", 1000), human(3 * 2**30, "B", 1024)
    ('744 G', '3.00 GiB')
    """
    power = min(int(math.log(number, base)), 6) if number >= 1 else 0
    value = number / base**power
    prefix = ["", "K", "M", "G", "T", "P", "E"][power] + ("i" if base == 1024 and power else "")
    digits = max(0, 2 - int(math.log10(value))) if value >= 1 else 0
    return f"{value:.{digits}f} {prefix}{unit}".rstrip()
