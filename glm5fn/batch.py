"""What a rank gets of a batch: its tokens of each row, and where they stand among all."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from .comm import Comm
from .kernels.reference import IGNORE


class Documents(NamedTuple):
    """Where tokens stand.

    positions: for RoPE; 0, 1, ... if None. segments: of all keys; a token attends inside its own only. real: the tokens
    that count for the experts' load and the indexers' loss, of this rank's part of them; all if None.
    """

    positions: Int[Tensor, "b s"] | None = None
    segments: Int[Tensor, "b t"] | None = None
    real: Bool[Tensor, "b r"] | None = None


class Further(NamedTuple):
    """What a depth of multi-token prediction adds to each position.

    tokens: those so many places ahead. targets: what it must predict. real: whether that token is there, and of the
    same document.
    """

    tokens: Int[Tensor, "b s"]
    targets: Int[Tensor, "b s"]
    real: Bool[Tensor, "b r"]


class Prepared(NamedTuple):
    """A rank's tokens and targets, where they stand, which of them begin a document, and what each depth adds."""

    tokens: Int[Tensor, "b s"]
    targets: Int[Tensor, "b s"]
    where: Documents
    begins: Bool[Tensor, "b r"]
    further: tuple[Further, ...]


def prepare(batch: Mapping[str, Tensor], depths: int, comm: Comm) -> Prepared:
    """Look ahead on whole rows, then cut them, so that no border between ranks loses or changes a label.

    batch: tokens [b, t], and optionally targets, already shifted, segments (0 is padding, 1.. are documents) and
    positions (0, 1, ... in each segment when absent). Rows that do not divide get padding behind their end.
    """
    tokens, segments, positions = batch["tokens"], batch.get("segments"), batch.get("positions")
    targets = batch.get("targets", torch.full_like(tokens, IGNORE))
    if missing := -tokens.shape[1] % comm.parts:
        segments = torch.ones_like(tokens) if segments is None else segments
        tokens, segments = (F.pad(part, (0, missing)) for part in (tokens, segments))
        positions = None if positions is None else F.pad(positions, (0, missing))
        targets = F.pad(targets, (0, missing), value=IGNORE)
    documents = torch.ones_like(tokens) if segments is None else segments
    places = restart(documents)
    if positions is None and (segments is not None or comm.parts > 1):
        positions = places
    real = documents != 0
    further = []
    for depth in range(1, depths + 1):
        inside = real & (documents == ahead(documents, depth, 0))
        wanted = ahead(targets, depth, IGNORE).masked_fill(~inside, IGNORE)
        found = Further(*map(comm.mine, (ahead(tokens, depth, 0), wanted, inside)))
        further.append(found._replace(real=comm.own(found.real)))
    where = Documents(
        positions=None if positions is None else comm.mine(positions),
        segments=segments,
        real=None if segments is None else comm.own(comm.mine(real)),
    )
    begins = comm.own(comm.mine(real & (places == 0)))
    return Prepared(comm.mine(tokens), comm.mine(targets), where, begins, tuple(further))


def ahead(values: Int[Tensor, "b t"], depth: int, fill: int) -> Int[Tensor, "b t"]:
    """What stands `depth` places ahead of each position; `fill` behind the end."""
    return F.pad(values[:, depth:], (0, min(depth, values.shape[1])), value=fill)


def restart(segments: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """Positions that start at 0 in each run of equal segment numbers.

    >>> restart(torch.tensor([[1, 1, 2, 2, 2, 0]]))
    tensor([[0, 1, 0, 1, 2, 0]])
    """
    steps = torch.arange(segments.shape[-1], device=segments.device).expand_as(segments)
    fresh = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    return steps - torch.where(fresh, steps, 0).cummax(-1).values
