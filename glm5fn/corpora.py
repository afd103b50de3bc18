"""What data.path names (texts, conversations, token shards, fixed batches) as samples to train on.

Every rank opens the whole of the data when a run starts, so what is wrong with it is said before any training, by all
ranks alike; of token shards, which are mapped, a window is checked when it is read.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Protocol

import numpy as np
from safetensors.numpy import load_file

from .chat import Conversation, encode_chat, open_template
from .data import Data, Joined, Part, Samples, spread
from .indexed import PROGRESS, open_shard
from .kernels.reference import IGNORE
from .packing import Corpus, Packed, Windows, pack
from .settings import DataConfig
from .sources import LINES, SUFFIXES, blocks, encode_block, read_object, read_rows
from .text import Tokenizer, encode, open_tokenizer


class Vocabulary(Protocol):
    """What of a model decides which tokens it can be trained on."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_id(self) -> tuple[int, ...]: ...


def refuse(cfg: DataConfig, model: Vocabulary) -> None:
    """Raise ValueError for what can be seen without reading the data: names, and a tokenizer that does not fit."""
    for path in map(Path, cfg.path):
        if not path.exists() or (path.is_dir() and not is_shards(path)):
            what = "is a directory without token shards" if path.is_dir() else "is not there"
            raise ValueError(f"{path}: {what}: data.path must be a file, or a directory of shards")
        if is_shards(path):
            shards_of(path)
        elif not path.name.endswith((*SUFFIXES, ".safetensors")):
            raise ValueError(f"{path}: data.path must end in one of {', '.join((*SUFFIXES, '.safetensors', '.idx'))}")
        elif path.stat().st_size == 0:
            raise ValueError(f"{path}: is empty: data.path must name files that hold data")
        elif path.suffix == ".safetensors" and len(cfg.path) > 1:
            raise ValueError(f"{path}: fixed batches must be all the data: name no other data.path")
        if cfg.kind == "chat" and not path.name.endswith(LINES):
            raise ValueError(f"{path}: a chat must be in one of {', '.join(LINES)}: set data.kind to text")
    if cfg.kind == "chat" and not cfg.path:
        raise ValueError("data.kind is chat: data.path must name a file of conversations")
    if any(not is_shards(path) and path.suffix != ".safetensors" for path in map(Path, cfg.path)) or not cfg.path:
        tokenizer_for(cfg, model)
        if cfg.kind == "chat":
            open_template(cfg.tokenizer, cfg.template)


def tokenizer_for(cfg: DataConfig, model: Vocabulary) -> Tokenizer:
    """The tokenizer. The model's first `eos_token_id` ends each document; bytes have an end of their own."""
    end = model.eos_token_id[0] if model.eos_token_id else None
    found = open_tokenizer(cfg.tokenizer, end, cfg.control_tokens)
    name, vocab = cfg.tokenizer, model.vocab_size
    if found.size > vocab:
        least = f"vocab_size ({vocab}) must be at least {found.size}"
        raise ValueError(f"data.tokenizer {name} has {found.size} tokens, so {least}")
    if found.end is None:
        raise ValueError(f"{name}: nothing ends a document: the model's config.json must have eos_token_id")
    if not 0 <= found.end < vocab:
        raise ValueError(f"eos_token_id ({found.end}) ends each document: must be from 0 to vocab_size ({vocab}) - 1")
    return found


