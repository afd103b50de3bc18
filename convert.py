"""Convert model directories: `python convert.py hf-to-native SRC DST`, `native-to-hf SRC DST`, `inspect DIR`."""

import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import torch
from tqdm import tqdm
from tyro.conf import Positional, arg
from tyro.extras import subcommand_cli_from_dict

from glm5fn.describe import checksum, describe
from glm5fn.files import report
from glm5fn.hf import open_model, survey, verify
from glm5fn.record import tell
from glm5fn.save import Form, write_model
from glm5fn.stored import Kind, differing_copies

Dtype = Literal["float32", "bfloat16", "float16"]
ShardSize = Annotated[str, arg(metavar="SIZE", help="the most that a file takes, such as 5GB or 500MB")]
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def hf_to_native(
    src: Positional[Path],
    dst: Positional[Path],
    /,
    dtype: Dtype | None = None,
    shard_size: ShardSize = "5GB",
    force: bool = False,
) -> int:
    """Make a native directory of a Hugging Face one: GLM-5, 4.5, 4-0414, Z1, GLM-4-9B, also under ChatGLM's names.

    Args:
        src: the directory that is read: bf16, fp32, fp16 or FP8 by blocks, which becomes bfloat16.
        dst: the directory that is written.
        dtype: cast to it what may be cast, to the nearest, ties to even; as it is stored when none.
        force: write over a model that is there.
    """
    return convert(src, dst, ("Hugging Face", "ChatGLM"), Form(native=True, dtype=named(dtype)), shard_size, force)


def native_to_hf(
    src: Positional[Path],
    dst: Positional[Path],
    /,
    dtype: Dtype | None = None,
    fp8: bool = False,
    shard_size: ShardSize = "5GB",
    force: bool = False,
) -> int:
    """Make a Hugging Face directory, for transformers, vLLM and SGLang, of a native one.

    Args:
        src: the directory that is read.
        dst: the directory that is written.
        dtype: cast to it what may be cast, to the nearest, ties to even; as it is stored when none.
        fp8: write matrices in FP8 by blocks of 128 x 128, as GLM-5 is published, and the others in bfloat16.
        force: write over a model that is there.
    """
    return convert(src, dst, ("native",), Form(native=False, dtype=named(dtype), fp8=fp8), shard_size, force)


def inspect(path: Positional[Path], /, verify: bool = False) -> int:
    """Tell what a directory holds, and what is wrong with it, without reading its tensors.

    Args:
        path: a native or a Hugging Face directory.
        verify: read all, and tell the checksum.
    """
    seen = survey(path)
    print(describe(seen))
    if seen.faults:
        return 1
    if verify:
        if differing := differing_copies(seen.files, seen.spare):
            raise ValueError(report(path, differing))
        print(f"checksum {checksum(seen, bar)}")
    return 0


def convert(src: Path, dst: Path, kinds: tuple[Kind, ...], form: Form, shard_size: str, force: bool) -> int:
    if src.resolve().is_relative_to(dst.resolve()):
        raise ValueError(f"{dst} would take the place of {src}, which is read: name another place")
    if dst.exists() and not force:
        raise ValueError(f"{dst} exists already: set --force to write over it, or name another place")
    shard_bytes = parse_bytes(shard_size)
    kind = survey(src).kind
    if kind not in kinds:
        raise ValueError(f"{src} is a {kind} directory, must be {' or '.join(kinds)}: use the other command")
    verify(src)
    cfg, params = open_model(src)
    begin = time.perf_counter()
    written = write_model(
        dst,
        params,
        cfg,
        form,
        force,
        shard_bytes=shard_bytes,
        beside=src,
        workers=os.cpu_count() or 1,
        progress=bar,
    )
    seconds = time.perf_counter() - begin
    print(
        f"{dst}: {written.tensors:,} tensors, {written.parameters:,} parameters, {written.bytes:,} bytes in "
        f"{seconds:.1f} s ({written.bytes / seconds / 1e6:,.0f} MB/s), checksum {written.checksum}"
    )
    return 0


def named(dtype: Dtype | None) -> torch.dtype | None:
    return dtype and getattr(torch, dtype)


def parse_bytes(text: str) -> int:
    """A number of bytes with its unit.

    >>> parse_bytes("5GB"), parse_bytes("1.5 MiB")
    (5000000000, 1572864)
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*((?:[KMGT]i?)?)B?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise ValueError(
            f"--shard-size {text} must be a number with a unit, such as 5GB or 500MB, of at least one byte"
        )
    return size


@contextmanager
def bar(total: int) -> Iterator[Callable[[int], object]]:
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, leave=False) as shown:
        yield shown.update


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 2 a command line that is none, 1 anything else; then nothing was changed."""
    torch.set_num_threads(1)  # several parameters are worked on at once instead
    commands = {"hf-to-native": hf_to_native, "native-to-hf": native_to_hf, "inspect": inspect}
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: tell(f"notice: {message}")
        try:
            return subcommand_cli_from_dict(commands, prog="convert.py", description=__doc__, args=argv)
        except (ValueError, OSError, RuntimeError) as error:
            print(f"convert.py: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("convert.py: interrupted, nothing was written", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
