"""How likely a model finds given tokens: log-probabilities, read off rows of tokens in batches over all ranks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from . import mesh
from .batch import prepare
from .device import widest
from .inference import Loaded
from .kernels.portable import LOGITS, ROWS
from .model import head_weight, trunk
from .ops import upcast

Ids = Sequence[int] | np.ndarray
ID = np.dtype(">u4")  # big-endian: the order of ids is that of their bytes


class Query(NamedTuple):
    """Rows of tokens, and which of the next tokens are asked for.

    tokens: [b, t]. segments: 0 is padding, 1.. are documents; each row is one if None. at: the places of tokens, rows
    one after the other, behind which the targets are asked for, and owners, to whose sums they count [n].
    """

    tokens: np.ndarray
    segments: np.ndarray | None
    at: np.ndarray
    targets: np.ndarray
    owners: np.ndarray


NOTHING = np.zeros(0, np.int64)
BLANK = Query(np.zeros((1, 1), np.int64), None, NOTHING, NOTHING, NOTHING)  # of a rank that must only take part


@torch.no_grad()
def sums(
    loaded: Loaded, query: Callable[[int], Query], count: int, owners: int, what: str
) -> Float[Tensor, "owners 2"]:
    """For each owner, the sum of its targets' log-probabilities in nats, and how many of them are not the likeliest.

    query: makes each of `count` batches by its number; groups of ranks that share rows take them in turn. Sums are
    those of all ranks, in fp64 where the device has it, on every rank's CPU. Raises RunError, on all ranks, for sums
    that are not finite.
    """
    number, groups = mesh.data_rank(loaded.mesh)
    total = torch.zeros(owners, 2, dtype=widest(loaded.device), device=loaded.device)
    hidden = None if mesh.rank() == 0 else True
    for first in tqdm(range(0, count, groups), desc=what, unit="batch", disable=hidden, leave=False):
        asked = query(first + number) if first + number < count else BLANK
        found, own = answers(loaded, asked)
        total.index_add_(0, torch.from_numpy(asked.owners).to(loaded.device)[own], found.to(total.dtype))
    total = loaded.engine.comm.sum(total).cpu()
    if not total.isfinite().all():
        raise mesh.RunError(f"{what}: log-probabilities are not finite: are all of the model's weights?")
    return total


def answers(loaded: Loaded, query: Query) -> tuple[Float[Tensor, "m 2"], Tensor]:
    """(log-probability, 1 if another token is likelier) of the targets that are this rank's, and which those are."""
    cfg, engine, device = loaded.cfg, loaded.engine, loaded.device
    missing = ((0, 0), (0, -query.tokens.shape[1] % engine.comm.parts))
    rows = {"tokens": query.tokens, "segments": query.segments}
    batch = {k: torch.from_numpy(np.pad(v, missing)).to(device) for k, v in rows.items() if v is not None}
    tokens, width = batch["tokens"], query.tokens.shape[1]
    own = prepare(batch, 0, engine.comm)
    x, _, started = trunk(loaded.params, own.tokens, cfg, own.where, engine, head=True)
    x, head = engine.comm.enter(x).flatten(0, 1), head_weight(loaded.params, cfg, engine, started)
    places = engine.comm.mine(torch.arange(tokens.numel(), device=device).view_as(tokens))
    counted = torch.zeros(tokens.numel(), dtype=torch.bool, device=device)
    counted[engine.comm.own(places).flatten()] = True  # of what several ranks compute, one tells
    here = torch.full((tokens.numel(),), -1, device=device)
    here[places.flatten()] = torch.arange(len(x), device=device)
    at, targets = (torch.from_numpy(part).to(device) for part in (query.at, query.targets))
    at = at // width * tokens.shape[1] + at % width
    index = here[at]
    mine = (index >= 0).nonzero()[:, 0]
    found = [upcast(x.new_zeros(0, 2))]
    for some in mine.split(max(ROWS, LOGITS // cfg.vocab_size)):
        logits = upcast(engine.logits(x[index[some]], head))
        wanted = targets[some]
        logs = logits.gather(-1, wanted[:, None])[:, 0] - logits.logsumexp(-1)
        found.append(torch.stack((logs, (logits.argmax(-1) != wanted).type_as(logs)), -1))
    told = counted[at[mine]]
    return torch.cat(found)[told], mine[told]


def in_batches(sizes: Ids, rows: int) -> list[np.ndarray]:
    """The numbers of rows of these lengths, in batches of at most so many, the longest first.

    No row is shorter than half of the longest of its batch, so that at most half of what is computed is padding.

    >>> in_batches([3, 9, 4, 8, 5, 1], 3)
    [array([1, 3, 4]), array([2, 0]), array([5])]
    """
    batches: list[list[int]] = []
    longest = 0
    for number in np.argsort(-np.asarray(sizes), kind="stable").tolist():
        if not batches or len(batches[-1]) == rows or 2 * sizes[number] < longest:
            batches.append([])
            longest = sizes[number]
        batches[-1].append(number)
    return [np.array(batch) for batch in batches]


# --- continuations of contexts ---


class Scored(NamedTuple):
    """log: the sum of a continuation's log-probabilities, in nats. greedy: whether each of its tokens is likeliest."""

    log: float
    greedy: bool


class Asked(NamedTuple):
    """Of a row, the tokens of a continuation, the first of them behind place `first`."""

    first: int
    tokens: np.ndarray
    owner: int


def score(loaded: Loaded, pairs: Sequence[tuple[Ids, Ids]], batch: int = 8) -> list[Scored]:
    """How likely each continuation is behind its context, for pairs of (context, continuation) as ids, in their order.

    All ranks call it alike, and all get the answers. Pairs of which one row holds all tokens that another needs share
    it: continuations of one token, of the same context, cost one row in all. batch: rows of a forward pass.
    Raises ValueError for a context without tokens, and for a pair that is longer than the model's positions.
    """
    wanted: dict[bytes, list[Asked]] = {}
    for owner, (context, continuation) in enumerate(pairs):
        size, limit = len(context) + len(continuation) - 1, loaded.cfg.max_position_embeddings
        if not len(context) or size > limit:
            must = f"must be from 1 to max_position_embeddings ({limit}) + 1 - those of its continuation"
            raise ValueError(f"context {owner} has {len(context)} tokens, {must} ({len(continuation)}): cut it")
        tokens = np.asarray(continuation, np.int64)
        if len(tokens):
            key = np.concatenate((context, tokens[:-1])).astype(ID).tobytes()
            wanted.setdefault(key, []).append(Asked(len(context) - 1, tokens, owner))
    rows = shared(wanted)
    keys = [*rows]
    batches = in_batches([len(key) for key in keys], batch)

    def query(number: int) -> Query:
        return query_of([(keys[row], rows[keys[row]]) for row in batches[number]])

    found = sums(loaded, query, len(batches), len(pairs), "score").tolist()
    return [Scored(log, not missed) for log, missed in found]


def shared(wanted: dict[bytes, list[Asked]]) -> dict[bytes, list[Asked]]:
    """The same without rows that begin another one, by which theirs are answered."""
    kept: dict[bytes, list[Asked]] = {}
    last = b""
    for key in sorted(wanted, reverse=True):  # what begins another stands right behind those that it begins
        last = last if last.startswith(key) else key
        kept.setdefault(last, []).extend(wanted[key])
    return kept


def query_of(rows: Sequence[tuple[bytes, Sequence[Asked]]]) -> Query:
    """Rows side by side, filled up behind their ends, which no token before them sees."""
    width = max(len(key) for key, _ in rows) // ID.itemsize
    tokens = np.zeros((len(rows), width), np.int64)
    asked = [(row, one) for row, (_, many) in enumerate(rows) for one in many]
    for row, (key, _) in enumerate(rows):
        tokens[row, : len(key) // ID.itemsize] = np.frombuffer(key, ID)
    at = [row * width + one.first + np.arange(len(one.tokens)) for row, one in asked]
    owners = [np.full(len(one.tokens), one.owner) for _, one in asked]
    return Query(
        tokens, None, np.concatenate(at), np.concatenate([one.tokens for _, one in asked]), np.concatenate(owners)
    )


def encode_pair(
    encode: Callable[[list[str]], list[np.ndarray]], context: str, *continuations: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """A text and what may follow it, as pairs of ids, which are encoded as one text and cut where the first ends.

    Spaces at the end of the context become part of the continuation, as in lm-evaluation-harness.
    """
    bare = context.rstrip()
    first, *whole = encode([bare, *(context + continuation for continuation in continuations)])
    return [(first, ids[len(first) :]) for ids in whole]
