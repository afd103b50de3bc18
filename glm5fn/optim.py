"""The optimizer: schedule, global gradient norm, clipping, and the update in place."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .comm import Comm
from .device import widest
from .mesh import copies, local_part
from .settings import MOMENTS, OptimConfig
from .spec import Specs, rows
from .tree import flatten, leaves, tree_map

PIECE = 1 << 20  # elements whose squares are summed at once


def learning_rate(cfg: OptimConfig, step: int) -> float:
    """The rate of the update number `step`, counted from 0: linear warm-up, then the schedule down to min_lr."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.lr
    done = min(1.0, (step - cfg.warmup_steps) / (cfg.decay_steps - cfg.warmup_steps))
    left = 0.5 * (1 + math.cos(math.pi * done)) if cfg.schedule == "cosine" else 1 - done
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left


def init_moments(params: Mapping[str, Any], cfg: OptimConfig) -> dict[str, Any]:
    """AdamW's running means of what learns and, for each leaf, how many updates they hold; SGD has none."""
    moments = {name: tree_map(torch.zeros_like, params) for name in MOMENTS[cfg.name]}
    if moments:
        moments["updates"] = tree_map(lambda leaf: local_part(leaf).new_zeros((), dtype=torch.float32), params)
    return moments


def grad_norm(grads: Mapping[str, Any], comm: Comm) -> Tensor:
    """The 2-norm of the whole gradient, the same on every rank; squares are summed in fp64, the result is rounded.

    Each element counts once: what several ranks hold is divided by their number.
    """
    total = None
    for _, grad in leaves(grads):
        part = local_part(grad)
        wide = widest(part.device.type)
        for piece in part.reshape(-1).split(PIECE):
            square = torch.linalg.vector_norm(piece, dtype=wide).square() / copies(grad)
            total = square if total is None else total + square
    assert total is not None, "a model without parameters"
    return comm.sum(total).sqrt()


def clip_scale(norm: float, limit: float) -> float:
    """What to multiply the gradient with so that its norm is at most `limit`; 0 does not clip."""
    return limit / norm if limit and norm > limit else 1.0


@torch.no_grad()
def update(
    params: Mapping[str, Any],
    grads: Mapping[str, Any],
    moments: Mapping[str, Any],
    specs: Specs,
    cfg: OptimConfig,
    lr: float,
    scale: float = 1.0,
    fused: bool = True,
) -> None:
    """One step in place, with `scale` times the gradients; decoupled weight decay on matrices (rows with a fan_in).

    AdamW: Loshchilov & Hutter 2019, arXiv 1711.05101. Works on plain, contiguous local parts: the fused kernel walks
    memory flat, and would pair up the wrong elements of two parts with different strides. It also rounds the last
    few elements of a part another way than the others, so only without it (`fused=False`) are the bits of the result
    the same however a tensor is cut.
    """
    flat_params, flat_grads = flatten(params), flatten(grads)
    flat_moments = {name: flatten(tree) for name, tree in moments.items()}
    learning = [(path, row) for path, row in rows(specs) if path in flat_grads]
    matrices = [path for path, row in learning if row.fan_in]
    others = [path for path, row in learning if not row.fan_in]
    for decay, paths in ((cfg.weight_decay, matrices), (0.0, others)):
        parts = [local_part(flat_params[path]) for path in paths]
        assert all(part.is_contiguous() for part in parts)
        slopes = [local_part(flat_grads[path]).contiguous() for path in paths]
        if scale != 1.0:
            slopes = [slope.mul_(scale) for slope in slopes]
        slopes = [slope.to(part.dtype) for slope, part in zip(slopes, parts, strict=True)]
        if cfg.name == "sgd":
            for part, slope in zip(parts, slopes, strict=True):
                part.mul_(1 - lr * decay).sub_(slope, alpha=lr)
            continue
        means, squares, updates = ([local_part(flat_moments[name][path]) for path in paths] for name in flat_moments)
        adamw(
            parts,
            slopes,
            means,
            squares,
            [],
            updates,
            fused=fused and parts[0].device.type in ("cpu", "cuda"),
            foreach=False,
            amsgrad=False,
            beta1=cfg.beta1,
            beta2=cfg.beta2,
            lr=lr,
            weight_decay=decay,
            eps=cfg.eps,
            maximize=False,
        )
