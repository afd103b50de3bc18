"""Texts as token ids."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

CHARACTER = 4  # bytes of a character, at most
PIECE = re.compile(r"(?s).{1,65536}(?= |\Z)|.{1,65536}")  # of a text, to be encoded at once


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Texts to token ids and back. Text stays text: what reads like a control token is encoded as its characters.

    encode: texts -> one array of ids each. decode: ids -> text, control tokens by name. size: all ids are below.
    end: ends a document, None if nothing does. control: the tokens that stand for no text, by name.
    joins: whether parts of a text, cut before spaces, have the ids of the text; those that put a space first do not.
    """

    encode: Callable[[list[str]], list[np.ndarray]]
    decode: Callable[[Sequence[int]], str]
    size: int
    end: int | None
    control: Mapping[str, int]
    joins: bool = True


def decode_bytes(ids: Sequence[int]) -> str:
    """Ids of bytes as text; those that are no UTF-8, and ids beyond the bytes, as what they are."""
    runs = re.findall(r"(?s)[\x00-\xff]+|.", "".join(map(chr, ids)))
    ended = {chr(256): "<end>"}
    return "".join(
        ended.get(run, f"<{ord(run)}>")
        if ord(run[0]) > 255
        else run.encode("latin-1").decode(errors="backslashreplace")
        for run in runs
    )


BYTES = Tokenizer(
    encode=lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
    decode=decode_bytes,
    size=257,
    end=256,
    control={"<end>": 256},
)


class Stream:
    """The text of tokens as they come, in whole characters: what may change with the next token is held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []  # since a place where the text was whole
        self.whole = 0  # of them, up to the last such place; only what is behind it is still to be followed
        self.shown = 0  # characters of their text

    def add(self, token: int) -> str:
        """The characters that are whole now."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        left = unfinished(self.ids, text, self.tokenizer)
        new, self.shown = text[self.shown : len(text) - left], max(self.shown, len(text) - left)
        if not left:
            self.ids = self.ids[self.whole :]  # the text of some tokens depends on one before them
            self.whole, self.shown = len(self.ids), len(self.tokenizer.decode(self.ids))
        return new

    def end(self) -> str:
        """What is left when no token follows."""
        return self.tokenizer.decode(self.ids)[self.shown :]


