"""How the next token is taken from logits: the highest, or drawn; and which drafts of it are kept."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from .ops import upcast
from .typed import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What tokens are drawn from, in the order in which it is applied."""

    repetition_penalty: float = 1.0  # divides the logits of tokens that are there already, or multiplies negative ones
    temperature: float = 0.0  # divides the logits; 0 takes the highest, of equals the one with the lower id
    top_k: int = 0  # draw from so many of the likeliest; 0 for all
    top_p: float = 1.0  # draw from the fewest of the likeliest that have this probability together
    seed: int = 0  # of the draws; each row has its own, which depend on nothing else

    def refuse(self) -> None:
        """Raise ConfigError for what cannot be drawn from."""
        for name, fine, what in (
            ("repetition-penalty", 0.01 <= self.repetition_penalty <= 100, "from 0.01 to 100"),
            ("temperature", 0 <= self.temperature < math.inf, "at least 0"),
            ("top-k", self.top_k >= 0, "at least 0"),
            ("top-p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed >= 0, "at least 0"),
        ):
            if not fine:
                raise ConfigError(f"--{name} ({getattr(self, name.replace('-', '_'))}) must be {what}")

    def draws(self, row: int) -> np.random.Generator:
        """The source of a row's draws."""
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, row))))


GREEDY = Sampling()
SOME = 1024  # of the likeliest tokens, which mostly have enough probability together


def distribution(logits: Float[Tensor, "v"], sampling: Sampling, there: Sequence[int]) -> Float[Tensor, "v"]:
    """The probabilities with which the next token is each of the vocabulary, in fp64 on the CPU.

    there: the tokens of the row so far.
    """
    logits = upcast(logits).cpu().double()
    if sampling.repetition_penalty != 1 and there:
        index = torch.tensor(sorted(set(there)))
        seen = logits[index]
        logits[index] = torch.where(seen > 0, seen / sampling.repetition_penalty, seen * sampling.repetition_penalty)
    if not sampling.temperature:
        return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)
    logits = (logits - logits.max()) / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        kept = highest(logits, sampling.top_k)[: sampling.top_k]
        logits = torch.full_like(logits, -math.inf).index_copy(0, kept, logits[kept])
    shares = logits.softmax(-1)
    if sampling.top_p < 1:
        order = highest(shares, SOME)
        if shares[order].sum() < sampling.top_p:
            order = highest(shares, len(shares))
        before = shares[order].cumsum(0) - shares[order]
        kept = order[before < sampling.top_p]
        shares = torch.zeros_like(shares).index_copy(0, kept, shares[kept])
    return shares / shares.sum()


def highest(values: Float[Tensor, "v"], count: int) -> Int[Tensor, "n"]:
    """Where the highest values stand, the first of equals first: so many, and those that equal the last of them."""
    lowest = values.topk(min(count, len(values)), sorted=True).values[-1]
    kept = (values >= lowest).nonzero()[:, 0]
    return kept[values[kept].argsort(descending=True, stable=True)]


def draw(shares: Float[Tensor, "v"], draws: np.random.Generator) -> int:
    """One token. A certain one takes no draw."""
    likeliest = int(shares.argmax())
    if shares[likeliest] == 1:
        return likeliest
    sums = shares.cumsum(0)
    at = draws.random() * sums[-1]
    return min(int(torch.searchsorted(sums, at, right=True)), int(shares.nonzero()[-1]))


def verified(
    drafts: Sequence[int],
    proposed: Sequence[Float[Tensor, "v"]],
    wanted: Iterator[Float[Tensor, "v"]],
    draws: np.random.Generator,
) -> list[int]:
    """The drafts that are kept, and one token more (speculative sampling, Leviathan et al., arXiv 2211.17192).

    proposed: from what each draft was drawn. wanted: from what it should have been, and behind them the next token;
    no more is asked for than is needed.
    What comes out is distributed as if it had been drawn from `wanted` token by token.
    """
    found: list[int] = []
    for draft, q in zip(drafts, proposed, strict=True):
        p = next(wanted)
        ratio = float(p[draft] / q[draft])
        if ratio < 1 and draws.random() >= ratio:
            left = (p - q).clamp(min=0)
            return [*found, draw(left / left.sum(), draws)]
        found.append(draft)
    return [*found, draw(next(wanted), draws)]
