"""Conversations as token ids, and which of them a model is to learn: what the assistant says, and how it ends."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .text import Tokenizer, token_name, tokenizer_config, with_control

ASSISTANT, USER, OBSERVATION = "<|assistant|>", "<|user|>", "<|observation|>"
ROLES = ("<|system|>", USER, ASSISTANT, OBSERVATION)
PRIVATE = range(0xE000, 0xF900)  # characters that mean nothing by themselves

Render = Callable[..., str]  # of messages and tools, and whether an answer is asked for


class Conversation(NamedTuple):
    """ids: int64 [t]. learned: which of them are labels [t]; none of an empty one."""

    ids: np.ndarray
    learned: np.ndarray


EMPTY = Conversation(np.zeros(0, np.int64), np.zeros(0, bool))


def open_template(tokenizer: str, path: str | None) -> Render:
    """A chat template: the file that is named, or the one in the tokenizer's directory.

    There it is chat_template.jinja, or the `chat_template` of tokenizer_config.json. It runs in Jinja's sandbox, with
    what Hugging Face's templates expect. Raises ValueError that names the file if there is none, or none that is one.
    """
    directory = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    file = Path(path) if path is not None else directory / "chat_template.jinja"
    settings = {} if tokenizer == "bytes" else tokenizer_config(directory)
    if file.is_file():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: must be UTF-8 text ({error.reason})") from error
    else:
        found = settings.get("chat_template") if path is None else None
        several = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else None
        named = {"default": found} if several is None else {each.get("name"): each.get("template") for each in several}
        text, file = named.get("default"), file if path is not None else directory / "tokenizer_config.json"
        if not isinstance(text, str):
            raise ValueError(f"{file}: has no chat template: name a Jinja file as the template")
    try:
        template = environment().from_string(text)
    except TemplateError as error:
        raise ValueError(f"{file}: must be a Jinja template ({error})") from error
    named = {name: token_name(token) for name, token in settings.items() if name.endswith("_token")}
    tokens = {name: token for name, token in named.items() if isinstance(token, str)}

    def render(messages: Sequence[Mapping[str, Any]], tools: Any, asks: bool = False) -> str:
        try:
            return template.render(messages=messages, tools=tools, add_generation_prompt=asks, **tokens)
        except Exception as error:  # a template can raise anything
            raise ValueError(f"the chat template cannot render it ({error})") from error

    return render


class Generation(Extension):
    """`{% generation %}`, by which some templates mark what is learned; here the control tokens tell."""

    tags = frozenset({"generation"})  # pyright: ignore[reportAssignmentType]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    extensions = [Generation, "jinja2.ext.loopcontrols"]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

    def refuse(message: str) -> str:
        raise TemplateError(message)

    made.filters["tojson"] = lambda value, ensure_ascii=False, **how: json.dumps(
        value, ensure_ascii=ensure_ascii, **how
    )
    made.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


def encode_chat(
    row: Mapping[str, Any], tokenizer: Tokenizer, render: Render, ends: Sequence[int], longest: int, control: bool
) -> Conversation:
    """The tokens of a row with `messages`, and perhaps `tools`. Raises ValueError for one that is none.

    What follows <|assistant|> is learned up to the token that ends the turn and this one too, if it is one of `ends`:
    in GLM's models that is the role of what comes next. Where nothing comes, it is put there. What the template writes
    by itself behind <|assistant|> is learned too, since the model, which is asked with this token, must write it.

    longest: how many tokens may predict another. Of a longer conversation the last turns are left out, until the rest
    fits and ends with an answer; if none does, the conversation is empty. control: what reads like a control token in
    a message is one; else only the template makes them.
    """
    messages, tools, mark = readied(row, tokenizer, control)

    def encode(turns: int) -> Conversation:
        ids = encode_rendered(render(messages[:turns], tools), tokenizer, mark)
        return with_labels(ids, tokenizer, ends, calls=bool(messages[turns - 1].get("tool_calls")))

    found = encode(len(messages))
    answers = [n for n, message in enumerate(messages, 1) if message["role"] == "assistant"]
    begun = np.flatnonzero(found.ids == tokenizer.control[ASSISTANT])
    if len(begun) == len(answers):  # those that begin too late, as long rows have many, need not be tried
        answers = [n for n, place in zip(answers, begun, strict=True) if place < longest]
    while answers and len(found.ids) > longest + 1:
        found = encode(answers.pop())
    return found if len(found.ids) <= longest + 1 and found.learned.any() else EMPTY


def encode_question(row: Mapping[str, Any], tokenizer: Tokenizer, render: Render, control: bool) -> np.ndarray:
    """The tokens behind which the next answer stands, of a row as `encode_chat` takes it, with its errors."""
    messages, tools, mark = readied(row, tokenizer, control)
    return encode_rendered(render(messages, tools, asks=True), tokenizer, mark)


def readied(row: Mapping[str, Any], tokenizer: Tokenizer, control: bool) -> tuple[Any, Any, str]:
    """Messages and tools, with a mark in what would read like a control token, which is to be taken out again."""
    messages, tools = checked(row)
    mark = "" if control else unused([messages, tools])
    messages, tools = broken([messages, tools], weak_places(frozenset(tokenizer.control)), mark)
    return messages, tools, mark


def checked(row: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], Any]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' must be a list of at least one message")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} must be an object with a role")
        content, calls = message.get("content"), message.get("tool_calls")
        if "content" not in message and not calls and "reasoning_content" not in message:
            raise ValueError(f"message {number} has no content, has {', '.join(sorted(map(str, message)))}")
        if not isinstance(content, str | list | None):
            raise ValueError(f"message {number}'s content is of type {type(content).__name__}, must be a text or parts")
        for part in content if isinstance(content, list) and message["role"] != "tool" else ():
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"message {number} has a part that is no text: {str(part)[:80]}")
        if not isinstance(calls, list | None):
            raise ValueError(f"message {number}'s tool_calls are of type {type(calls).__name__}, must be a list")
    if not isinstance(row.get("tools"), list | None):
        raise ValueError(f"'tools' is of type {type(row['tools']).__name__}, must be a list")
    found = [with_arguments(message) for message in messages], row.get("tools") or None
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a message has half a surrogate pair, must be Unicode text ({error.reason})") from error
    return found


def with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with the arguments of its calls as objects, which is what templates expect; some write JSON texts."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                read = json.loads(function["arguments"])
            except ValueError as error:
                raise ValueError(f"the arguments of a call must be an object, or JSON of one ({error})") from error
            function = {**function, "arguments": read}
            call = {**call, "function": function} if "function" in call else function
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else message


def unused(row: Any) -> str:
    """A character that a row does not have, neither as it is nor as JSON may escape it."""
    there = json.dumps(row, ensure_ascii=False)
    for char in map(chr, PRIVATE):
        if char not in there and escaped(char) not in there:
            return char
    raise ValueError("the row has all the characters from U+E000 to U+F8FF: it must leave one unused")


def escaped(char: str) -> str:
    return json.dumps(char)[1:-1]


def broken(value: Any, weak: re.Pattern[str], mark: str) -> Any:
    """The value, with the mark at the weak places of all of its strings."""
    if isinstance(value, str):
        return weak.sub(mark, value)
    if isinstance(value, dict):
        return {broken(key, weak, mark): broken(item, weak, mark) for key, item in value.items()}
    return [broken(item, weak, mark) for item in value] if isinstance(value, list) else value


@cache
def weak_places(names: frozenset[str]) -> re.Pattern[str]:
    """Where in a text a control token of these names could begin, or one could end that began in the text before it.

    A template may join texts, so only the first character counts, or the rest. Words, such as a role, stay whole.
    """
    tails = {name[n:] for name in names for n in range(1, len(name)) if re.search(r"\W", name[n:])}
    places = [rf"\A(?={re.escape(tail)})" for tail in sorted(tails)]
    for name in sorted(names):
        first, rest = re.escape(name[0]), re.escape(name[1:])
        places.append(f"(?<={first})" + (f"(?={rest})" if name[0].isalnum() else ""))
    return re.compile("|".join(dict.fromkeys(places)))


def encode_rendered(text: str, tokenizer: Tokenizer, mark: str) -> np.ndarray:
    """The ids of a rendered conversation: control tokens by name, and the text between them, without the marks."""

    def encode(texts: list[str]) -> list[np.ndarray]:
        marks = (mark, escaped(mark)) if mark else ()
        for each in marks:
            texts = [text.replace(each, "") for text in texts]
        return tokenizer.encode(texts)

    return with_control(replace(tokenizer, encode=encode)).encode([text])[0].astype(np.int64)


def with_labels(ids: np.ndarray, tokenizer: Tokenizer, ends: Sequence[int], calls: bool) -> Conversation:
    """Which of the ids are learned; with the end of an answer that nothing follows. calls: tools, in that answer."""
    if ASSISTANT not in tokenizer.control:
        raise ValueError(f"the tokenizer has no {ASSISTANT}, by which answers are found: it must be one of GLM's")
    assistant = tokenizer.control[ASSISTANT]
    borders = [*ends, *(tokenizer.control[role] for role in ROLES if role in tokenizer.control)]
    learned = np.zeros(len(ids), bool)
    places = [*np.flatnonzero(np.isin(ids, borders)).tolist(), len(ids)]
    for place, after in pairwise(places):
        if ids[place] == assistant:
            learned[place + 1 : after + (after < len(ids) and ids[after] in ends)] = True
    if len(places) > 1 and ids[places[-2]] == assistant:
        last = tokenizer.control.get(OBSERVATION if calls else USER, ends[0])
        ids = np.append(ids, last if last in ends else ends[0])
        learned = np.append(learned, True)
    return Conversation(ids, learned)