def open_data(cfg: DataConfig, model: Vocabulary, seed: int) -> Data:
    """Open all of the data and check it.

    Texts, conversations and token shards are shuffled anew in each epoch; `held_out` of the windows of each, the last,
    are kept apart: at least one, and never all. Fixed batches (`.safetensors`: `tokens` and `targets`
    [samples, seq_len]) are replayed in file order and hold nothing out, so that two programs can train on the same.

    Raises ValueError, naming file and line, for whatever could not be trained on.
    """
    refuse(cfg, model)
    if cfg.path and Path(cfg.path[0]).suffix == ".safetensors":
        return told(open_samples(Path(cfg.path[0]), cfg.seq_len, model.vocab_size), cfg)
    train, held_out, notices = [], [], []
    for path in map(Path, cfg.path) if cfg.path else (None,):
        corpora, said = open_corpora(path, cfg, model)
        sets = [windows for corpus in corpora if len(windows := windows_of(corpus, cfg))]
        tokens = sum(len(corpus.tokens) for corpus in corpora)
        name = path or "the built-in text"
        if cfg.packing == "stream" and cfg.kind == "text" and tokens <= cfg.seq_len:
            least = f"data.seq-len ({cfg.seq_len}) + 1: set a smaller data.seq-len"
            raise ValueError(f"{name}: has {tokens} tokens, must have at least {least}")
        if not sets:
            raise ValueError(f"{name}: has no document of at least two tokens")
        count = sum(map(len, sets))
        held = min(max(round(cfg.held_out * count), 1), count - 1) if cfg.held_out else 0
        begins = np.cumsum([0, *map(len, sets)])[:-1].tolist()
        kept = [min(max(count - held - begin, 0), len(each)) for each, begin in zip(sets, begins, strict=True)]
        train.append(Joined([Part(each, 0, n) for each, n in zip(sets, kept, strict=True)]))
        held_out += [Part(each, n, len(each) - n) for each, n in zip(sets, kept, strict=True)]
        notices += said
        if cfg.held_out and not held:
            notices.append(f"{name}: is one window: none is held out")
    order = spread(cfg.weights) if cfg.weights else (0,)
    if cfg.weights and len(set(order)) < len(train):
        never = [name for n, name in enumerate(cfg.path) if n not in set(order)]
        raise ValueError(f"{', '.join(never)}: data.weights are so small that it would never be read: raise them")
    if not cfg.weights:
        train = [Joined([part for joined in train for part in joined.sets])]
    return told(Data(train=train, held_out=Joined(held_out), seed=seed, order=order, notices=tuple(notices)), cfg)


def told(data: Data, cfg: DataConfig) -> Data:
    """The data, with a notice if a step does not find as many samples as it reads."""
    count, wanted = sum(map(len, data.train)), cfg.global_batch
    said = f"{count} samples are fewer than data.global-batch ({wanted}): each step reads some of them more than once"
    return replace(data, notices=(*data.notices, said)) if count < wanted else data


def windows_of(corpus: Corpus, cfg: DataConfig) -> Windows | Packed:
    if cfg.kind == "chat" or cfg.packing == "best-fit":
        return pack(corpus, cfg.seq_len)
    return Windows(corpus, cfg.seq_len, apart=cfg.packing == "concatenate")


def open_corpora(path: Path | None, cfg: DataConfig, model: Vocabulary) -> tuple[list[Corpus], list[str]]:
    """The documents of a path, and what to say about them."""
    if path is not None and is_shards(path):
        shards = [(shard, open_shard(shard)) for shard in shards_of(path)]
        named = partial(Corpus, size=model.vocab_size)
        return [named(name=str(p), tokens=shard.tokens, begins=shard.begins) for p, shard in shards], []
    tokenizer = tokenizer_for(cfg, model)
    if path is None:
        ids, ends = encode((topics[name] for name in sorted(topics)), tokenizer, kind_for(model))
        return [corpus_of("the built-in text", [ids], [ends], model)], []
    if cfg.kind == "chat":
        return read_chats(path, cfg, model, tokenizer)
    corpus, said = read_texts(path, cfg, model, tokenizer)
    return [corpus], said


def kind_for(model: Vocabulary) -> np.dtype:
    """The smallest type that holds a model's ids."""
    return np.dtype(np.uint16 if model.vocab_size <= 1 << 16 else np.uint32)


def read_texts(path: Path, cfg: DataConfig, model: Vocabulary, tokenizer: Tokenizer) -> tuple[Corpus, list[str]]:
    """The documents of a file of texts, and what to say about them."""
    found, bad = [], []
    for block in blocks(path, cfg.field):
        found.append(encode_block(block, tokenizer, kind_for(model), cfg.field, cfg.skip_bad))
        bad += found[-1].bad
    corpus = corpus_of(str(path), [each.ids for each in found], [each.ends for each in found], model)
    return corpus, left_out(path, bad)


def corpus_of(name: str, ids: Sequence[np.ndarray], ends: Sequence[np.ndarray], model: Vocabulary) -> Corpus:
    """One corpus of blocks of documents, in each of which `ends` counts from its begin."""
    offsets = np.cumsum([0, *map(len, ids)])[:-1]
    whole = np.concatenate([[0], *(each + offset for each, offset in zip(ends, offsets, strict=True))]).astype(np.int64)
    return Corpus(name=name, tokens=np.concatenate([np.zeros(0, np.uint8), *ids]), begins=whole, size=model.vocab_size)


