"""What a run will need, from sizes alone: parameters, FLOPs, and what a rank holds and exchanges."""

import math
from collections.abc import Iterator, Mapping

import torch

from .collectives import pieces_of
from .config import ModelConfig
from .decode import bytes_of_token
from .device import widest
from .flops import flops_per_token, parameters
from .model import model_specs
from .rehearsal import rehearse
from .settings import MOMENTS, RunConfig
from .spec import cut, rows, shape, split_dims, trained
from .textbook import textbook

FP32 = torch.float32.itemsize  # parameters at rest, moments, and gradients unless the run is deterministic


def plan(run: RunConfig) -> str:
    """The text of `--plan`, of the rank that holds the most; nothing is allocated."""
    table = [("run", run.name), *model(run), *layout(run), *use(run)]
    width = max(len(name) for name, _ in table)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in table)


def model(run: RunConfig) -> list[tuple[str, str]]:
    """Parameters and FLOPs."""
    cfg, counted = run.model, parameters(run.model)
    flops, tokens = flops_per_token(cfg, run.data.seq_len, run.terms), run.data.global_batch * run.data.seq_len
    more = f"{counted.mtp:,}, active {counted.mtp_active:,}; depths {cfg.mtp_depths}"
    return [
        ("parameters", both(counted.total, counted.total - counted.embedding)),
        ("active for a token", both(counted.active, counted.active - counted.embedding)),
        *([("multi-token prediction", f"{more}; not counted above")] if counted.mtp else []),
        ("FLOPs of a token", f"{human(flops, 'FLOP', 1000)}, forward and backward in {run.data.seq_len:,} tokens"),
        ("FLOPs of a step", f"{human(flops * tokens, 'FLOP', 1000)}, {tokens:,} tokens"),
        ("kept of a token", kept(cfg, torch.bfloat16 if run.precision == "bf16" else torch.float32)),
    ]


def kept(cfg: ModelConfig, dtype: torch.dtype) -> str:
    """What decoding keeps of a token, by what it is, on all ranks that share the heads together."""
    layers = bytes_of_token(cfg, dtype)
    sizes = {name: n for layer in layers for name, n in layer.items()}
    parts = [f"{name} {n:,} B in {sum(name in layer for layer in layers)} layers" for name, n in sizes.items()]
    return f"{human(sum(sum(layer.values()) for layer in layers), 'B', 1024)} when it generates: {', '.join(parts)}"


def layout(run: RunConfig) -> list[tuple[str, str]]:
    """The ranks, the largest tensor, and what they cannot be given in equal parts."""
    grid = {name.replace("_", "-"): getattr(run.mesh, name) for name in ("dp_replicate", "dp_shard", "cp", "tp")}
    ranks = " x ".join(f"{axis} {n}" for axis, n in grid.items()) + f", ep {run.mesh.ep} of them"
    largest, uneven = (0, "", ()), []
    for path, size, cuts in parts(run):
        largest = max(largest, (math.prod(size), path, size))
        uneven += [f"{path} {size[dim]} over {n}" for dim, n in cuts.items() if size[dim] % n]
    count, path, size = largest
    pieces = pieces_of(run.mesh)
    if missing := -run.data.seq_len % pieces:
        uneven.insert(0, f"rows of {run.data.seq_len:,} tokens over {pieces} parts: {missing} of padding")
    more = f", and {len(uneven) - 3} more" if len(uneven) > 3 else ""
    return [
        ("ranks", f"{run.mesh.world:,} ({ranks})"),
        ("largest tensor", f"{path} {size}, whole {human(count * FP32, 'B', 1024)}"),
        ("uneven parts", "; ".join(uneven[:3]) + more if uneven else "none"),
    ]


def use(run: RunConfig) -> list[tuple[str, str]]:
    """What the first rank holds and exchanges."""
    memory, rehearsal = at_rest(run), rehearse(run)
    rounded = memory["gradients"] // 2 if run.deterministic else 0  # which the update has in fp32 too
    state = memory["parameters"] + memory["moments"]
    together = state + max(rehearsal.peak, memory["gradients"] + rounded)
    memory["activations"] = rehearsal.peak - rehearsal.gradients
    beside = {"activations": f", when {human(rehearsal.gradients, 'B', 1024)} of gradients are there"}
    counted = run.mesh.tp > 1 and run.indexer.stage != "dense-warmup"
    over_tp = [("  over tp", listed(textbook(run)))] if counted else []
    return [
        *((f"{name} on a rank", human(n, "B", 1024) + beside.get(name, "")) for name, n in memory.items()),
        ("  for logits", f"{human(rehearsal.head, 'B', 1024)}, a chunk of them and the gradient of the head"),
        ("together on a rank", f"{human(together, 'B', 1024)}, {'' if together <= 80e9 else 'not '}within 80 GB"),
        ("exchanged in a step", f"{listed(rehearsal.exchanged)}, by a rank"),
        *over_tp,
    ]


def listed(exchanged: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {human(n, 'B', 1024)}" for kind, n in sorted(exchanged.items())) or "nothing"


def at_rest(run: RunConfig) -> dict[str, int]:
    """The bytes of parameters, moments and gradients on the first rank.

    Of an uneven cut it has the larger part, so no rank holds more.
    """
    learning = set(trained(model_specs(run.model), run.indexer.stage, run.mtp_depths))
    sizes = [(path, part_size(size, cuts)) for path, size, cuts in parts(run)]
    learned = sum(n for path, n in sizes if path in learning)
    return {
        "parameters": sum(n for _, n in sizes) * FP32,
        "moments": learned * FP32 * len(MOMENTS[run.optim.name]),
        "gradients": learned * (widest(run.device).itemsize if run.deterministic else FP32),
    }


def parts(run: RunConfig) -> Iterator[tuple[str, tuple[int, ...], dict[int, int]]]:
    """Each tensor: its path and size, and over how many ranks each of its dims is cut."""
    for path, row in rows(model_specs(run.model)):
        mesh = run.mesh.expert if row.of_experts else run.mesh.dense
        cuts = {dim: mesh[axis] for axis, dim in split_dims(row, tuple(mesh), run.layout.store).items()}
        yield path, shape(row, run.model.dims), cuts


def part_size(size: tuple[int, ...], cuts: Mapping[int, int]) -> int:
    """How many elements the first rank holds."""
    return math.prod(cut(n, cuts.get(dim, 1), 0)[1] for dim, n in enumerate(size))


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
