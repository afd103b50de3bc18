"""GLM models in functional, pure PyTorch: nested dicts of tensors, and pure functions over them.

The letters of shapes, in einsum strings and annotations alike: b batch, s query position, t key position, d embed,
h query head, n key and value head, k query and key dim, u value dim, r rotated pair (of keys: dim), q query rank, c
latent rank, e latent with its rotated dims (of experts: expert), i index head, j index dim, g selected key, a chosen
expert, f ffn hidden, v vocab.
"""

from .config import ModelConfig
from .dsa import attn_dsa
from .ffn import mlp
from .gqa import attn_gqa
from .grad import value_and_grad
from .hf import load
from .losses import loss
from .mla import attn_mla
from .model import forward, init_params, model_specs
from .moe import moe
from .mtp import forward_mtp
from .save import save, save_hf
from .shell import Shell
from .tree import flatten, unflatten
from .typed import ConfigError

__all__ = [
    "ConfigError",
    "ModelConfig",
    "Shell",
    "attn_dsa",
    "attn_gqa",
    "attn_mla",
    "flatten",
    "forward",
    "forward_mtp",
    "init_params",
    "load",
    "loss",
    "mlp",
    "model_specs",
    "moe",
    "save",
    "save_hf",
    "unflatten",
    "value_and_grad",
]
