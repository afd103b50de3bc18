# pyright: reportMissingImports=false
"""The adapter for lm-evaluation-harness: models of this package under the name `glm5fn`.

The harness knows of models that it did not bring along once they are imported. From the shell, this module is its
command line with that done; in Python it is the import alone:

    python -m glm5fn.harness run --model glm5fn --model_args path=DIR --tasks arc_easy,wikitext --batch_size 8

    import glm5fn.harness, lm_eval
    lm_eval.simple_evaluate(model="glm5fn", model_args={"path": "DIR"}, tasks=["arc_easy"])
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from .converse import Writer
from .inference import Device, Precision, load_for
from .sampling import Sampling
from .score import Ids, encode_pair, score
from .typed import ConfigError

Pair = tuple[Ids, Ids]
NEW = 256  # tokens of an answer, where a task does not say how many


@register_model("glm5fn")
class GLM(LM):
    """A model's directory, or a run's checkpoint, in one process.

    path: of it. tokenizer: bytes, a tokenizer.json, or the directory of one; by default the model's, or bytes.
    batch_size: rows of a forward pass. max_length: of context and continuation; as many as the model has by default.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        device: Device | None = None,
        precision: Precision = "fp32",
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ConfigError(f"batch_size ({batch_size}) must be a number of rows, at least 1")
        self.loaded = load_for(Path(path), device=device or "auto", precision=precision, tokenizer=tokenizer)
        limit = self.loaded.cfg.max_position_embeddings
        self.max_length = max_length or limit
        if not 1 <= self.max_length <= limit:
            raise ConfigError(f"max_length ({max_length}) must be from 1 to max_position_embeddings ({limit})")
        self.batch_size = int(batch_size)
        self._device = torch.device(self.loaded.device)

    @property
    def end(self) -> int:
        """The token that ends a document, behind which another begins."""
        assert self.loaded.tokenizer.end is not None  # as inference.load_for makes sure
        return self.loaded.tokenizer.end

    def encode(self, text: str) -> np.ndarray:
        return self.loaded.tokenizer.encode([text])[0]

    def pair(self, context: str, continuation: str) -> Pair:
        """Ids of both; an empty context is the end of a document, a long one loses its front."""
        if context.strip():
            [(first, then)] = encode_pair(self.loaded.tokenizer.encode, context, continuation)
        else:
            then = self.encode(context + continuation)
            begun = then[:1].tolist() == [self.end]
            first, then = (then[:1], then[1:]) if begun else (np.array([self.end]), then)
        room = self.max_length + 1 - len(then)
        if room < 1:
            raise ValueError(f"a continuation has {len(then)} tokens, must be at most max_length ({self.max_length})")
        return first[-room:], then

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        pairs = [self.pair(*request.args) for request in requests]
        found = [tuple(scored) for scored in score(self.loaded, pairs, self.batch_size)]
        return self.told("loglikelihood", requests, found)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Each token is predicted once, the first of a text from the end of a document."""
        windows = [
            list(get_rolling_token_windows(self.encode(*request.args).tolist(), self.end, self.max_length, 1))
            for request in requests
        ]
        pairs = [make_disjoint_window(window) for each in windows for window in each]
        logs = iter(scored.log for scored in score(self.loaded, pairs, self.batch_size))
        return self.told("loglikelihood_rolling", requests, [sum(next(logs) for _ in each) for each in windows])

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Answers up to the first text that ends one, which they do not have; a long context loses its front."""
        found: dict[int, str] = {}
        numbered = sorted(enumerate(requests), key=lambda pair: repr(pair[1].args[1]))
        for _, group in groupby(numbered, key=lambda pair: repr(pair[1].args[1])):
            same = list(group)
            texts = self.answers([request.args[0] for _, request in same], same[0][1].args[1])
            found |= dict(zip((number for number, _ in same), texts, strict=True))
        return self.told("generate_until", requests, [found[number] for number in range(len(requests))])

    def answers(self, contexts: Sequence[str], asked: Mapping[str, Any]) -> list[str]:
        settings = dict(normalize_gen_kwargs(dict(asked), NEW))
        until, most = handle_stop_sequences(settings["until"], eos=None), settings["max_gen_toks"]
        if most >= self.max_length:
            raise ValueError(f"max_gen_toks ({most}) must be below max_length ({self.max_length}): ask for fewer")
        prompts = [self.encode(text).tolist()[most - self.max_length :] or [self.end] for text in contexts]
        names = ("temperature", "top_k", "top_p") if settings["do_sample"] else ()
        sampling = Sampling(**{name: settings[name] for name in names if name in settings})
        writer = Writer(self.loaded, most, frozenset((self.end, *self.loaded.cfg.eos_token_id)), sampling, drafts=0)
        found = []

        def ended(ids: Sequence[int]) -> bool:
            text = self.loaded.tokenizer.decode(ids)
            return any(one in text for one in until)

        for start in range(0, len(prompts), self.batch_size):
            *_, rows = writer.rounds(prompts[start : start + self.batch_size], start, ended)
            found += [before(writer.text_of(row), until) for row in rows]
        return found

    def told(self, kind: str, requests: Sequence[Instance], found: list[Any]) -> list[Any]:
        """The answers, which the harness's cache has heard of."""
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)
        return found


def before(text: str, until: Sequence[str]) -> str:
    """A text up to the first of these that it has."""
    return text[: min((text.find(one) for one in until if one in text), default=len(text))]


if __name__ == "__main__":
    cli_evaluate()
