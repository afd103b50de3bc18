"""Time one optimizer step of ours and of another system, turn by turn: `python benchmarks/train_step.py --seq 512`.

A step is forward, backward and fused AdamW, without clipping, on the same weights and tokens. Each system lives in a
process of its own, so that its memory is its own, and only one works at a time: a step of one, a step of the other,
a matmul for the peak. Prints a table and, last, one JSON line.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
import tyro
from turns import System, ratios, take_turns

from glm5fn import model
from glm5fn.block import block
from glm5fn.comm import local
from glm5fn.config import ModelConfig
from glm5fn.flops import flops_per_token
from glm5fn.grad import value_and_grad
from glm5fn.kernels import kernels_for
from glm5fn.kernels.reference import IGNORE
from glm5fn.losses import loss
from glm5fn.optim import init_moments, update
from glm5fn.settings import PLAIN, OptimConfig
from glm5fn.spec import count, hf_keys, hf_shape, rows
from glm5fn.tree import flatten
from glm5fn.typed import ConfigError

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
    return {
        key: part
        for path, row in rows(model.model_specs(cfg))
        for key, part in zip(hf_keys(row, cfg.dims), flat[path].view(-1, *hf_shape(row, cfg.dims)), strict=True)
    }


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


def with_state(options: Options, system: System, figures: dict[str, float]) -> dict[str, float]:
    """The figures with what the memory holds beyond weights, gradients and two moments, and the MFU."""
    cfg = options.model
    weights = count(model.model_specs(cfg), cfg.dims) * system.weights.itemsize / 2**20
    flops = flops_per_token(cfg, options.seq, PLAIN) * options.batch * options.seq
    mfu = flops / figures["step_s"] / (figures["matmul_gflops"] * 1e9)
    return figures | {"beyond_state_mib": figures["memory_mib"] - 4 * weights, "mfu": mfu}


def main(options: Options) -> int:
    """Returns the exit code: 2 for a shape that cannot be."""
    try:
        _ = options.model
    except ConfigError as error:
        print(f"train_step.py: {error}", file=sys.stderr)
        return 2
    pair = systems(options)
    results = take_turns(options, pair, options.steps)
    results = {system.name: with_state(options, system, results[system.name]) for system in pair}
    found = ratios(results, ("step_s", "memory_mib", "beyond_state_mib"))
    print(json.dumps({**asdict(options), "threads": torch.get_num_threads(), **results, "ratio": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
