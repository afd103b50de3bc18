"""The dense feed-forward block."""

from collections.abc import Mapping

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from .config import ModelConfig
from .kernels import TORCH, Kernels
from .spec import Param


def mlp_specs(cfg: ModelConfig) -> dict[str, Param]:
    if cfg.fused_gate_up:
        gate_up = Param("(pair ffn) embed", fan_in="embed", hf="{layer}.mlp.gate_up_proj.weight")
    else:
        keys = ("{layer}.mlp.gate_proj.weight", "{layer}.mlp.up_proj.weight")
        gate_up = Param("pair ffn embed", fan_in="embed", hf=keys)
    return {
        "gate_up": gate_up,
        "down": Param("embed ffn", fan_in="ffn", hf="{layer}.mlp.down_proj.weight"),
    }


def mlp(params: Mapping[str, Tensor], x: Float[Tensor, "b s d"], *, kernels: Kernels = TORCH) -> Float[Tensor, "b s d"]:
    """SwiGLU: down(silu(gate x) * up x). params: gate_up [2, f, d], gate first, and down [d, f]."""
    gate_up = kernels.linear(x, rearrange(params["gate_up"], "pair f d -> (pair f) d"))
    return kernels.linear(kernels.swiglu(gate_up), params["down"])
