"""What keeps the experts' loads even: exact counts, the bias that follows them, and the two losses of the router."""

import math

import torch

from glm5fn.moe import Routing, balance_loss, balanced, load, z_loss

F64 = torch.float64


def randn(*size, seed=3):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_load_counts_real_tokens_only():
    chosen = torch.tensor([[[0, 3], [3, 5], [0, 1]], [[5, 3], [1, 0], [3, 4]]])
    assert load(chosen, 7).tolist() == [3, 2, 0, 4, 1, 2, 0]
    real = torch.tensor([[True, True, False], [False, False, True]])
    assert load(chosen, 7, real).tolist() == [1, 0, 0, 3, 1, 1, 0]
    assert load(chosen, 7).dtype == torch.int64


def test_the_bias_moves_by_exactly_the_rate_and_stays_at_balance():
    rate, bias = 0.001, torch.tensor([0.5, -0.25, 0.0, 1.0])
    assert torch.equal(balanced(bias, torch.tensor([5, 7, 6, 6]), rate), bias + torch.tensor([rate, -rate, 0, 0]))
    assert torch.equal(balanced(bias, torch.zeros(4, dtype=torch.int64), rate), bias)
    huge = torch.tensor([2**40 + 1, 2**40, 2**40, 2**40 - 1])  # which fp32 cannot tell apart
    assert torch.equal(balanced(bias, huge, rate), bias + torch.tensor([-rate, 0, 0, rate]))


def slow_balance(scores, topk):
    """Equations 17 to 20 for one document [t, e]."""
    steps, experts = scores.shape
    tops = [sorted(range(experts), key=lambda e, row=row: (-float(row[e].detach()), e))[:topk] for row in scores]
    total = 0.0
    for e in range(experts):
        frequency = experts / (topk * steps) * sum(e in top for top in tops)
        total = total + frequency * sum(row[e] / row.sum() for row in scores) / steps
    return total


SEGMENTS = torch.tensor([[1, 1, 1, 1, 2, 3, 3, 0, 0], [0, 0, 1, 1, 1, 1, 1, 13, 13], [4] * 9, [0] * 9])


def routing_of(logits, topk=3):
    scores = logits.sigmoid()
    return Routing(logits, scores, scores.topk(topk).indices, scores[..., :topk])


def test_the_balance_loss_and_its_gradient_equal_a_loop_over_documents():
    logits = randn(4, 9, 7).requires_grad_()
    packed = balance_loss(routing_of(logits), SEGMENTS, SEGMENTS != 0)
    wanted = 0.0
    for row, numbers in zip(logits, SEGMENTS, strict=True):
        for number in set(numbers.tolist()) - {0}:
            wanted = wanted + slow_balance(row[numbers == number].sigmoid(), 3)
    torch.testing.assert_close(packed, wanted, rtol=1e-10, atol=0)
    slopes = [torch.autograd.grad(value, logits)[0] for value in (packed, wanted)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-13)
    assert not slopes[0][SEGMENTS == 0].any()
    real = torch.arange(9) < torch.tensor([[9], [4], [1], [0]])
    padded = sum(slow_balance(row[kept].sigmoid(), 3) for row, kept in zip(logits[:3], real[:3], strict=True))
    torch.testing.assert_close(balance_loss(routing_of(logits), real=real), padded, rtol=1e-10, atol=0)
    whole = balance_loss(routing_of(logits))
    torch.testing.assert_close(whole, sum(slow_balance(row.sigmoid(), 3) for row in logits), rtol=1e-10, atol=0)


def test_the_balance_loss_is_one_for_even_scores_and_more_where_few_experts_get_all():
    even = torch.eye(7, dtype=F64)[None] * 1e-6
    torch.testing.assert_close(balance_loss(routing_of(even, 1)), torch.ones((), dtype=F64), rtol=1e-9, atol=0)
    lame = torch.zeros(1, 7, 7, dtype=F64)
    lame[..., 2] = 3.0
    assert balance_loss(routing_of(lame, 1)) > 1.5


def test_the_z_loss_and_its_gradient_equal_a_loop_over_real_tokens():
    logits, real = randn(4, 9, 7).requires_grad_(), SEGMENTS != 0
    value = z_loss(logits, real)
    wanted = sum(row.exp().sum().log() ** 2 for row in logits[real])
    torch.testing.assert_close(value, wanted, rtol=1e-10, atol=0)
    slopes = [torch.autograd.grad(total, logits)[0] for total in (value, wanted)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(z_loss(logits[real][None]), value, rtol=1e-12, atol=0)
    assert math.isclose(z_loss(torch.zeros(1, 2, 7, dtype=F64)), 2 * math.log(7) ** 2)


def test_padding_changes_neither_loss():
    logits, real = randn(4, 9, 7), SEGMENTS != 0
    other = torch.where(real[..., None], logits, 50.0)
    assert torch.equal(z_loss(logits, real), z_loss(other, real))
    losses = [balance_loss(routing_of(part), SEGMENTS, real) for part in (logits, other)]
    assert torch.equal(*losses)
