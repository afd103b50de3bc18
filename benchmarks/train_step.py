"""Time one optimizer step of ours and of another system, turn by turn: `python benchmarks/train_step.py --seq 512`.

A step is forward, backward and fused AdamW, without clipping, on the same weights and tokens. Each system lives in a
process of its own, so that its memory is its own, and only one works at a time: a step of one, a step of the other,
a matmul for the peak. Prints a table and, last, one JSON line.
"""

import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
import tyro

from glm5fn import model
from glm5fn.block import block
from glm5fn.comm import local
from glm5fn.config import ModelConfig
from glm5fn.device import peak_flops
from glm5fn.flops import flops_per_token
from glm5fn.grad import value_and_grad
from glm5fn.hf import export
from glm5fn.kernels import kernels_for
from glm5fn.kernels.reference import IGNORE
from glm5fn.losses import loss
from glm5fn.optim import init_moments, update
from glm5fn.settings import OptimConfig
from glm5fn.spec import count, hf_keys, rows
from glm5fn.tree import flatten
from glm5fn.typed import ConfigError

WARM_UP = 2  # steps that are not counted
OPTIM = OptimConfig(lr=1e-4, beta2=0.999, weight_decay=0.0)  # no decay, so that equal steps give equal losses


@dataclass(frozen=True, kw_only=True)
class Options:
    """The shape is that of GLM-4-0414: heads of 64, two of them for keys and values, and an MLP of 3 x hidden."""

    seq: int = 512
    batch: int = 2
    hidden: int = 512
    layers: int = 8
    vocab: int = 8192
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and computation, against transformers
    compile: bool = False  # theirs: the model; ours: the block
    steps: int = 5  # counted ones
    against: Literal["transformers", "fp32"] = "transformers"  # fp32: our bf16 over fp32 weights against our fp32

    @property
    def hf(self) -> dict[str, Any]:
        """The keys of config.json that are not transformers' defaults."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 64,
            "num_key_value_heads": 2 if self.hidden > 64 else 1,
            "head_dim": 64,
            "pad_token_id": 0,
            "eos_token_id": [1],
        }

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.from_hf({"model_type": "glm4", **self.hf})


@dataclass(frozen=True, kw_only=True)
class System:
    """What is timed: `steps` yields once when its imports are done, then the loss of each step that it makes."""

    name: str
    steps: Callable[["Options", "System"], Iterator[float]]
    weights: torch.dtype
    compute: torch.dtype


class Reply(NamedTuple):
    """What a step took, its loss, and the peak of memory above imports until now."""

    seconds: float
    loss: float
    mib: float


def systems(options: Options) -> tuple[System, System]:
    if options.against == "fp32":
        full, half = torch.float32, torch.bfloat16
        return (
            System(name="bf16 over fp32", steps=ours, weights=full, compute=half),
            System(name="fp32", steps=ours, weights=full, compute=full),
        )
    dtype = getattr(torch, options.dtype)
    return (
        System(name="glm5fn", steps=ours, weights=dtype, compute=dtype),
        System(name="transformers", steps=theirs, weights=dtype, compute=dtype),
    )


def tokens(options: Options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, options.vocab, (options.batch, options.seq), generator=generator)


def ours(options: Options, system: System) -> Iterator[float]:
    yield 0.0
    cfg, x = options.model, tokens(options)
    specs = model.model_specs(cfg)
    params = model.init_params(cfg, dtype=system.weights)
    moments = init_moments(params, OPTIM)
    batch = {"tokens": x, "targets": torch.cat((x[:, 1:], torch.full_like(x[:, :1], IGNORE)), 1)}
    run_loss = value_and_grad(
        partial(
            loss,
            cfg=cfg,
            comm=local(system.compute),
            kernels=kernels_for("cpu", system.compute),
            block=torch.compile(block) if options.compile else block,
        )
    )

    def step() -> float:
        (value, _), grads = run_loss(params, batch)
        update(params, grads, moments, specs, OPTIM, OPTIM.lr)
        return value.item()

    while True:
        yield step()


def initial_state(cfg: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Our initial weights by their Hugging Face keys."""
    flat = flatten(model.init_params(cfg, dtype=dtype))
    pairs = ((hf_keys(row, cfg.dims), export(flat[path], row, cfg.dims)) for path, row in rows(model.model_specs(cfg)))
    return {key: part for keys, parts in pairs for key, part in zip(keys, parts, strict=True)}


