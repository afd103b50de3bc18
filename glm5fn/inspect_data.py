"""`python -m glm5fn inspect-data`: windows as text, as a model sees them."""

import json
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from tyro.conf import Positional, arg

from .corpora import is_shards, open_data
from .indexed import PREPARED
from .kernels.reference import IGNORE
from .packing import Rows
from .settings import DataConfig
from .text import BYTES, Tokenizer, open_tokenizer
from .typed import ConfigError

ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")  # of GLM's documents and turns


class Ids(NamedTuple):
    """Of a model: how many there are, and those that end a document or a turn."""

    vocab_size: int
    eos_token_id: tuple[int, ...]


def inspect_data(
    paths: Annotated[Positional[tuple[Path, ...]], arg(metavar="PATH...")],
    *,
    seq_len: int = 256,
    packing: Literal["stream", "concatenate", "best-fit"] = "stream",
    kind: Literal["text", "chat"] = "text",
    field: str = "text",
    tokenizer: str | None = None,
    template: str | None = None,
    ends: tuple[str, ...] = ENDS,
    first: int = 0,
    count: int = 3,
    seed: int = 0,
) -> int:
    """Show what a model sees: windows as text, by document, with all that it learns to predict between ⟦ and ⟧.

    Args:
        paths: what train.py takes as --data.path: texts, chats, or token shards
        seq_len: tokens of a window
        packing: how documents fill windows, as --data.packing
        kind: text or chat, as --data.kind
        field: what holds the text of a row
        tokenizer: bytes, a tokenizer.json, or the directory of one; by default that of prepared shards, or bytes
        template: the Jinja template of chats, if it is not beside the tokenizer
        ends: the tokens that end a document (the first that there is) or a turn
        first: the number of the first window that is shown, in the order of a run
        count: how many are shown
        seed: of the order
    """
    if first < 0 or count < 1 or seq_len < 1:
        raise ConfigError(f"--first ({first}) must be at least 0, --count ({count}) and --seq-len ({seq_len}) 1")
    name = tokenizer or of_shards(paths) or "bytes"
    own = open_tokenizer(name, None)
    known = tuple(own.control[end] for end in ends if end in own.control)
    cfg = DataConfig(
        path=tuple(map(str, paths)),
        kind=kind,
        field=field,
        tokenizer=name,
        template=template,
        packing=packing,
        seq_len=seq_len,
        global_batch=1,
        held_out=0.0,
    )
    ids = Ids(own.size, known if own.end is None or own is BYTES else tuple(dict.fromkeys((*known, own.end))))
    data = open_data(cfg, ids, seed)
    for notice in data.notices:
        print(notice)
    total = sum(map(len, data.train))
    print(f"{total:,} windows of {seq_len} tokens")
    for number in range(first, first + count):
        rows = data.rows(np.array([number]))
        print("\n".join(shown(number, {key: part[0] for key, part in rows.items()}, own)))
    return 0


def of_shards(paths: tuple[Path, ...]) -> str | None:
    """The tokenizer with which shards were made."""
    for path in paths:
        record = (path if path.is_dir() else path.parent) / PREPARED
        if is_shards(path) and record.is_file():
            return json.loads(record.read_text())["settings"]["tokenizer"]
    return None


def shown(number: int, row: Rows, tokenizer: Tokenizer) -> Iterator[str]:
    """The lines that show a window."""
    segments = row.get("segments", np.ones_like(row["tokens"]))
    labels = int(np.sum(row["targets"] != IGNORE))
    documents = len(set(segments[segments != 0].tolist()))
    yield f"--- window {number}: {documents} documents, {labels} labels, {int(np.sum(segments == 0))} of padding"
    bounds = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
    for begin, end in pairwise(bounds):
        if segments[begin]:
            yield f"[{segments[begin]}] {marked(row['tokens'][begin:end], row['targets'][begin:end], tokenizer)}"


def marked(tokens: np.ndarray, targets: np.ndarray, tokenizer: Tokenizer) -> str:
    """The text of a document, what is learned of it between brackets: of a token, that the one before predicts it."""
    ids = [*tokens.tolist(), int(targets[-1])]
    learned = [False, *(targets != IGNORE).tolist()]
    if not learned[-1]:
        ids, learned = ids[:-1], learned[:-1]
    parts = groupby(zip(ids, learned, strict=True), key=lambda pair: pair[1])
    texts = [(is_learned, tokenizer.decode([token for token, _ in pairs])) for is_learned, pairs in parts]
    return "".join(f"⟦{text}⟧" if is_learned else text for is_learned, text in texts)
