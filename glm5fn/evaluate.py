"""`python -m glm5fn evaluate`: how well a model predicts documents, and how often it answers questions rightly."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from . import mmlu, perplexity
from .device import choose
from .directory import refuse_file
from .inference import ONE, Device, Job, Precision, load_for, refuse, tokenizer_name
from .mesh import rank, together
from .perplexity import Packing
from .settings import DataConfig, MeshConfig
from .typed import ConfigError


def evaluate(
    *,
    model: Path,
    data: Annotated[tuple[Path, ...], arg(metavar="FILE...")] = (),
    task: Literal["mmlu"] | None = None,
    path: Path | None = None,
    shots: int = 5,
    out: Annotated[Path | None, arg(metavar="FILE.json")] = None,
    tokenizer: str | None = None,
    seq_len: int | None = None,
    packing: Packing = "best-fit",
    batch: int = 8,
    precision: Precision = "fp32",
    device: Device = "auto",
    mesh: MeshConfig = ONE,
    field: str = "text",
    skip_bad: bool = False,
) -> Job:
    """Measure a model: on the documents of --data, or on the questions of --task at --path. It changes no file.

    Of documents it tells the nats that a token costs, their exponential (perplexity), and bits per byte. Every token
    but the first of its document is predicted once, the end of the document too. The bytes are all those of the
    documents' text in UTF-8, so the end has none, and the first token's count though nothing predicts it. Shards hold
    no text: they have no bits per byte.

    Args:
        model: a native or Hugging Face directory, or the checkpoint of a run
        data: .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .txt files, or token shards
        task: what to measure instead of documents
        path: the files of the task
        shots: how many answered questions come before each question of the task
        out: where to write the figures as JSON
        tokenizer: bytes, a tokenizer.json, or the directory of one; by default the model's, or bytes
        seq_len: tokens of a window; a longer document is cut. By default 4096, or fewer if the model has not as many
        packing: best-fit puts several documents in a row, where none sees another; none gives each piece its own
        batch: rows of a forward pass
        precision: of the computation
        device: where it runs
        mesh: the ranks that it runs on
        field: what holds the text of a row
        skip_bad: leave out rows that cannot be read, and tell how many, instead of stopping at the first
    """
    if bool(data) == bool(task):
        raise ConfigError("one of --data and --task must be set: documents to predict, or a task and its --path")
    if bool(task) != bool(path):
        raise ConfigError("--path must be set with --task, and only with it: the files of the task")
    if batch < 1 or shots < 0:
        raise ConfigError(f"--batch ({batch}) must be at least 1, and --shots ({shots}) 0")
    cfg, kind = refuse(model, mesh, tokenizer), choose(device)
    limit = cfg.max_position_embeddings
    seq_len = min(4096, limit) if seq_len is None else seq_len
    if not 1 <= seq_len <= limit:
        raise ConfigError(f"--seq-len ({seq_len}) must be from 1 to the model's max_position_embeddings ({limit})")
    named = tokenizer_name(model, tokenizer)
    texts = DataConfig(
        path=tuple(map(str, data)),
        field=field,
        tokenizer=named,
        skip_bad=skip_bad,
        seq_len=seq_len,
    )
    try:
        if path is None:
            perplexity.refuse(texts, cfg)
            measure = partial(perplexity.measure, cfg=texts, packing=packing, batch=batch)
        else:
            mmlu.refuse(path, shots)
            measure = partial(mmlu.measure, path=path, shots=shots, batch=batch)
        if out is not None:
            refuse_file(out, "--out")
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error

    def work() -> None:
        loaded = load_for(model, mesh=mesh, device=kind, precision=precision, tokenizer=tokenizer)
        table, figures = measure(loaded)
        figures = {"model": str(model), "tokenizer": named, "precision": precision} | figures
        together(lambda: report(table, figures, out) if rank() == 0 else None)

    return Job(mesh, kind, work)


def report(table: str, figures: Mapping[str, Any], out: Path | None) -> None:
    print(table, flush=True)
    if out is not None:
        out.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        print(f"written to {out}", flush=True)