def theirs(options: Options, system: System) -> Iterator[float]:
    from transformers import Glm4Config, Glm4ForCausalLM

    yield 0.0
    x, config = tokens(options), Glm4Config(**options.hf)
    config._attn_implementation = "sdpa"
    module = Glm4ForCausalLM(config)
    module.load_state_dict(initial_state(options.model, system.weights), assign=True)
    run = torch.compile(module.train()) if options.compile else module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=OPTIM.lr, weight_decay=OPTIM.weight_decay, fused=True)

    def step() -> float:  # a scope of its own: no loss may keep its graph alive until the next step
        value = run(x, labels=x, use_cache=False).loss
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.item()

    while True:
        yield step()


def peak_memory() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def serve(connection: Connection, options: Options, system: System) -> None:
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


def start(options: Options, system: System) -> tuple[Connection, Any]:
    """Start a system's process, which ends when its connection closes."""
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    process = context.Process(target=serve, args=(other, options, system), daemon=True)
    process.start()
    other.close()  # so that the death of the child ends our wait
    return mine, process


def figures(options: Options, cfg: ModelConfig, system: System, replies: list[Reply], peak: float) -> dict[str, float]:
    """The numbers of one system; `peak` is that of matmul, in FLOP/s."""
    seconds = sorted(reply.seconds for reply in replies[WARM_UP:])
    flops = flops_per_token(cfg, options.seq) * options.batch * options.seq
    weights = count(model.model_specs(cfg), cfg.dims) * system.weights.itemsize / 2**20
    return {
        "step_s": median(seconds),
        "fastest_s": seconds[0],
        "slowest_s": seconds[-1],  # far from the fastest: the machine was busy with something else
        "memory_mib": replies[-1].mib,
        "beyond_state_mib": replies[-1].mib - 4 * weights,  # the state: weights, gradients and two moments
        "mfu": flops / median(seconds) / peak,
        "matmul_gflops": peak / 1e9,
        "loss": replies[-1].loss,
    }


def report(options: Options, results: dict[str, dict[str, float]]) -> None:
    (a, one), (b, two) = results.items()
    ratios = {name: one[name] / two[name] for name in ("step_s", "memory_mib", "beyond_state_mib")}
    print(f"{'':20}{a:>16}{b:>16}{'ratio':>9}")
    for name in one:
        ratio = f"{ratios[name]:9.3f}" if name in ratios else ""
        print(f"{name:20}{one[name]:16.5g}{two[name]:16.5g}{ratio}")
    print(json.dumps({**asdict(options), "threads": torch.get_num_threads(), **results, "ratio": ratios}))


def main(options: Options) -> int:
    """Returns the exit code: 2 for a shape that cannot be, 1 if a system died."""
    try:
        cfg = options.model
    except ConfigError as error:
        print(f"train_step.py: {error}", file=sys.stderr)
        return 2
    pair = systems(options)
    # Before any matmul here, since the peak of a child's memory starts at that of its parent.
    running = [(system, *start(options, system)) for system in pair]
    replies: dict[str, list[Reply]] = {system.name: [] for system in pair}
    peaks = dict.fromkeys((system.compute for system in pair), 0.0)
    for _ in range(WARM_UP + options.steps):
        for system, connection, process in running:
            try:
                connection.send("step")
                replies[system.name].append(connection.recv())
            except (EOFError, OSError):
                process.join()
                print(f"{system.name} died with exit code {process.exitcode}", file=sys.stderr)
                return 1
        for dtype in peaks:
            peaks[dtype] = max(peaks[dtype], peak_flops("cpu", dtype) or 0.0)
    report(options, {s.name: figures(options, cfg, s, replies[s.name], peaks[s.compute]) for s in pair})
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
