"""How well a model predicts documents: nats a token, perplexity, bits per byte."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from . import corpora
from .data import gather
from .inference import Loaded
from .kernels.reference import IGNORE
from .mesh import rank, together
from .packing import Corpus, Packed, pack, pieces_of
from .record import tell
from .score import Query, in_batches, sums
from .settings import DataConfig
from .text import Tokenizer

Packing = Literal["best-fit", "none"]
AT_ONCE = 1 << 24  # tokens of a shard that are checked at a time


def refuse(cfg: DataConfig, model: corpora.Vocabulary) -> None:
    """Raise ValueError for what can be seen without reading the documents."""
    if fixed := [path for path in cfg.path if path.endswith(".safetensors")]:
        raise ValueError(f"{fixed[0]}: is a file of fixed batches: --data must name documents")
    if twice := [path for path, times in Counter(cfg.path).items() if times > 1]:
        raise ValueError(f"{twice[0]}: --data names it more than once: leave it out")
    corpora.refuse(cfg, model)


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The documents of one path. bytes: of their text, None where only tokens are known."""

    name: str
    corpora: Sequence[Corpus]
    bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """tokens: those that were predicted. nll: nats a token. bytes: see `Texts`."""

    documents: int
    tokens: int
    bytes: int | None
    nll: float

    @property
    def perplexity(self) -> float | None:
        """None where it is larger than a number can be."""
        return math.exp(self.nll) if self.nll < 709 else None

    @property
    def bits_per_byte(self) -> float | None:
        return self.nll * self.tokens / math.log(2) / self.bytes if self.bytes else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


def measure(loaded: Loaded, cfg: DataConfig, packing: Packing, batch: int) -> tuple[str, dict[str, Any]]:
    """The table and the record of what the documents of `cfg.path` cost, each path and all of them."""
    texts = together(lambda: [open_documents(Path(path), cfg, loaded) for path in cfg.path])
    sets = [(n, windows_of(corpus, cfg.seq_len, packing)) for n, text in enumerate(texts) for corpus in text.corpora]
    owners = np.repeat([n for n, _ in sets], [len(windows) for _, windows in sets])
    which = np.repeat(np.arange(len(sets)), [len(windows) for _, windows in sets])
    index = np.concatenate([np.arange(len(windows)) for _, windows in sets])
    sizes = np.concatenate([np.add.reduceat(each.sizes, each.bounds[:-1]) for _, each in sets if len(each)])
    batches = in_batches(sizes, batch)

    def query(number: int) -> Query:
        rows = batches[number]
        held = gather([windows for _, windows in sets], which[rows], index[rows])  # pyright: ignore[reportArgumentType]
        held = {name: part[:, : sizes[rows].max()] for name, part in held.items()}
        row, _ = asked = np.nonzero(held["targets"] != IGNORE)
        at = np.ravel_multi_index(asked, held["tokens"].shape)
        segments = held["segments"] if held["segments"].max() > 1 else None
        return Query(held["tokens"], segments, at, held["targets"][asked], owners[rows][row])

    logs = sums(loaded, query, len(batches), len(texts), "evaluate")[:, 0].tolist()
    tokens = np.bincount(owners, sizes, len(texts)).astype(int).tolist()
    parts = [figures(text, count, -log) for text, count, log in zip(texts, tokens, logs, strict=True)]
    whole = joined(parts)
    named = {text.name: part for text, part in zip(texts, parts, strict=True)}
    record = {
        "seq_len": cfg.seq_len,
        "all": whole.as_json(),
        "files": {name: part.as_json() for name, part in named.items()},
    }
    return table(named | {"all": whole} if len(named) > 1 else named), record


def open_documents(path: Path, cfg: DataConfig, loaded: Loaded) -> Texts:
    """Raises ValueError, naming file and line, for what cannot be read, and for ids that the model does not have."""
    if corpora.is_shards(path):
        found, said = corpora.open_corpora(path, cfg, loaded.cfg)
        for corpus in found:
            for start in range(0, len(corpus.tokens), AT_ONCE):
                corpus.read(slice(start, start + AT_ONCE))
        size = None
        said = [*said, f"{path}: token shards hold no text, so there are no bits per byte"]
    else:
        tokenizer, lengths = counting(loaded.tokenizer)
        corpus, said = corpora.read_texts(path, cfg, loaded.cfg, tokenizer)
        found, size = [corpus], sum(lengths)
    if all(np.diff(corpus.begins).max(initial=0) < 2 for corpus in found):
        raise ValueError(f"{path}: has no document of at least two tokens")
    for notice in said if rank() == 0 else ():
        tell(notice)
    return Texts(name=str(path), corpora=found, bytes=size)


def counting(tokenizer: Tokenizer) -> tuple[Tokenizer, list[int]]:
    """The tokenizer, and a list of the bytes of all texts that it will have encoded."""
    lengths: list[int] = []

    def encode(texts: list[str]) -> list[np.ndarray]:
        lengths.append(sum(len(text.encode()) for text in texts))
        return tokenizer.encode(texts)

    return replace(tokenizer, encode=encode), lengths


def windows_of(corpus: Corpus, seq_len: int, packing: Packing) -> Packed:
    """The documents in windows; one that is longer is cut alike in either packing."""
    if packing == "best-fit":
        return pack(corpus, seq_len)
    starts, sizes = pieces_of(corpus.begins, seq_len)
    return Packed(corpus, seq_len, starts, sizes, np.arange(len(starts) + 1))


def figures(text: Texts, tokens: int, nats: float) -> Figures:
    documents = sum(len(corpus.begins) - 1 for corpus in text.corpora)
    return Figures(documents=documents, tokens=tokens, bytes=text.bytes, nll=nats / tokens)


def joined(parts: Sequence[Figures]) -> Figures:
    tokens = sum(part.tokens for part in parts)
    known = [part.bytes for part in parts if part.bytes is not None]
    return Figures(
        documents=sum(part.documents for part in parts),
        tokens=tokens,
        bytes=sum(known) if len(known) == len(parts) else None,
        nll=math.fsum(part.nll * part.tokens for part in parts) / tokens,
    )


def table(rows: Mapping[str, Figures]) -> str:
    width = max(map(len, rows))
    lines = [f"{'':{width}}{'documents':>12}{'tokens':>16}{'nats/token':>12}{'perplexity':>14}{'bits/byte':>11}"]
    for name, row in rows.items():
        perplexity = "too large" if row.perplexity is None else f"{row.perplexity:.6g}"
        bits = "-" if row.bits_per_byte is None else f"{row.bits_per_byte:.5f}"
        line = f"{name:{width}}{row.documents:12,}{row.tokens:16,}{row.nll:12.6f}{perplexity:>14}{bits:>11}"
        lines.append(line)
    return "\n".join(lines)
