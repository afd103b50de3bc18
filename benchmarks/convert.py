"""How fast convert.py is against `cp`, and how little memory it takes: `python benchmarks/convert.py --gib 6`.

Turn by turn, both ways: a copy of the files by cp and sync, then the conversion, which reads, checks and syncs too.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import tyro

from glm5fn.config import ModelConfig
from glm5fn.model import model_specs
from glm5fn.save import save_hf
from glm5fn.spec import Param, count, shape
from glm5fn.tree import tree_map

ROOT = Path(__file__).parent.parent
LAYER = ModelConfig(
    model_type="glm_moe_dsa",
    attention="mla",
    vocab_size=65536,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=1,
    num_attention_heads=16,
    q_lora_rank=768,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_topk=2048,
    index_n_heads=16,
    index_head_dim=128,
    n_routed_experts=32,
    num_experts_per_tok=8,
    n_shared_experts=1,
    moe_intermediate_size=1408,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    gib: float = 6.0  # the size of the checkpoint
    rounds: int = 3
    directory: Path | None = None  # where the files go; the system's temporary directory when none


@dataclass(frozen=True)
class Absent:
    """A parameter that is made of random bits when it is asked for."""

    row: Param
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.row.dtype(torch.bfloat16)

    def make(self) -> torch.Tensor:
        bits = torch.randint(-(2**15), 2**15, self.shape, dtype=torch.int16)
        return bits.view(torch.bfloat16).to(self.dtype)


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds, and the peak of resident memory in GiB."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return time.perf_counter() - begin, usage.ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)


def main(options: Options) -> None:
    size = [2 * count(model_specs(replace(LAYER, num_hidden_layers=n)), LAYER.dims) / 2**30 for n in (1, 2)]
    cfg = replace(LAYER, num_hidden_layers=1 + round((options.gib - size[0]) / (size[1] - size[0])))

    with TemporaryDirectory(dir=options.directory) as place:
        hf, native, copy, again = (Path(place) / name for name in ("hf", "native", "copy", "again"))
        empty = tree_map(lambda row: Absent(row, shape(row, cfg.dims)), model_specs(cfg))
        written = save_hf(hf, empty, cfg, gather=Absent.make)
        subprocess.run([sys.executable, "convert.py", "hf-to-native", hf, native], cwd=ROOT, check=True)
        print(f"{written.bytes / 2**30:.2f} GiB, {written.tensors:,} tensors")
        for source, command in ((hf, "hf-to-native"), (native, "native-to-hf")):
            took: dict[str, list[float]] = {"cp": [], command: []}
            peak = 0.0
            for _ in range(options.rounds):
                seconds, _ = timed(["sh", "-c", f"cp -r --reflink=never {source} {copy} && sync -f {copy}/*"])
                took["cp"].append(seconds)
                shutil.rmtree(copy)
                seconds, gib = timed([sys.executable, "convert.py", command, str(source), str(again)])
                took[command].append(seconds)
                peak = max(peak, gib)
                shutil.rmtree(again)
            one, other = median(took["cp"]), median(took[command])
            speed = f"{other:.1f} s, cp and sync {one:.1f} s, {one / other:.2f} of its speed"
            print(f"{command}: {speed}, peak {peak:.2f} GiB")


if __name__ == "__main__":
    main(tyro.cli(Options))
