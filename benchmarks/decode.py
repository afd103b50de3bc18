"""Time greedy decoding of sparse attention models against transformers: `python benchmarks/decode.py`.

Both systems read the same weights and prompts, and take turns, each in a process of its own: the first token behind a
prompt (prefill), then those up to --new (decoding). What transformers' `generate` takes for these is the time of all
less that of one. The ids of both may part: index scores that ReLU makes 0 tie at the cut, where transformers' topk
takes any of them, and ours the first. `--compile` compiles our layers, in the first turn, which is not counted.
`--against longer` and `wider` compare ours with itself, behind 8 times the prompt and in 8 times the rows; with `none`
it runs alone. Prints a table of medians and, last, one JSON line.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import tyro
from shape import Shape
from turns import Reply, System, collect, ratios

from glm5fn import ModelConfig, init_params, load, save_hf
from glm5fn.generate import generate
from glm5fn.kernels import kernels_for
from glm5fn.model import Engine, block, compiled

TIMES = 8


@dataclass(frozen=True, kw_only=True)
class Options(Shape):
    prompt: int = 4096
    new: int = 64
    batch: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    rounds: int = 3  # counted ones, after one that is not; with 0 that one is
    compile: bool = False  # ours: the block, for the tokens after the first
    against: Literal["transformers", "none", "longer", "wider"] = "transformers"
    weights: tyro.conf.Suppress[str] = ""  # where both systems read them


def prompts(options: Options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, options.vocab, (options.batch, options.prompt), generator=generator)


def ours(options: Options, system: System) -> Iterator[float]:
    yield 0.0
    cfg, params = load(options.weights, system.weights)
    layer = compiled(dynamic=True) if options.compile else block
    engine, rows = Engine(kernels=kernels_for("cpu", system.compute), block=layer), prompts(options).tolist()
    while True:
        rounds = generate(params, rows, cfg, engine, most=options.new)
        found = next(rounds)
        yield float(sum(token.id for row in found for token in row.tokens))
        for _ in rounds:
            pass
        yield float(sum(token.id for row in found for token in row.tokens))


def longer(options: Options, system: System) -> Iterator[float]:
    yield from ours(replace(options, prompt=TIMES * options.prompt), system)


def wider(options: Options, system: System) -> Iterator[float]:
    yield from ours(replace(options, batch=TIMES * options.batch), system)


def theirs(options: Options, system: System) -> Iterator[float]:
    from transformers import GlmMoeDsaForCausalLM

    yield 0.0
    module: Any = GlmMoeDsaForCausalLM.from_pretrained(
        options.weights, dtype=system.weights, attn_implementation="sdpa", experts_implementation="grouped_mm"
    )
    rows, how = prompts(options), {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    while True:
        for most in (1, options.new):
            found = module.eval().generate(rows, max_new_tokens=most, **how)
            yield float(found[:, options.prompt :].sum())


def figures(options: Options, system: System, replies: list[Reply]) -> dict[str, float]:
    """Of turns, each of a first token and of more, without the first of several turns."""
    turns = [(one.seconds, more.seconds) for one, more in zip(replies[::2], replies[1::2], strict=True)]
    first, further = zip(*turns[1:] or turns, strict=True)
    if system.steps is theirs:
        further = [whole - one for one, whole in zip(first, further, strict=True)]
    rows = options.batch * (TIMES if system.steps is wider else 1)
    prompt = options.prompt * (TIMES if system.steps is longer else 1)
    prefill = median(first)
    token = median(further) / max(options.new - 1, 1)
    return {
        "prefill_s": prefill,
        "prefill_tokens_per_s": rows * prompt / prefill,
        "token_ms": 1e3 * token,
        "tokens_per_s": rows / token if options.new > 1 else 0.0,
        "memory_mib": replies[-1].mib,
        "sum_of_ids": replies[-1].loss,
    }


def main(options: Options) -> int:
    cfg, dtype = ModelConfig.from_hf({"model_type": "glm_moe_dsa", **options.hf}), getattr(torch, options.dtype)
    other = {"transformers": theirs, "longer": longer, "wider": wider}.get(options.against)
    names = {"glm5fn": ours} | ({} if other is None else {options.against: other})
    systems = [System(name=name, steps=steps, weights=dtype, compute=dtype) for name, steps in names.items()]
    with tempfile.TemporaryDirectory() as directory:
        options = replace(options, weights=str(Path(directory) / "weights"))
        save_hf(options.weights, init_params(cfg), cfg)
        replies = collect(options, systems, 1 + options.rounds, each=2)
    results = {system.name: figures(options, system, replies[system.name]) for system in systems}
    found = {}
    if len(results) > 1:
        found = ratios(results, ("prefill_s", "token_ms", "tokens_per_s", "memory_mib"))
    else:
        for name, value in results["glm5fn"].items():
            print(f"{name:24}{value:16.5g}")
    print(json.dumps({**asdict(options), "weights": "", "threads": torch.get_num_threads(), **results, "ratio": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
