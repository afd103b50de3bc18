"""The parameter tree as an `nn.Module`, for `torch.func.functional_call` and `torch.export`."""

from typing import Any

from torch import Tensor, nn

from .config import ModelConfig
from .model import forward, init_params
from .tree import leaves, unflatten


class Shell(nn.Module):
    """A module of meta tensors whose parameters are named by the flat keys; the numbers come with the call.

    `torch.func.functional_call(Shell(cfg), flatten(params), (tokens,), strict=True)` equals
    `forward(params, tokens, cfg)`; for `torch.export`, `shell.load_state_dict(flatten(params), assign=True)` first.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        for path, leaf in leaves(init_params(cfg, device="meta")):
            *parents, name = path.split(".")
            module: nn.Module = self
            for parent in parents:
                if parent not in module._modules:
                    module.add_module(parent, nn.Module())
                module = module.get_submodule(parent)
            module.register_parameter(name, nn.Parameter(leaf))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        params: dict[str, Any] = unflatten(dict(self.named_parameters()))
        return forward(params, tokens, self.cfg, positions, segments)
