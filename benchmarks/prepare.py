"""Time `python -m glm5fn prepare` against the tokenizer library alone: `python benchmarks/prepare.py`.

Makes a jsonl of that size from the text that ships with Python, and a byte-pair tokenizer. The library encodes the same
texts in batches on all cores, from memory and to nowhere. Prints the seconds of each, in turns, and, last, a JSON line.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import tokenizers
import tyro
from tokenizers import models, pre_tokenizers, trainers

ROOT = Path(__file__).parent.parent
END = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class Options:
    mib: int = 1024  # of jsonl
    rounds: int = 1
    vocab: int = 8000
    workers: int = os.cpu_count() or 1
    place: Path | None = None  # for the files; a temporary directory by default


def texts() -> Iterator[str]:
    """Python's help pages over and over, each time by another number."""
    for number, name in enumerate(cycle(sorted(topics))):
        yield f"{number}: {topics[name]}"


def make(options: Options, root: Path) -> tuple[Path, Path]:
    """(the rows, the tokenizer)."""
    own = tokenizers.Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    settings = {"vocab_size": options.vocab, "special_tokens": [END], "initial_alphabet": alphabet}
    own.train_from_iterator(topics.values(), trainers.BpeTrainer(show_progress=False, **settings))
    own.save(str(root / "tokenizer.json"))
    left = options.mib << 20
    with (root / "rows.jsonl").open("wb") as file:
        for text in texts():
            left -= file.write(json.dumps({"text": text}).encode() + b"\n")
            if left <= 0:
                return root / "rows.jsonl", root / "tokenizer.json"
    raise AssertionError


def library(rows: Path, tokenizer: Path) -> tuple[float, int]:
    """(seconds that it encodes, tokens), of texts that were read and parsed before each batch."""
    own, seconds, count = tokenizers.Tokenizer.from_file(str(tokenizer)), 0.0, 0
    with rows.open("rb") as file:
        while batch := [json.loads(line)["text"] for line in islice(file, 1024)]:
            began = time.perf_counter()
            found = own.encode_batch_fast(batch, add_special_tokens=False)
            seconds += time.perf_counter() - began
            count += sum(len(each.ids) + 1 for each in found)  # and the end of each document
    return seconds, count


def resident(process: int) -> int:
    """The bytes that a process and all that it started hold, of shared pages each its share."""
    total = 0
    parents = {int(e.name): parent(e) for e in Path("/proc").glob("[0-9]*")}
    family = {process}
    while more := {child for child, of in parents.items() if of in family} - family:
        family |= more
    for member in family:
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def ours(rows: Path, tokenizer: Path, out: Path, workers: int) -> tuple[float, int, int]:
    """(seconds, tokens, the most bytes that all of its processes held at once)."""
    shutil.rmtree(out, ignore_errors=True)
    argv = [str(rows), "--out", str(out), "--tokenizer", str(tokenizer), "--end", END, "--workers", str(workers)]
    began, most = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "-m", "glm5fn", "prepare", *argv], cwd=ROOT)
    while process.poll() is None:
        most = max(most, resident(process.pid))
        time.sleep(0.5)
    if process.returncode:
        raise SystemExit(process.returncode)
    seconds = time.perf_counter() - began
    return seconds, json.loads((out / "prepared.json").read_text())["tokens"], most


def main(options: Options) -> int:
    with tempfile.TemporaryDirectory(dir=options.place) as root:
        rows, tokenizer = make(options, Path(root))
        found: dict[str, list[float]] = {"library": [], "prepare": []}
        most = 0
        for _ in range(options.rounds):
            seconds, count = library(rows, tokenizer)
            found["library"].append(seconds)
            seconds, tokens, held = ours(rows, tokenizer, Path(root) / "out", options.workers)
            found["prepare"].append(seconds)
            most = max(most, held)
            assert tokens == count, (tokens, count)
    rate = {name: options.mib / median(seconds) for name, seconds in found.items()}
    speed = rate["prepare"] / rate["library"]
    for name, value in rate.items():
        print(f"{name:8}{median(found[name]):9.1f} s{value:9.2f} MiB/s")
    print(f"{speed:.3f} of the library's speed, at most {most / 2**20:.0f} MiB resident, {count:,} tokens")
    print(json.dumps({**asdict(options), "place": None, **found, "speed": speed, "resident_mib": most / 2**20}))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
