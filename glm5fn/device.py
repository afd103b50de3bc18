"""The accelerator: which one is there, its process-group backend, its peak."""

import importlib.util
import time

import torch
import torch.nn.functional as F

from .typed import ConfigError

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}

# Dense matmul peak in FLOP/s by vendor data sheet, (bf16, fp32 without tensor cores), by a part of the device's name.
PEAKS = {
    "B200": (2.25e15, 75e12),
    "H200": (989e12, 67e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
}


def choose(name: str) -> str:
    """The device type for `--device`; auto takes npu, cuda or cpu, the first that is there."""
    if name == "npu" or (name == "auto" and importlib.util.find_spec("torch_npu") is not None):
        if importlib.util.find_spec("torch_npu") is None:
            raise ConfigError("device npu needs the torch_npu package: install the npu extra, or set --device cpu")
        importlib.import_module("torch_npu")  # it adds torch.npu
    there = ["cpu", *(kind for kind in ("cuda", "npu") if hasattr(torch, kind) and getattr(torch, kind).is_available())]
    if name == "auto":
        return there[-1]
    if name not in there:
        raise ConfigError(f"device ({name}) must be one that this machine has: {', '.join(there)}")
    return name


def synchronize(kind: str) -> None:
    """Wait for all that the device was given."""
    if kind != "cpu":
        getattr(torch, kind).synchronize()


def widest(kind: str) -> torch.dtype:
    """The dtype for sums that must not depend on their order: fp64 where the device has it."""
    return torch.float32 if kind == "npu" else torch.float64


def peak_flops(kind: str, dtype: torch.dtype) -> float | None:
    """Matmul FLOP/s that a device can reach: measured on a CPU, the vendor's figure on a known accelerator."""
    if kind != "cpu":
        name = getattr(torch, kind).get_device_name()
        found = [peaks for part, peaks in PEAKS.items() if part in name]
        return found[0][0 if dtype == torch.bfloat16 else 1] if found else None
    # Half precision may be slower than fp32 on a CPU, which then computes it in fp32.
    return max(matmul_rate(torch.float32), matmul_rate(dtype))


def matmul_rate(dtype: torch.dtype, size: int = 1024, tries: int = 4) -> float:
    """The best FLOP/s of a few x @ weight.T on the CPU."""
    x, weight, rates = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype), []
    for _ in range(tries):
        start = time.perf_counter()
        F.linear(x, weight)
        rates.append(2 * size**3 / (time.perf_counter() - start))
    return max(rates)
