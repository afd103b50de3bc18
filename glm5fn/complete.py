"""`python -m glm5fn generate`: what a model writes behind a prompt, in a chat, or for each row of a file."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from tqdm import tqdm
from tyro.conf import Positional, arg

from .chat import Render, encode_question, open_template
from .config import ModelConfig, read_json
from .converse import Encode, Writer, converse, show
from .corpora import tokenizer_for
from .device import choose
from .directory import refuse_file
from .generate import Row, refuse
from .inference import ONE, Device, Job, Precision, load_for, tokenizer_name
from .inference import refuse as refuse_model
from .mesh import gather, rank, together
from .sampling import GREEDY, Sampling
from .settings import DataConfig, MeshConfig
from .sources import LINES, placed_rows, read_object
from .text import BYTES, Tokenizer
from .typed import ConfigError

GENERATION = "generation_config.json"
MADE = "generated"  # what is added to a row


def complete(
    file: Annotated[Positional[Path | None], arg(metavar="FILE")] = None,
    *,
    model: Path,
    prompt: str | None = None,
    chat: bool = False,
    jsonl: Annotated[Path | None, arg(metavar="FILE.jsonl")] = None,
    out: Annotated[Path | None, arg(metavar="FILE.jsonl")] = None,
    field: str = "prompt",
    batch: int = 8,
    max_new_tokens: int = 256,
    sampling: Annotated[Sampling, arg(name="")] = GREEDY,
    drafts: int = 0,
    compile: bool = False,
    tokenizer: str | None = None,
    template: str | None = None,
    control_tokens: bool = False,
    precision: Precision = "fp32",
    device: Device = "auto",
    mesh: MeshConfig = ONE,
) -> Job:
    """Continue a text (--prompt, or FILE), answer in a chat (--chat), or do so for each row of a file (--jsonl, --out).

    A text ends with a token of `eos_token_id`, of the model's generation_config.json, or of its config.json if that
    says nothing. Each row of --out is one of --jsonl with `generated`: its `text`, `tokens` (how many), and `finish`
    (stop or length); rows that are there already are not done again.

    Args:
        file: a text to continue, or to answer with --chat
        model: a native or Hugging Face directory, or the checkpoint of a run
        prompt: a text to continue, or to answer with --chat
        chat: a text is a message, which goes through the chat template; without one, a line of the input is
        jsonl: rows with a text, or with messages (and tools) to be answered
        out: where to write the rows; what is there stays
        field: what holds the text of a row
        batch: rows that are computed at once
        max_new_tokens: the most that a text may get
        drafts: how many tokens to draft at once by multi-token prediction; the text is the same, or as likely
        compile: compile the layers, which then take less time for a token: pays where minutes are spent on writing
        tokenizer: bytes, a tokenizer.json, or the directory of one; by default the model's, or bytes
        template: the Jinja template of chats, if it is not beside the tokenizer
        control_tokens: what reads like a control token in a text is one
        precision: of the computation
        device: where it runs
        mesh: the ranks that it runs on
    """
    texts = sum(given is not None for given in (file, prompt, jsonl))
    if texts > 1 or not (texts or chat):
        raise ConfigError("one of --prompt, FILE, --jsonl and --chat must be set: what is to be continued")
    if (jsonl is None) != (out is None):
        raise ConfigError("--out must be set with --jsonl, and only with it: where the rows are written")
    if batch < 1:
        raise ConfigError(f"--batch ({batch}) must be at least 1")
    if compile and drafts:
        raise ConfigError(f"--compile and --drafts ({drafts}) exclude each other: only steps of one token are compiled")
    cfg, kind = refuse_model(model, mesh, tokenizer), choose(device)
    refuse([], cfg, max_new_tokens, sampling, drafts)
    named = tokenizer_name(model, tokenizer)
    try:
        own = tokenizer_for(DataConfig(tokenizer=named, control_tokens=control_tokens), cfg)
        stops = stops_of(model, cfg, own)
        rows = [] if jsonl is None else read_file(jsonl)
        render = open_template(named, template) if chat or any("messages" in row for _, row in rows) else None
        encode = partial(ids_of, own, render, field, chat, control_tokens)
        given = [("the prompt", {field: prompt})] if file is None else [(str(file), {field: read_text(file)})]
        given = rows if jsonl is not None else given if texts else []
        prompts = [encode_row(encode, *row) for row in given]
        refuse(prompts, cfg, max_new_tokens, sampling, drafts)
        done = 0
        if out is not None:
            refuse_file(out, "--out")
            done = written(out, rows)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error

    def work() -> None:
        how = {"precision": precision, "tokenizer": tokenizer, "mtp": drafts > 0, "compile": compile}
        loaded = load_for(model, mesh=mesh, device=kind, **how)
        writer = Writer(loaded, max_new_tokens, stops, sampling, drafts)
        if out is not None:
            complete_rows(writer, rows, prompts, batch, gather(done)[0], out)
        elif prompts:
            show(writer, prompts[0])
        else:
            converse(writer, encode)

    return Job(mesh, kind, work)


def stops_of(path: Path, cfg: ModelConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: those of generation_config.json, else those of config.json; bytes have their own."""
    if tokenizer is BYTES:
        return frozenset([BYTES.end] if BYTES.end is not None else [])
    found = read_json(path / GENERATION).get("eos_token_id") if (path / GENERATION).is_file() else None
    ends = cfg.eos_token_id if found is None else found if isinstance(found, list) else [found]
    if not all(type(end) is int and 0 <= end < cfg.vocab_size for end in ends):
        raise ValueError(f"{path / GENERATION}: eos_token_id ({found}) must be ids below vocab_size ({cfg.vocab_size})")
    return frozenset(ends)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be UTF-8 text ({error.reason})") from error


