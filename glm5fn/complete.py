"""`python -m glm5fn generate`: what a model writes behind a prompt, in a chat, or for each row of a file."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm
from tyro.conf import Positional, arg

from .chat import Render, encode_question, open_template
from .config import ModelConfig, read_json
from .converse import Asked, Encode, converse, show, textual
from .device import choose
from .generate import Row, refuse
from .inference import ONE, Device, Job, Precision, load_for, tokenizer_name
from .inference import refuse as refuse_model
from .mesh import rank, together
from .sampling import GREEDY, Sampling
from .settings import MeshConfig
from .sources import read_object
from .text import BYTES, Tokenizer, open_tokenizer
from .typed import ConfigError

GENERATION = "generation_config.json"


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
    tokenizer: str | None = None,
    template: str | None = None,
    control_tokens: bool = False,
    precision: Precision = "fp32",
    device: Device = "auto",
    mesh: MeshConfig = ONE,
) -> Job:
    """Continue a text (--prompt, or FILE), answer in a chat (--chat), or do so for each row of a file (--jsonl, --out).

    A text ends with a token of `eos_token_id`, of the model's generation_config.json, or of its config.json if that
    says nothing. Each row of --out is one of --jsonl with `completion`, `tokens` (how many), and `finish` (stop or
    length); rows that it has already are not done again.

    Args:
        file: a text to continue, or to answer with --chat
        model: a native or Hugging Face directory, or the checkpoint of a run
        prompt: a text to continue, or to answer with --chat
        chat: go through the model's chat template; without a text, a line of the input is a message
        jsonl: rows with a text, or with messages (and tools) to be answered
        out: where to write the rows; what is there stays
        field: what holds the text of a row
        batch: rows that are computed at once
        max_new_tokens: the most that a text may get
        drafts: how many tokens to draft at once by multi-token prediction; the text is the same, or as likely
        tokenizer: bytes, a tokenizer.json, or the directory of one; by default the model's, or bytes
        template: the Jinja template of chats, if it is not beside the tokenizer
        control_tokens: what reads like a control token in a text is one
        precision: of the computation
        device: where it runs
        mesh: the ranks that it runs on
    """
    if sum(given is not None for given in (file, prompt, jsonl)) + (chat and not (file or prompt or jsonl)) != 1:
        raise ConfigError("one of --prompt, FILE, --jsonl and --chat must be set: what is to be continued")
    if bool(jsonl) != bool(out):
        raise ConfigError("--out must be set with --jsonl, and only with it: where the rows are written")
    if batch < 1:
        raise ConfigError(f"--batch ({batch}) must be at least 1")
    cfg, kind = refuse_model(model, mesh, tokenizer), choose(device)
    refuse([], cfg, max_new_tokens, sampling, drafts)
    named = tokenizer_name(model, tokenizer)
    try:
        text = file.read_text(encoding="utf-8") if file is not None else prompt
        rows = [] if jsonl is None else read_rows(jsonl)
        render = open_template(named, template) if chat or any("messages" in row for row in rows) else None
        encode = partial(ids_of, open_tokenizer(named, None, control_tokens), render, field, control_tokens)
        prompts = [encode_row(encode, f"{jsonl}:{number}", row) for number, row in enumerate(rows, 1)]
        if text is not None:
            prompts = [encode_row(encode, "the prompt", message(text) if chat else {field: text})]
        refuse(prompts, cfg, max_new_tokens, sampling, drafts)
        done = 0 if out is None else written(out, rows)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error

    def work() -> None:
        loaded = load_for(model, mesh=mesh, device=kind, precision=precision, tokenizer=tokenizer, mtp=drafts > 0)
        asked = Asked(loaded, max_new_tokens, stops_of(model, cfg, loaded.tokenizer), sampling, drafts)
        if out is not None:
            complete_rows(asked, rows, prompts, batch, done, out)
        elif prompts:
            show(asked, prompts[0])
        else:
            converse(asked, encode)

    return Job(mesh, kind, work)


def stops_of(path: Path, cfg: ModelConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: those of generation_config.json, else those of config.json; bytes have their own."""
    if tokenizer is BYTES:
        return frozenset([BYTES.end] if BYTES.end is not None else [])
    found = read_json(path / GENERATION).get("eos_token_id") if (path / GENERATION).is_file() else None
    found = cfg.eos_token_id if found is None else (found,) if isinstance(found, int) else found
    if not all(isinstance(end, int) and 0 <= end < cfg.vocab_size for end in found):
        raise ValueError(f"{path / GENERATION}: eos_token_id ({found}) must be ids below vocab_size ({cfg.vocab_size})")
    return frozenset(found)


def message(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def ids_of(tokenizer: Tokenizer, render: Render | None, field: str, control: bool, row: Mapping[str, Any]) -> list[int]:
    """The tokens behind which a row is to be continued. Raises ValueError for one that cannot be."""
    if "messages" in row:
        assert render is not None
        return encode_question(row, tokenizer, render, control).tolist()
    if not isinstance(row.get(field), str):
        raise ValueError(f"must have messages, or a text in {field!r}, has {', '.join(sorted(map(str, row)))}")
    return tokenizer.encode([row[field]])[0].tolist()


def encode_row(encode: Encode, name: str, row: Mapping[str, Any]) -> list[int]:
    try:
        return encode(row)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file. Raises ValueError that names its line for one that is none."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            rows.append(read_object(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    if not rows:
        raise ValueError(f"{path}: is empty: must have a row")
    return rows


def written(out: Path, rows: Sequence[Mapping[str, Any]]) -> int:
    """How many rows stand in the file already. Raises ValueError if they are of others."""
    if not out.exists():
        return 0
    lines = out.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        mine = rows[number] if number < len(rows) else {}
        if not isinstance(row, dict) or not mine or any(row.get(name) != value for name, value in mine.items()):
            raise ValueError(f"{out}:{number + 1}: is not of a row of --jsonl: name another --out")
    return len(lines)


def complete_rows(
    asked: Asked,
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[Sequence[int]],
    batch: int,
    done: int,
    out: Path,
) -> None:
    """Write the rows that are not there yet, batch by batch."""
    with ExitStack() as stack:
        file = together(lambda: stack.enter_context(opened(out)) if rank() == 0 else None)
        bar = stack.enter_context(tqdm(total=len(rows), initial=done, unit="row", disable=None if file else True))
        for start in range(done, len(rows), batch):
            *_, found = asked.rounds(prompts[start : start + batch], start)
            lines = [line(row, each, asked) for row, each in zip(rows[start:], found, strict=False)]
            together(lambda lines=lines: put(file, lines) if file else None)
            bar.update(len(lines))


def opened(out: Path) -> Any:
    """The file, at the end of its last whole line."""
    out.touch()
    file = out.open("r+b")
    whole = out.read_bytes().rpartition(b"\n")
    file.truncate(len(whole[0]) + len(whole[1]))
    file.seek(0, 2)
    return file


def put(file: Any, lines: Sequence[bytes]) -> None:
    file.write(b"".join(lines))
    file.flush()


def line(row: Mapping[str, Any], found: Row, asked: Asked) -> bytes:
    text = asked.loaded.tokenizer.decode(textual(found.ids, asked.stops))
    made = {**row, "completion": text, "tokens": len(found.ids), "finish": found.finish}
    return json.dumps(made, ensure_ascii=False).encode() + b"\n"
