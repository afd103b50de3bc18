"""Each operation against a slow loop in fp64; the fast kernels against the slow ones, gradients included."""

import cmath
import math

import pytest
import torch
from tiny import distance

from glm5fn.kernels import REFERENCE, TORCH, WIDENED, portable
from glm5fn.ops import rope_angles

KERNELS = pytest.mark.parametrize("kernels", [REFERENCE, TORCH, WIDENED], ids=["reference", "torch", "widened"])


def randn(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@KERNELS
def test_rms_norm_equals_a_loop(kernels):
    x, weight, eps = randn(2, 3, 7), randn(7, seed=1), 1e-3
    y = kernels.rms_norm(x, weight, eps)
    for b in range(2):
        for s in range(3):
            mean = sum(float(v) ** 2 for v in x[b, s]) / 7
            for d in range(7):
                assert math.isclose(y[b, s, d], x[b, s, d] / math.sqrt(mean + eps) * weight[d], rel_tol=1e-12)


@KERNELS
def test_rms_norm_in_bf16_takes_its_statistics_in_fp32_and_applies_the_weight_after_the_cast(kernels):
    x, weight = randn(5, 64).bfloat16() * 100, randn(64, seed=1).bfloat16()
    wide = x.float()
    normed = (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    # Exact but where two ways to the root differ in its last fp32 bit, just at the border of two bf16 numbers.
    assert (kernels.rms_norm(x, weight, 1e-6) != normed * weight).sum() <= 1
    assert kernels.rms_norm(x, weight, 1e-6).dtype == torch.bfloat16


@KERNELS
def test_swiglu_gates_the_second_half_by_the_first(kernels):
    x = randn(3, 10)
    y = kernels.swiglu(x)
    for n in range(3):
        for f in range(5):
            gate, up = float(x[n, f]), float(x[n, 5 + f])
            assert math.isclose(y[n, f], gate / (1 + math.exp(-gate)) * up, rel_tol=1e-12)


@KERNELS
@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_multiplies_each_pair_by_a_unit_complex_number(kernels, interleaved):
    x, positions, theta, pairs = randn(2, 5, 3, 10), torch.tensor([[0, 1, 2, 7, 11], [3, 0, 1, 2, 40]]), 50.0, 3
    y = kernels.rope(x, *rope_angles(positions, 2 * pairs, theta, torch.float64), interleaved)
    for b in range(2):
        for s in range(5):
            for h in range(3):
                for r in range(pairs):
                    i, j = (2 * r, 2 * r + 1) if interleaved else (r, pairs + r)
                    turn = cmath.exp(1j * int(positions[b, s]) / theta ** (2 * r / (2 * pairs)))
                    turned = complex(x[b, s, h, i], x[b, s, h, j]) * turn
                    assert cmath.isclose(complex(y[b, s, h, i], y[b, s, h, j]), turned, rel_tol=1e-12)
    assert torch.equal(y[..., 2 * pairs :], x[..., 2 * pairs :])


@KERNELS
@pytest.mark.parametrize("segments", [None, [[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2]]], ids=["whole rows", "documents"])
def test_attention_equals_a_loop_over_allowed_keys(kernels, segments):
    q, k, v = randn(2, 6, 6, 4), randn(2, 3, 6, 4, seed=1), randn(2, 3, 6, 5, seed=2)
    y = kernels.attention(q, k, v, None if segments is None else torch.tensor(segments))
    for b in range(2):
        for h in range(6):
            for s in range(6):
                keys = [t for t in range(s + 1) if segments is None or segments[b][t] == segments[b][s]]
                weights = [math.exp(float(q[b, h, s] @ k[b, h // 2, t]) / math.sqrt(4)) for t in keys]
                mean = sum(w * v[b, h // 2, t] for w, t in zip(weights, keys, strict=True)) / sum(weights)
                torch.testing.assert_close(y[b, h, s], mean, rtol=1e-11, atol=1e-12)


@KERNELS
@pytest.mark.parametrize("target", [-1, -99, -101, 11])
def test_a_target_that_is_no_token_is_refused(kernels, target):
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        kernels.token_loss(randn(2, 4), randn(11, 4, seed=1), torch.tensor([3, target]))


@KERNELS
def test_token_loss_sums_the_negative_log_likelihoods_of_the_labels(kernels):
    x, head, targets = randn(7, 4), randn(11, 4, seed=1), torch.tensor([3, -100, 10, 0, 0, -100, 5])
    total = 0.0
    for n, target in enumerate(targets.tolist()):
        if target != -100:
            logits = [float(x[n] @ head[v]) for v in range(11)]
            total -= logits[target] - math.log(sum(map(math.exp, logits)))
    assert math.isclose(kernels.token_loss(x, head, targets), total, rel_tol=1e-12)


@pytest.mark.parametrize("logits", [1, 23, 24, 10_000], ids=lambda n: f"{n} logits at once")
def test_the_chunked_loss_equals_the_whole_one_and_so_do_its_gradients(logits, monkeypatch):
    monkeypatch.setattr(portable, "LOGITS", logits)
    monkeypatch.setattr(portable, "ROWS", 1)
    x, head, targets = randn(7, 4).requires_grad_(), randn(11, 4, seed=1).requires_grad_(), torch.arange(7) + 3
    targets[2] = -100
    results = []
    for kernels in (REFERENCE, TORCH):
        value = kernels.token_loss(x, head, targets) * 0.3
        results.append(dict(zip("vxh", (value, *torch.autograd.grad(value, (x, head))), strict=True)))
    assert distance(*results) < 1e-12


def test_the_chunked_loss_never_holds_all_logits(monkeypatch):
    monkeypatch.setattr(portable, "LOGITS", 64)
    monkeypatch.setattr(portable, "ROWS", 1)
    x, head, targets = randn(256, 4).requires_grad_(), randn(32, 4, seed=1).requires_grad_(), torch.arange(256) % 32
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                leaf.numel() for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)
            )
            return out

    with Watch():
        TORCH.token_loss(x, head, targets).backward()
    assert max(sizes) <= x.numel() < 256 * 32


def test_a_batch_without_labels_has_loss_and_gradients_of_zero():
    x, head = randn(5, 4).requires_grad_(), randn(11, 4, seed=1).requires_grad_()
    loss = TORCH.token_loss(x, head, torch.full((5,), -100))
    loss.backward()
    assert loss == 0 and not x.grad.any() and not head.grad.any()


@KERNELS
@pytest.mark.parametrize(("rows", "steps"), [(2, 3), (1, 4), (1, 1), (0, 3)])  # a few are computed in another way
def test_linear_equals_a_loop_and_its_gradients_the_formula(kernels, rows, steps):
    x, weight, bias = randn(rows, steps, 5).requires_grad_(), randn(4, 5, seed=1).requires_grad_(), randn(4, seed=2)
    bias.requires_grad_()
    y, slope = kernels.linear(x, weight, bias), randn(rows, steps, 4, seed=3)
    assert y.shape == slope.shape and y.is_contiguous()
    for b in range(rows):
        for s in range(steps):
            for o in range(4):
                total = bias[o] + sum(x[b, s, i] * weight[o, i] for i in range(5))
                assert math.isclose(y[b, s, o].item(), total.item(), rel_tol=1e-11)
    grads = torch.autograd.grad(y, (x, weight, bias), slope)
    wanted = slope @ weight, torch.einsum("bso,bsi->oi", slope, x), slope.sum((0, 1))
    for grad, formula in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, formula, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(kernels.linear(x, weight), y - bias, rtol=1e-11, atol=1e-12)


def test_widened_kernels_take_and_give_bf16_and_round_once():
    q, k, v = (randn(1, h, 6, 4, seed=h).bfloat16() for h in (4, 2, 2))
    weight, targets = randn(9, 4, seed=7).bfloat16(), torch.arange(6)
    assert WIDENED.linear(q, weight).equal(REFERENCE.linear(q.float(), weight.float()).bfloat16())
    assert WIDENED.attention(q, k, v).dtype == torch.bfloat16
    exact = REFERENCE.attention(q.float(), k.float(), v.float())
    torch.testing.assert_close(WIDENED.attention(q, k, v).float(), exact, rtol=2**-8, atol=1e-6)
    loss = REFERENCE.token_loss(q[0, 0].float(), weight.float(), targets)
    torch.testing.assert_close(WIDENED.token_loss(q[0, 0], weight, targets), loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rotary_dim", [0, -2, 1, 5])
def test_rope_turns_pairs(rotary_dim):
    with pytest.raises(ValueError, match="must be even and above 0"):
        rope_angles(torch.arange(3), rotary_dim, 50.0, torch.float64)


ANGLES = rope_angles(torch.arange(3), 6, 50.0, torch.float64)
LEAN = {
    "rms_norm": ((randn(3, 8), randn(8, seed=1)), (1e-3,)),
    "swiglu": ((randn(3, 8),), ()),
    "rope": ((randn(2, 3, 5, 8),), (*ANGLES, True)),
    "rope, half-split": ((randn(2, 3, 5, 8),), (*ANGLES, False)),
}


@pytest.mark.parametrize("case", LEAN)
def test_a_lean_backward_pass_equals_the_derivative_of_the_formula(case):
    inputs, extra = LEAN[case]
    inputs, results = tuple(leaf.clone().requires_grad_() for leaf in inputs), []
    for kernels in (REFERENCE, TORCH):
        y = getattr(kernels, case.split(",")[0])(*inputs, *extra)
        grads = torch.autograd.grad(y, inputs, randn(*y.shape, seed=2))
        results.append({str(i): leaf for i, leaf in enumerate((y, *grads))})
    assert distance(*results) < 1e-12


def test_the_loss_of_bf16_logits_sums_its_head_gradient_in_fp32(monkeypatch):
    monkeypatch.setattr(portable, "LOGITS", 8)
    monkeypatch.setattr(portable, "ROWS", 1)  # chunks of 4
    x, head = torch.ones(4096, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    TORCH.token_loss(x, head, torch.zeros(4096, dtype=torch.long)).backward()
    assert head.grad[0].item() == -2048  # a sum of halves in bf16 would stop at -128