def read_chats(path: Path, cfg: DataConfig, model: Vocabulary, tokenizer: Tokenizer) -> tuple[list[Corpus], list[str]]:
    """The conversations of a file that have a label; the others are counted."""
    template = open_template(cfg.tokenizer, cfg.template)
    assert tokenizer.end is not None  # as tokenizer_for makes sure
    ends = model.eos_token_id or (tokenizer.end,)

    def read(line: bytes) -> Conversation:
        return encode_chat(read_object(line), tokenizer, template, ends, cfg.seq_len, cfg.control_tokens)

    found, bad, typed = [], [], 0
    for block in blocks(path, cfg.field):
        typed += sum(any(name.encode() in line for name in tokenizer.control) for line in block.rows)
        good, wrong = read_rows(block, read, cfg.skip_bad)
        found += good
        bad += wrong
    labelled = [each for each in found if each.learned.any()]
    if not labelled:
        raise ValueError(f"{path}: no row has a label: none of its {len(found)} has an answer that fits data.seq-len")
    ids = [each.ids.astype(kind_for(model)) for each in labelled]
    corpus = corpus_of(str(path), ids, [np.array([len(each)]) for each in ids], model)
    bare = len(found) - len(labelled)
    notices = [f"{path}: {bare} of {len(found)} rows have no label, and were left out"] if bare else []
    if typed and not cfg.control_tokens:
        meant = "are taken as text, by the template too: set data.control-tokens if they are meant"
        notices.append(f"{path}: what reads like control tokens in {typed} rows {meant}")
    learned = np.concatenate([each.learned for each in labelled])
    return [replace(corpus, learned=learned)], [*left_out(path, bad), *notices]


def left_out(path: Path, bad: Sequence[str]) -> list[str]:
    more = f" and {len(bad) - 9} more" if len(bad) > 9 else ""
    return [f"{path}: {len(bad)} bad rows left out: {'; '.join(bad[:9])}{more}"] if bad else []


def is_shards(path: Path) -> bool:
    """Whether this names token shards: a directory that holds some, or one pair by one of its files."""
    return path.suffix in (".idx", ".bin") or (
        path.is_dir() and (any(path.glob("*.idx")) or (path / PROGRESS).exists())
    )


def shards_of(path: Path) -> list[Path]:
    """The shards of a path, each without its suffix. Raises ValueError for a directory that is not whole."""
    if not path.is_dir():
        return [path.with_suffix("")]
    if (path / PROGRESS).exists():
        raise ValueError(f"{path}: is not whole: run the same `python -m glm5fn prepare` again, which goes on")
    return [shard.with_suffix("") for shard in sorted(path.glob("*.idx"))]


def open_samples(path: Path, seq_len: int, vocab_size: int) -> Data:
    """Read fixed batches. Samples without any label count nothing in the loss; a notice says how many there are."""
    try:
        held = load_file(path)
    except Exception as error:  # the library's own errors do not name the file
        raise ValueError(f"{path}: must be a safetensors file of fixed batches ({error})") from error
    shapes = {ids.shape if ids.dtype.kind in "iu" and ids.ndim == 2 else None for ids in held.values()}
    if set(held) != {"tokens", "targets"} or len(shapes) > 1 or None in shapes:
        found = ", ".join(f"{name} {ids.dtype} {list(ids.shape)}" for name, ids in sorted(held.items()))
        raise ValueError(f"{path}: has {found or 'nothing'}, must have tokens and targets, integers [samples, seq_len]")
    tokens, targets = held["tokens"], held["targets"]
    if tokens.shape[1] != seq_len:
        raise ValueError(f"{path}: samples have {tokens.shape[1]} tokens, data.seq-len is {seq_len}: must be equal")
    for name, ids, allowed in (("tokens", tokens, 0), ("targets", targets, IGNORE)):
        wrong = ((ids < 0) | (ids >= vocab_size)) & (ids != allowed)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise ValueError(
                f"{path}: {name}[{row}, {column}] is {ids[row, column]}, must be below the model's vocab_size "
                f"({vocab_size}) and not negative; ids reach {ids.max()}, and {IGNORE} marks a target without a label"
            )
    bare = int(np.sum((targets == IGNORE).all(axis=1)))
    if bare == len(targets):
        raise ValueError(f"{path}: no sample has a label: all targets of its {bare} samples are {IGNORE}")
    notices = (f"{path}: {bare} of {len(targets)} samples have no label",) if bare else ()
    return Data(train=[Samples(tokens, targets)], held_out=Samples(tokens[:0], targets[:0]), seed=None, notices=notices)
