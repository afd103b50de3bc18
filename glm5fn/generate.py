"""Continuations of prompts, token by token or by drafts that are verified, in one batch of rows."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .block import Params
from .config import ModelConfig
from .decode import Cache, advance, init_cache, logits_of, prefill, trim
from .mesh import RunError
from .model import Engine, outer_specs
from .ops import upcast
from .sampling import GREEDY, Sampling, distribution, draw, verified
from .speculate import Depths, draft, init_depths
from .typed import ConfigError


class Token(NamedTuple):
    """A token, and the logarithm of the probability that the model itself gives it."""

    id: int
    logprob: float


@dataclass
class Row:
    """A prompt and what follows it. most: tokens of that. rounds: how often the model was asked for more."""

    prompt: Sequence[int]
    most: int
    tokens: list[Token] = field(default_factory=list)
    rounds: int = 0
    finish: Literal["", "stop", "length"] = ""

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


Ended = Callable[[Sequence[int]], bool]


def never(ids: Sequence[int]) -> bool:
    return False


def generate(
    params: Params,
    prompts: Sequence[Sequence[int]],
    cfg: ModelConfig,
    engine: Engine,
    *,
    most: int,
    stops: Collection[int] = (),
    sampling: Sampling = GREEDY,
    drafts: int = 0,
    ended: Ended = never,
    share: tuple[int, int] = (0, 1),
    first: int = 0,
) -> Iterator[list[Row]]:
    """Continue prompts; yields all rows after each round, which goes on in place.

    most: tokens of a row; fewer if the model's positions end before. stops: ids that end a row, itself the last of its
    tokens. drafts: how many tokens are drafted a round by multi-token prediction. ended: whether the tokens so far end
    a row for another reason; all ranks must be of one mind. share: which data rank this is, and of how many: all are
    given all prompts, compute their part, and yield the same. first: the number of the first row for `Sampling.draws`.

    A row has the tokens that it would have alone. Raises ConfigError for prompts and settings that cannot be served,
    and RunError, on all ranks, for logits that are not finite.
    """
    refuse(prompts, cfg, most, sampling, drafts)
    limit, (rank, ranks) = cfg.max_position_embeddings, share
    rows = [Row(prompt, min(most, limit - len(prompt))) for prompt in prompts]
    draws = [sampling.draws(first + number) for number in range(len(rows))]
    numbers = list(range(rank, len(rows), ranks))
    alone = Row([0], most), sampling.draws(0)  # what a rank without rows computes, to take part in all exchanges
    state, new = None, dict[int, list[Token]]()
    norm = engine.fetch(params, outer_specs(cfg), "norm")

    def agree(found: Found) -> Found:
        """What all ranks found, from here on of this rank's rows too."""
        nonlocal new
        new = everywhere(dict(zip(numbers, found, strict=False)), len(rows), drafts + 1, engine, norm.device)
        return [new[n] for n in numbers] or found

    while not all(row.finish for row in rows):
        batch = [(rows[n], draws[n]) for n in numbers] or [alone]
        if state is None:
            width, more = max(len(row.prompt) for row in rows), max(row.most for row in rows)
            state = begin(params, batch, width, width + more + drafts, norm, cfg, engine, sampling, drafts, agree)
        else:
            state = further(params, batch, state, cfg, engine, sampling, agree)
        if any(math.isnan(token.logprob) for tokens in new.values() for token in tokens):
            raise RunError("the model's logits are not finite: are its weights?")
        record(rows, new, stops, ended)
        yield rows
        going = [at for at, n in enumerate(numbers) if not rows[n].finish]
        if len(going) < len(batch):
            state = state.of(torch.tensor(going or [0], device=state.known.device))
        numbers = [numbers[at] for at in going]


def refuse(prompts: Sequence[Sequence[int]], cfg: ModelConfig, most: int, sampling: Sampling, drafts: int) -> None:
    sampling.refuse()
    if most < 1:
        raise ConfigError(f"--max-new-tokens ({most}) must be at least 1")
    if drafts < 0:
        raise ConfigError(f"--drafts ({drafts}) must be at least 0")
    if drafts and not cfg.num_nextn_predict_layers:
        raise ConfigError(f"--drafts ({drafts}) must be 0: this model has no multi-token prediction")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ConfigError(f"prompt {number} has no token: must have at least one")
        if len(prompt) >= cfg.max_position_embeddings:
            limit = f"fewer than max_position_embeddings ({cfg.max_position_embeddings})"
            raise ConfigError(f"prompt {number} has {len(prompt)} tokens: must have {limit}")
        if not 0 <= min(prompt) <= max(prompt) < cfg.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < cfg.vocab_size)
            raise ConfigError(f"prompt {number} has id {wrong}: must be from 0 to vocab_size ({cfg.vocab_size}) - 1")


def record(rows: Sequence[Row], new: Mapping[int, Sequence[Token]], stops: Collection[int], ended: Ended) -> None:
    """Add what a round gave to its rows, up to where they end."""
    for number, tokens in new.items():
        row = rows[number]
        row.rounds += 1
        for token in tokens:
            row.tokens.append(token)
            if token.id in stops or ended(row.ids):
                row.finish = "stop"
            elif len(row.tokens) == row.most:
                row.finish = "length"
            if row.finish:
                break


