"""Time forward and backward of sparse attention models against transformers: `python benchmarks/dsa.py --seq 4096`.

Both systems read the same weights and tokens, and take turns; see turns.py. With `--against none` ours runs alone, with
`--against longer` against itself at four times the length.
Prints a table and, last, one JSON line.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from shape import Shape
from turns import System, ratios, take_turns

from glm5fn import ModelConfig, init_params, load, loss, save_hf, value_and_grad
from glm5fn.comm import local
from glm5fn.kernels import kernels_for
from glm5fn.kernels.reference import IGNORE
from glm5fn.typed import ConfigError

TIMES = 4  # as long is the sequence of `--against longer`


@dataclass(frozen=True, kw_only=True)
class Options(Shape):
    seq: int = 4096
    batch: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and computation
    device: str = "cpu"
    steps: int = 3  # counted ones
    against: Literal["transformers", "none", "longer"] = "transformers"  # longer: ourselves at TIMES the length
    weights: tyro.conf.Suppress[str] = ""  # where both systems read them


def tokens(options: Options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, options.vocab, (options.batch, options.seq), generator=generator).to(options.device)


def ours(options: Options, system: System) -> Iterator[float]:
    yield 0.0
    cfg, params = load(options.weights, system.weights, options.device)
    x = tokens(options)
    batch = {"tokens": x, "targets": torch.cat((x[:, 1:], torch.full_like(x[:, :1], IGNORE)), 1)}
    kernels = kernels_for(options.device, system.compute)
    run = value_and_grad(partial(loss, cfg=cfg, comm=local(system.compute), kernels=kernels))
    while True:
        yield run(params, batch)[0][0].item()


def longer(options: Options, system: System) -> Iterator[float]:
    yield from ours(replace(options, seq=TIMES * options.seq), system)


def theirs(options: Options, system: System) -> Iterator[float]:
    from transformers import GlmMoeDsaForCausalLM

    yield 0.0
    module: Any = GlmMoeDsaForCausalLM.from_pretrained(
        options.weights, dtype=system.weights, attn_implementation="sdpa", experts_implementation="grouped_mm"
    )
    module, x = module.to(options.device).train(), tokens(options)

    def step() -> float:  # a scope of its own: no loss may keep its graph alive until the next step
        value = module(x, labels=x, use_cache=False).loss
        value.backward()
        module.zero_grad(set_to_none=True)
        return value.item()

    while True:
        yield step()


def main(options: Options) -> int:
    """Returns the exit code: 2 for a shape that cannot be."""
    try:
        cfg = ModelConfig.from_hf({"model_type": "glm_moe_dsa", **options.hf})
    except ConfigError as error:
        print(f"dsa.py: {error}", file=sys.stderr)
        return 2
    dtype = getattr(torch, options.dtype)
    systems = [System(name="glm5fn", steps=ours, weights=dtype, compute=dtype)]
    if options.against == "transformers":
        systems.append(System(name="transformers", steps=theirs, weights=dtype, compute=dtype))
    if options.against == "longer":
        systems.append(System(name=f"{TIMES} times longer", steps=longer, weights=dtype, compute=dtype))
    with tempfile.TemporaryDirectory() as directory:
        save_hf(Path(directory) / "weights", init_params(cfg), cfg)
        results = take_turns(
            replace(options, weights=str(Path(directory) / "weights")), systems, options.steps, warm_up=1
        )
    for system in systems:
        tokens_of_step = options.batch * options.seq * (TIMES if system.steps is longer else 1)
        results[system.name]["tokens_per_second"] = tokens_of_step / results[system.name]["step_s"]
    found = ratios(results, ("step_s", "memory_mib", "tokens_per_second")) if len(results) > 1 else {}
    print(json.dumps({**asdict(options), "threads": torch.get_num_threads(), **results, "ratio": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