def message(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def ids_of(
    tokenizer: Tokenizer, render: Render | None, field: str, chat: bool, control: bool, row: Mapping[str, Any]
) -> list[int]:
    """The tokens behind which a row is to be continued. Raises ValueError for one that cannot be."""
    if "messages" not in row and not isinstance(row.get(field), str):
        raise ValueError(f"must have messages, or a text in {field!r}, has {', '.join(sorted(map(str, row)))}")
    if "messages" in row or chat:
        assert render is not None
        return encode_question(row if "messages" in row else message(row[field]), tokenizer, render, control).tolist()
    return tokenizer.encode([row[field]])[0].tolist()


def encode_row(encode: Encode, name: str, row: Mapping[str, Any]) -> list[int]:
    try:
        return encode(row)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


# --- files of rows ---

Named = tuple[str, dict[str, Any]]  # the file and the line of a row, and the row


def read_file(path: Path) -> list[Named]:
    """The rows of a file. Raises ValueError that names the line of one that cannot be read, or not be written again."""
    if not path.name.endswith(LINES):
        raise ValueError(f"{path}: must be in one of {', '.join(LINES)}")
    rows = list(placed_rows(path, read_row))
    if not rows:
        raise ValueError(f"{path}: is empty: must have a row")
    return rows


def read_row(line: bytes) -> dict[str, Any]:
    row = read_object(line)
    if MADE in row:
        raise ValueError(f"the object has {MADE!r}, which is where the text is to be written: call it otherwise")
    encoded(row)
    return row


def encoded(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the object has half a surrogate pair, must be Unicode text ({error.reason})") from error


def written(out: Path, rows: Sequence[Named]) -> int:
    """How many rows stand in the file already, perhaps with a part of one more. Raises ValueError for anything else."""
    *lines, rest = out.read_bytes().split(b"\n") if out.exists() else [b""]
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
            row.pop(MADE)
            own = number < len(rows) and encoded(row) == encoded(rows[number][1])
        except (ValueError, AttributeError, KeyError):
            own = False
        if not own:
            raise ValueError(f"{out}:{number + 1}: is not of a row of --jsonl: name another --out")
    begun = encoded(rows[len(lines)][1])[:-1] if len(lines) < len(rows) else b""
    if rest[: len(begun)] != begun[: len(rest)] or (rest and not begun):
        raise ValueError(f"{out}:{len(lines) + 1}: is not of a row of --jsonl: name another --out")
    return len(lines)


def complete_rows(
    writer: Writer, rows: Sequence[Named], prompts: Sequence[Sequence[int]], batch: int, done: int, out: Path
) -> None:
    """Write the rows that are not there yet, batch by batch."""
    with ExitStack() as stack:
        file = together(lambda: stack.enter_context(opened(out)) if rank() == 0 else None)
        bar = stack.enter_context(tqdm(total=len(rows), initial=done, unit="row", disable=None if file else True))
        for start in range(done, len(rows), batch):
            *_, found = writer.rounds(prompts[start : start + batch], start)
            lines = [line_of(row, each, writer) for (_, row), each in zip(rows[start:], found, strict=False)]
            together(lambda lines=lines: put(file, lines) if file else None)
            bar.update(len(lines))


def opened(out: Path) -> BinaryIO:
    """The file, at the end of its last whole line."""
    out.touch()
    file = out.open("r+b")
    file.truncate(out.read_bytes().rfind(b"\n") + 1)
    file.seek(0, 2)
    return file


def put(file: BinaryIO, lines: Sequence[bytes]) -> None:
    try:
        file.write(b"".join(lines))
        file.flush()
    except OSError as error:
        raise OSError(
            f"{file.name}: cannot be written to ({error}): the same call goes on with what is there"
        ) from error


def line_of(row: Mapping[str, Any], found: Row, writer: Writer) -> bytes:
    text = writer.text_of(found)
    return encoded({**row, MADE: {"text": text, "tokens": len(found.tokens), "finish": found.finish}}) + b"\n"
