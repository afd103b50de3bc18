"""GLM models in functional, pure PyTorch: nested dicts of tensors, and pure functions over them.

The letters of shapes, in einsum strings and annotations alike: b batch, s query position, t key position, d embed,
h query head, n key and value head, k query and key dim, u value dim, r rotated pair, f ffn hidden, v vocab.
"""

from .config import ConfigError, ModelConfig
from .ffn import mlp
from .gqa import attn_gqa
from .grad import value_and_grad
from .hf import load, save, save_hf
from .losses import loss
from .model import forward, init_params, model_specs
from .shell import Shell
from .tree import flatten, unflatten

__all__ = [
    "ConfigError",
    "ModelConfig",
    "Shell",
    "attn_gqa",
    "flatten",
    "forward",
    "init_params",
    "load",
    "loss",
    "mlp",
    "model_specs",
    "save",
    "save_hf",
    "unflatten",
    "value_and_grad",
]
