"""A text that is shown while a model writes it, and chats of such texts."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .generate import Row, generate, refuse
from .inference import Loaded
from .mesh import data_rank, gather, rank, together
from .sampling import Sampling
from .text import Stream

THOUGHT = "</think>"  # ends what a model says to itself

Encode = Callable[[Mapping[str, Any]], list[int]]  # the tokens behind which a row is to be continued


@dataclass(frozen=True)
class Asked:
    """A model, and how it is to continue texts."""

    loaded: Loaded
    most: int
    stops: frozenset[int]
    sampling: Sampling
    drafts: int

    def rounds(self, prompts: Sequence[Sequence[int]], first: int = 0) -> Iterator[list[Row]]:
        return generate(
            self.loaded.params,
            prompts,
            self.loaded.cfg,
            self.loaded.engine,
            most=self.most,
            stops=self.stops,
            sampling=self.sampling,
            drafts=self.drafts,
            share=data_rank(self.loaded.mesh),
            first=first,
        )


def textual(tokens: Sequence[int], stops: frozenset[int]) -> list[int]:
    """The tokens that stand for text: without the one that ends it."""
    return [token for token in tokens if token not in stops]


class Shown(NamedTuple):
    text: str
    row: Row


def show(asked: Asked, prompt: Sequence[int]) -> Shown:
    """Print a text while it grows, and how fast it did."""
    stream, begin, text, shown, first = Stream(asked.loaded.tokenizer), time.perf_counter(), "", 0, 0.0
    row = Row(prompt)
    for (row,) in asked.rounds([prompt]):
        first = first or time.perf_counter() - begin
        new = "".join(map(stream.add, textual(row.ids[shown:], asked.stops)))
        shown, text = len(row.ids), text + new
        say(new, end="")
    text += (rest := stream.end())
    say(rest)
    seconds, more = time.perf_counter() - begin - first, len(row.ids) - 1
    rate = f", then {more / seconds:.1f} tokens/s" if more else ""
    kept = f", {more / (row.rounds - 1):.2f} tokens a round" if asked.drafts and row.rounds > 1 else ""
    say(f"[{len(prompt):,} tokens of prompt in {first:.2f} s{rate}{kept}; {row.finish}]", file=sys.stderr)
    return Shown(text, row)


def say(text: str, **how: Any) -> None:
    if rank() == 0:
        print(text, flush=True, **how)


def converse(asked: Asked, encode: Encode) -> None:
    """Answer one message after the other, each a line of the input, until it ends."""
    messages: list[dict[str, Any]] = []
    while True:
        line = gather(heard() if rank() == 0 else None)[0]
        if line is None:
            return
        messages.append({"role": "user", "content": line})
        prompt = together(lambda: encode({"messages": messages}))
        together(lambda prompt=prompt: refuse([prompt], asked.loaded.cfg, asked.most, asked.sampling, asked.drafts))
        thought, _, said = show(asked, prompt).text.rpartition(THOUGHT)
        reasoning = {"reasoning_content": thought.removeprefix("<think>").strip()} if thought else {}
        messages.append({"role": "assistant", "content": said.strip(), **reasoning})


def heard() -> str | None:
    """The next line that is not empty."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        if line:
            return line