def everywhere(
    new: Mapping[int, Sequence[Token]], rows: int, longest: int, engine: Engine, device: torch.device
) -> dict[int, list[Token]]:
    """What all ranks found, on all of them; of ranks that share rows the first one's counts."""
    ids = torch.zeros(rows, longest, dtype=torch.long)
    logs = torch.zeros(rows, longest)
    for number, tokens in new.items() if engine.comm.first else ():
        ids[number, : len(tokens)] = torch.tensor([token.id + 1 for token in tokens])  # 0 is none
        logs[number, : len(tokens)] = torch.tensor([token.logprob for token in tokens])
    sums = (engine.comm.sum(part.to(device)).tolist() for part in (ids, logs))
    found = zip(*sums, strict=True)
    parts = [[Token(id - 1, log) for id, log in zip(*row, strict=True) if id] for row in found]
    return {number: tokens for number, tokens in enumerate(parts) if tokens}


# --- the rounds of the rows that one rank computes ---

Rows = Sequence[tuple[Row, np.random.Generator]]
Found = list[list[Token]]  # the new tokens of each row
Agree = Callable[[Found], Found]  # what a rank found -> what all go on with


class State(NamedTuple):
    """What is known of b rows. known: their last tokens [b, s], the last of which is in no cache yet.

    x: the final states of the tokens before each of these; real: which of them are there, all if None.
    """

    cache: Cache
    depths: Depths | None
    x: Float[Tensor, "b s d"]
    known: Int[Tensor, "b s"]
    real: Bool[Tensor, "b s"] | None

    def of(self, rows: Int[Tensor, "n"]) -> "State":
        """What is known of these rows."""
        depths = None if self.depths is None else self.depths.of(rows)
        real = None if self.real is None else self.real[rows]
        return State(self.cache.of(rows), depths, self.x[rows], self.known[rows], real)


def begin(
    params: Params,
    batch: Rows,
    width: int,
    room: int,
    like: Tensor,
    cfg: ModelConfig,
    engine: Engine,
    sampling: Sampling,
    drafts: int,
    agree: Agree,
) -> State:
    """The first token of each row, whose prompts stand at the right of so many places. like: what is computed with."""
    room += engine.comm.parts
    cache = init_cache(cfg, len(batch), room, like.dtype, like.device, tp=engine.comm.tp)
    tokens = torch.zeros(len(batch), width, dtype=torch.long)
    real = torch.zeros(len(batch), width, dtype=torch.bool)
    for at, (row, _) in enumerate(batch):
        tokens[at, width - len(row.prompt) :] = torch.tensor(row.prompt)
        real[at, width - len(row.prompt) :] = True
    tokens, mask = tokens.to(like.device), None if real.all() else real.to(like.device)
    x, cache = prefill(params, tokens, cache, cfg, engine, mask, every=drafts > 0)
    depths = init_depths(cfg, drafts, len(batch), room, like, engine.comm.tp) if drafts else None
    logits = logits_of(params, x[:, -1:], cfg, engine)
    found = agree([chosen(logits[at], [], [], row, draws, sampling) for at, (row, draws) in enumerate(batch)])
    ids = tokens.new_tensor([[token.id for token in new] for new in found])
    return State(cache, depths, x, torch.cat((tokens, ids), 1)[:, 1:], mask)


def further(
    params: Params, batch: Rows, state: State, cfg: ModelConfig, engine: Engine, sampling: Sampling, agree: Agree
) -> State:
    """The next tokens of each row: those that were drafted and are what the model itself would say, and one more."""
    proposed: list[list[Tensor]] = [[] for _ in batch]
    drafted: list[list[int]] = [[] for _ in batch]

    def choose(logits: Float[Tensor, "b v"]) -> list[int]:
        for at, (row, draws) in enumerate(batch):
            shares = distribution(logits[at], sampling, [*row.prompt, *row.ids, *drafted[at]])
            proposed[at].append(shares)
            drafted[at].append(draw(shares, draws))
        return [tokens[-1] for tokens in drafted]

    tokens, depths = state.known[:, -1:], state.depths
    if depths is not None:
        drafts, depths = draft(params, state.x, state.known, state.real, depths, cfg, engine, choose)
        tokens = torch.cat((tokens, drafts), 1)
    x, cache = advance(params, tokens, state.cache, cfg, engine)
    logits = logits_of(params, x, cfg, engine)
    found = agree(
        [chosen(logits[at], drafted[at], proposed[at], row, draws, sampling) for at, (row, draws) in enumerate(batch)]
    )
    counts = tokens.new_tensor([len(new) for new in found])
    longest = int(counts.max())
    places = torch.arange(longest, device=counts.device) - (longest - counts)[:, None]  # below 0 where there is none
    x = x.gather(1, places.clamp(min=0)[..., None].expand(-1, -1, x.shape[-1]))
    known = tokens.new_tensor([[0] * (longest - len(new)) + [token.id for token in new] for new in found])
    mask = None if bool((counts == longest).all()) else places >= 0
    return State(trim(cache, tokens.shape[1] - counts), depths, x, known, mask)


def chosen(
    logits: Float[Tensor, "s v"],
    drafted: Sequence[int],
    proposed: Sequence[Tensor],
    row: Row,
    draws: np.random.Generator,
    sampling: Sampling,
) -> list[Token]:
    """The drafts of a row that are kept, and one token more."""
    wanted = (distribution(each, sampling, [*row.prompt, *row.ids, *drafted[:at]]) for at, each in enumerate(logits))
    ids = verified(drafted, proposed, wanted, draws)
    logs = upcast(logits[: len(ids)]).log_softmax(-1)
    return [Token(token, float(log[token])) for token, log in zip(ids, logs, strict=True)]
