"""The optimizer against torch's own, its schedule against figures worked out by hand, and a whole step against both."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tiny import distance, random_params, tiny
from training import RUN, fixed, numbers, train

from glm5fn import flatten, init_params, loss, model_specs, settings, unflatten
from glm5fn.comm import LOCAL
from glm5fn.kernels import REFERENCE
from glm5fn.optim import clip_scale, grad_norm, init_moments, learning_rate, update
from glm5fn.settings import OptimConfig

MATRICES = ("q", "k", "v", "o", "gate_up", "down", "head")
OPTIM = OptimConfig(weight_decay=0.3, beta1=0.8, beta2=0.7, eps=1e-3)


def torch_optimizer(params, cfg):
    """torch's own over the same leaves, decaying the matrices alone. params: flat."""
    matrices = [leaf for path, leaf in params.items() if path.split(".")[-1] in MATRICES]
    others = [leaf for path, leaf in params.items() if path.split(".")[-1] not in MATRICES]
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return (
        torch.optim.SGD(groups)
        if cfg.name == "sgd"
        else torch.optim.AdamW(groups, 1.0, (cfg.beta1, cfg.beta2), cfg.eps)
    )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updates_equal_those_of_torch_with_decay_on_matrices_alone(name, fused):
    model, cfg = tiny(), replace(OPTIM, name=name)
    params = random_params(model, dtype=torch.float64)
    theirs = {path: leaf.clone().requires_grad_() for path, leaf in flatten(params).items()}
    optimizer, moments = torch_optimizer(theirs, cfg), init_moments(params, cfg)
    for step, lr in enumerate((0.1, 0.02, 0.3)):
        grads = random_params(model, seed=step + 1, dtype=torch.float64)
        for path, grad in flatten(grads).items():
            theirs[path].grad = 0.5 * grad
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        update(params, grads, moments, model_specs(model), cfg, lr, 0.5, fused)
    assert distance(params, unflatten(theirs)) < 1e-12


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("cosine", {0: 0.25, 3: 1.0, 4: 1.0, 6: 0.1 + 0.45 * (1 + 0.5**0.5), 8: 0.55, 12: 0.1, 99: 0.1}),
        ("linear", {0: 0.25, 3: 1.0, 4: 1.0, 6: 0.775, 8: 0.55, 12: 0.1, 99: 0.1}),
        ("constant", {0: 0.25, 3: 1.0, 4: 1.0, 99: 1.0}),
    ],
)
def test_the_rate_warms_up_and_then_follows_its_schedule(schedule, rates):
    cfg = OptimConfig(lr=1.0, min_lr=0.1, schedule=schedule, warmup_steps=4, decay_steps=12)
    assert {step: learning_rate(cfg, step) for step in rates} == pytest.approx(rates, rel=1e-12)


def test_a_gradient_is_scaled_down_to_the_limit_and_never_up():
    assert (clip_scale(4.0, 1.0), clip_scale(0.5, 1.0), clip_scale(4.0, 0.0)) == (0.25, 1.0, 1.0)


def test_the_norm_is_that_of_all_leaves_together():
    grads = random_params(tiny())
    norm = torch.nn.utils.get_total_norm([leaf.double() for leaf in flatten(grads).values()])
    assert float(grad_norm(grads, LOCAL)) == pytest.approx(float(norm), rel=1e-12)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_run_takes_the_step_that_torch_takes_on_the_whole_batch(tmp_path, name):
    """Rate, clipping, decay and the mean over the labels, in accumulated batches with and without labels."""
    data, out = fixed(tmp_path / "fixed.safetensors", 1, None, 2, 3), tmp_path / "x"
    flags = ["--data.path", data, "--data.micro-batch", "1", "--optim.clip", "0.3", "--optim.weight-decay", "0.7"]
    flags += (
        ["--optim.eps", "1e-3"] if name == "adamw" else []
    )  # else its first step is the sign of what may be rounding
    assert train(*RUN, *flags, "--optim.name", name, "--optim.lr", "0.1", "--steps", "1", "--out", out) == 0
    run = settings.load(out / "config.yaml")
    params = {path: leaf.requires_grad_() for path, leaf in flatten(init_params(run.model)).items()}
    value, _ = loss(unflatten(params), load_file(data), run.model, kernels=REFERENCE)
    value.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(params.values(), 0.3))
    optimizer = torch_optimizer(params, run.optim)
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / 5
    optimizer.step()
    assert norm > 0.3 and numbers(out)[0][1:4] == pytest.approx((value.item(), norm, 0.1 / 5), rel=1e-5)
    found = load_file(out / "checkpoints" / "step_00000001" / "params.safetensors")
    assert distance(unflatten(found), unflatten(params)) < 1e-5
