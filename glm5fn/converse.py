"""A text that is shown while a model writes it, and chats of such texts."""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Thread
from typing import Any

from .generate import Ended, Row, generate, never, refuse
from .inference import Loaded
from .mesh import RunError, data_rank, gather, rank, together
from .sampling import Sampling
from .text import Stream

THOUGHT = "</think>"  # ends what a model says to itself
PATIENCE = 60.0  # seconds after which the other ranks hear that nobody has typed anything

Encode = Callable[[Mapping[str, Any]], list[int]]  # the tokens behind which a row is to be continued


@dataclass(frozen=True)
class Writer:
    """A model, and how it is to continue texts."""

    loaded: Loaded
    most: int
    stops: frozenset[int]
    sampling: Sampling
    drafts: int

    def rounds(self, prompts: Sequence[Sequence[int]], first: int = 0, ended: Ended = never) -> Iterator[list[Row]]:
        return generate(
            self.loaded.params,
            prompts,
            self.loaded.cfg,
            self.loaded.engine,
            most=self.most,
            stops=self.stops,
            sampling=self.sampling,
            drafts=self.drafts,
            ended=ended,
            share=data_rank(self.loaded.mesh),
            first=first,
        )

    def text_of(self, row: Row) -> str:
        return self.loaded.tokenizer.decode(textual(row.ids, self.stops))


def textual(tokens: Sequence[int], stops: Collection[int]) -> list[int]:
    """The tokens that stand for text: without the one that ends it."""
    return [token for token in tokens if token not in stops]


def show(writer: Writer, prompt: Sequence[int]) -> Row:
    """Print a text while it grows, and how fast it did."""
    stream, row = Stream(writer.loaded.tokenizer), Row(prompt, writer.most)
    begin, shown, first = time.perf_counter(), 0, 0.0
    for (row,) in writer.rounds([prompt]):
        first = first or time.perf_counter() - begin
        say("".join(map(stream.add, textual(row.ids[shown:], writer.stops))), end="")
        shown = len(row.tokens)
    say(stream.end())
    seconds, more = time.perf_counter() - begin - first, len(row.tokens) - 1
    rate = f", then {more / seconds:.1f} tokens/s" if more else ""
    kept = f", {more / (row.rounds - 1):.2f} tokens a round" if writer.drafts and row.rounds > 1 else ""
    say(f"[{len(prompt):,} tokens of prompt in {first:.2f} s{rate}{kept}; {row.finish}]", file=sys.stderr)
    return row


def say(text: str, **how: Any) -> None:
    if rank() == 0:
        print(text, flush=True, **how)


class Lines:
    """The lines of the input that are not empty, read by a thread."""

    def __init__(self) -> None:
        self.read: Queue[str | UnicodeError | None] = Queue()
        Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        try:
            for line in sys.stdin:
                if line.strip():
                    self.read.put(line.strip())
        except UnicodeError as error:
            self.read.put(error)
        self.read.put(None)

    def next(self) -> str | None:
        """The next line, None behind the last, and an empty one if nothing came for a while."""
        found: str | UnicodeError | None = ""
        with suppress(Empty):
            found = self.read.get(timeout=PATIENCE)
        if isinstance(found, UnicodeError):
            raise ValueError(f"the input must be text ({found})")
        return found


def converse(writer: Writer, encode: Encode) -> None:
    """Answer one message after the other, each a line of the input, until it ends. One that cannot be is told."""
    lines, messages = Lines() if rank() == 0 else None, list[dict[str, Any]]()
    invite = sys.stdin.isatty()
    while True:
        if invite:
            say("> ", end="")
        while (line := gather(together(lambda: lines.next() if lines else None))[0]) == "":
            pass
        if line is None:
            return
        asked = [*messages, {"role": "user", "content": line}]
        try:
            prompt = together(lambda asked=asked: encode({"messages": asked}))
            together(
                lambda prompt=prompt: refuse([prompt], writer.loaded.cfg, writer.most, writer.sampling, writer.drafts)
            )
        except RunError as error:
            say(f"glm5fn: {error}", file=sys.stderr)
            continue
        thought, _, said = writer.text_of(show(writer, prompt)).rpartition(THOUGHT)
        reasoning = {"reasoning_content": thought.removeprefix("<think>").strip()} if thought else {}
        messages = [*asked, {"role": "assistant", "content": said.strip(), **reasoning}]