def unfinished(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> int:
    """How many characters at the end of these tokens' text may be a part of one."""
    if tokenizer is not BYTES:
        return min(len(text) - len(text.rstrip("\ufffd")), CHARACTER - 1)
    last = ids[1 - CHARACTER :]
    begin = max((n for n, token in enumerate(last, 1) if token > 255), default=0)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(bytes(last[begin:]))
    return len("\\xff") * len(decoder.getstate()[0])


def open_tokenizer(name: str, end: int | str | None, control_tokens: bool = False) -> Tokenizer:
    """`bytes` (ids 0-255, 256 ends a document), a tokenizer.json, or a Hugging Face directory that has one.

    end: the token that ends a document, or its id; when absent, the `eos_token` of the tokenizer_config.json beside it.
    control_tokens: as `with_control`.
    The truncation, padding and special tokens that a tokenizer.json may ask for are not obeyed. Raises ValueError,
    which names the file, for what cannot be read, and for an end that it does not have.
    """
    if name == "bytes":
        return BYTES
    file = tokenizer_file(name)
    if not file.is_file():
        raise ValueError(
            f"{file}: is not there: a tokenizer must be 'bytes', a tokenizer.json, or a directory with one"
        )
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        whole = tokenizers.Tokenizer.from_str(json.dumps(settings))
        control = {token["content"]: token["id"] for token in settings["added_tokens"] if token["content"].strip()}
        texts = [token for token in settings["added_tokens"] if token["content"] not in control]
        bare = settings | {"added_tokens": texts, "post_processor": None, "truncation": None, "padding": None}
        plain = tokenizers.Tokenizer.from_str(json.dumps(bare))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{file}: must be a tokenizer.json ({error})") from error

    def encode(texts: list[str]) -> list[np.ndarray]:
        try:
            return [np.array(found.ids, np.int64) for found in plain.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:
            raise ValueError(f"{file}: must be able to encode any text ({error}): give it an unknown token") from error

    def parts(*texts: str) -> list[int]:
        return [int(i) for ids in encode(list(texts)) for i in ids]

    joins = all(parts(one + other) == parts(one, other) for one, other in (("a", " b"), ("\u4e2d", "\u6587")))
    leaky = [name for name, number in control.items() if number in parts(name)]  # the vocabulary has them as text too
    if short := [name for name in leaky if len(name) == 1]:
        raise ValueError(f"{file}: {short[0]!r} is a control token and a text of one character: it must be one of them")

    end = eos_token(file.parent) if end is None else end
    number = whole.token_to_id(end) if isinstance(end, str) else end
    if isinstance(end, str) and number is None:
        raise ValueError(f"{file}: has no token {end!r} to end a document: name one that it has")
    made = Tokenizer(
        encode=without(leaky, encode) if leaky else encode,
        decode=lambda ids: whole.decode([int(i) for i in ids], skip_special_tokens=False),
        size=max(whole.get_vocab().values(), default=-1) + 1,
        end=number,
        control=control,
        joins=joins,
    )
    return with_control(made) if control_tokens else made


def tokenizer_file(name: str) -> Path:
    """The file that decides how texts are encoded."""
    path = Path(name)
    return path / "tokenizer.json" if path.is_dir() else path


def without(names: Sequence[str], encode: Callable[[list[str]], list[np.ndarray]]) -> Callable[..., list[np.ndarray]]:
    """The encoding, but of texts in which these names stand, what is before and behind their first letter by itself."""
    inside = re.compile("|".join(f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names))

    def cut(texts: list[str]) -> list[np.ndarray]:
        pieces = [inside.split(text) for text in texts]
        ids = iter(encode([part for each in pieces for part in each]))
        return [np.concatenate([next(ids) for _ in each]) for each in pieces]

    return cut


def eos_token(directory: Path) -> str | None:
    """The token that ends a text, by a tokenizer's own settings."""
    return token_name(tokenizer_config(directory).get("eos_token"))


def token_name(token: Any) -> Any:
    """A token of a tokenizer_config.json, which has it as its name or as an object with it."""
    return token.get("content") if isinstance(token, dict) else token


def tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path}: must be JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must be a JSON object")
    return found


def with_control(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, but what reads like a control token is one."""
    names = sorted(tokenizer.control, key=len, reverse=True)
    if tokenizer is BYTES or not names:
        return tokenizer
    some = re.compile("(" + "|".join(map(re.escape, names)) + ")")

    def encode(texts: list[str]) -> list[np.ndarray]:
        pieces = [some.split(text) for text in texts]  # text, control token, text, ...
        ids = iter(tokenizer.encode([part for each in pieces for part in each[::2]]))
        return [
            np.concatenate([next(ids) if n % 2 == 0 else [tokenizer.control[part]] for n, part in enumerate(each)])
            for each in pieces
        ]

    return replace(tokenizer, encode=encode)


def encode(
    texts: Iterable[str], tokenizer: Tokenizer, kind: np.dtype, whole: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """All documents in one flat array, each ended by `tokenizer.end`, and where in it each ends.

    A text of no tokens leaves nothing. whole: texts are documents; else parts of one, which nothing ends. So that
    memory stays bounded, a text longer than 65536 characters is encoded in pieces, cut before spaces, if that changes
    nothing.
    """
    flat, begun, ends = bytearray(), 0, []
    pieces = (
        ((match[0], match.end() == len(text)) for text in texts for match in PIECE.finditer(text))
        if tokenizer.joins
        else ((text, True) for text in texts)
    )
    while batch := list(islice(pieces, 64)):
        for (_, last), ids in zip(batch, tokenizer.encode([piece for piece, _ in batch]), strict=True):
            flat += ids.astype(kind).tobytes()
            if whole and last and len(flat) > begun:
                flat += kind.type(tokenizer.end).tobytes()
                begun = len(flat)
                ends.append(begun // kind.itemsize)
    return np.frombuffer(flat, kind), np.array(ends, np.int64)
