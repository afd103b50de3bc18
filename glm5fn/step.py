"""One optimizer step over the global batch, and the evaluation of what it made."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import mesh, model
from .checkpoint import State
from .comm import Comm
from .data import Batch, Data, held_out_batches
from .device import widest
from .grad import value_and_grad
from .kernels.reference import IGNORE
from .losses import counts
from .moe import balanced
from .optim import clip_scale, grad_norm, learning_rate, update
from .settings import RunConfig
from .spec import Specs
from .tree import flatten, leaves, tree_map, unflatten


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What stays the same from step to step."""

    run: RunConfig
    device: str
    data: Data
    load: Callable[[int], list[Batch]]  # this rank's micro batches, by the number of the step's first sample
    comm: Comm
    specs: Specs
    trained: tuple[str, ...]  # the paths of what learns
    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]


def step(setup: Setup, state: State, stop: bool) -> tuple[State, dict[str, Any]] | None:
    """One optimizer step over the global batch; None, on all ranks, if any of them was asked to stop.

    Parameters and moments are updated in place, unless the gradient is not finite or no position has a label: then
    the step is counted as skipped and changes nothing but the data position.
    """
    run, comm = setup.run, setup.comm
    problem = None
    try:
        batches = setup.load(state.samples)
    except mesh.RunError as error:  # which the other ranks hear of before they wait for this one
        blank = torch.zeros(1, run.data.seq_len, dtype=torch.long)
        batches, problem = [{"tokens": blank, "targets": blank + IGNORE}], str(error)
    batches = [{name: part.to(setup.device) for name, part in batch.items()} for batch in batches]
    names, totals = tally(setup, batches, stop, problem is not None)
    *numbers, asked, failed = totals.tolist()
    if failed:
        mesh.agree(problem)
    if asked:
        return None
    count = dict(zip(names, numbers, strict=True))
    sums, grads = gradient(setup, state.params, batches, count)
    norm = float(grad_norm(grads, comm).float())
    lr = learning_rate(run.optim, state.step)
    teaching = "real" if run.indexer.stage == "dense-warmup" else "labels"  # what there must be to learn from
    healthy = math.isfinite(norm) and count[teaching] > 0
    if healthy:
        scale = clip_scale(norm, run.optim.clip)
        update(state.params, grads, state.moments, setup.specs, run.optim, lr, scale, fused=not run.deterministic)
        balance(state.params, sums.get("load", {}), run.router.bias_rate, setup.trained)
    state = replace(
        state,
        step=state.step + 1,
        samples=state.samples + run.data.global_batch,
        tokens=state.tokens + run.data.global_batch * run.data.seq_len,
        skipped=state.skipped + (not healthy),
    )
    return state, {
        "step": state.step,
        **averages(sums, count),
        "grad_norm": norm,
        "lr": lr,
        "tokens": state.tokens,
        "skipped": state.skipped,
    }


def tally(setup: Setup, batches: Iterable[Batch], *flags: bool) -> tuple[list[str], Tensor]:
    """By what the parts of the loss are divided, over all ranks, and behind it on how many ranks each flag is up."""
    own = [counts(batch, setup.run.model, setup.comm) for batch in batches]
    totals = torch.stack([torch.stack([*part.values()]) for part in own]).sum(0)
    return [*own[0]], setup.comm.sum(torch.cat((totals, totals.new_tensor(flags))))


def gradient(
    setup: Setup, params: Mapping[str, Any], batches: Iterable[Batch], count: Mapping[str, float]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All ranks' sums of the loss's parts, and the gradient of the loss by `count`, at rest as params are."""
    dtype = widest(setup.device) if setup.run.deterministic else None
    run_loss = value_and_grad(setup.loss, dtype, setup.trained)
    sums, grads = {}, {}
    for batch in batches:
        (_, metrics), grads = run_loss(params, batch, count=count, into=grads)
        sums = model.add(sums, tree_map(lambda part: widened(part, setup.device), metrics))
    return everywhere(sums, setup.comm), grads


def widened(part: Tensor, device: str) -> Tensor:
    """A part of a sum in the dtype in which it is added up; numbers of tokens stay whole."""
    return part.to(widest(device)) if part.is_floating_point() else part


def everywhere(sums: Mapping[str, Any], comm: Comm) -> dict[str, Any]:
    """A tree of sums added up over all ranks, in one exchange for each dtype."""
    flat = flatten(sums)
    for dtype in dict.fromkeys(part.dtype for part in flat.values()):
        same = {path: part for path, part in flat.items() if part.dtype == dtype}
        total = comm.sum(torch.cat([part.flatten() for part in same.values()]))
        parts = total.split([part.numel() for part in same.values()])
        flat |= {path: part.view(same[path].shape) for path, part in zip(same, parts, strict=True)}
    return unflatten(flat)


def averages(sums: Mapping[str, Any], count: Mapping[str, float]) -> dict[str, float]:
    """What a step records of its loss: each part's mean, `loss` that of the next token, NaN without a label.

    load_max: the most that an expert gets of its layer's tokens, as a multiple of their mean; dead_experts: how many
    get none.
    """
    per = {"nll": "labels", "kl": "real", "balance": "documents", "z": "real"}
    means = {k: float(v) / (count[per.get(k, k)] or math.nan) for k, v in sums.items() if k != "load"}
    parts = {"loss": means.pop("nll"), **means}
    loads = [load for _, load in leaves(sums.get("load", {}))]
    if not loads:
        return parts
    most = max(load.max().item() * len(load) / max(load.sum().item(), 1) for load in loads)
    return parts | {"load_max": most, "dead_experts": int(sum((load == 0).sum() for load in loads))}


def balance(params: Mapping[str, Any], loads: Mapping[str, Tensor], rate: float, trained: Collection[str]) -> None:
    """Move the bias of each router that learns towards an even load of its experts, once a step."""
    flat = flatten(params)
    for path, load in leaves(loads):
        if f"{path}.ffn.router" in trained:
            bias = mesh.local_part(flat[f"{path}.ffn.router_bias"])
            bias.copy_(balanced(bias, load, rate))


@torch.no_grad()
def evaluate(setup: Setup, params: Mapping[str, Any]) -> dict[str, float]:
    """The exact mean loss over all held-out labels, and its perplexity; changes no state."""
    totals = torch.zeros(2, dtype=widest(setup.device), device=setup.device)
    plain = partial(setup.loss, terms=setup.run.evaluated)  # no teaching, no further tokens
    for batch in held_out_batches(setup.data, setup.run.data, *mesh.data_rank(setup.run.mesh)):
        batch = {name: part.to(setup.device) for name, part in batch.items()}
        _, metrics = plain(params, batch)
        totals += torch.stack((metrics["nll"], counts(batch, setup.run.model, setup.comm)["labels"]))
    nll, count = setup.comm.sum(totals)
    if not count:
        return {}
    return {"eval_loss": float(nll / count), "eval_perplexity": float((nll / count).exp())}
