"""Model directories, native and Hugging Face: both hold the same numbers, keyed by path or by the rows' HF keys.

A native directory has `"format": "glm5fn"` in its config.json. Nothing is transposed on the way in or out: joined
dims are viewed as one, and a row with several keys is stacked from them, so a round trip keeps every bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from warnings import warn

import torch

from . import legacy, settings
from .config import ModelConfig, read_json
from .files import FORMAT, Rows, TensorFiles, contract, dtype_name, report, survey_directory
from .fp8 import E4M3, METHOD, SCALE
from .model import model_specs
from .settings import CONFIG
from .stored import Kind, Source, Stored, copies, differing_copies, sources, without_absent_mtp
from .stores import STATE, Tensors, altered, open_item, prints_in
from .tree import tree_map, unflatten

# What older checkpoints hold although it follows from the config.
BUFFERS = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a model's directory holds, by its config.json and the headers of its files.

    files: the tensors that can be read. found: all tensors, those without a readable file as None. served: those that
    serve each parameter, by path.
    spare: copies that need not be there, each with the one whose equal it must be. faults: why it cannot be used.
    notices: what a user should know of a directory that can.
    """

    directory: Path
    kind: Kind
    cfg: ModelConfig
    files: Tensors
    found: Rows
    served: Mapping[str, Source]
    spare: Mapping[str, str]
    faults: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def stored(self) -> dict[str, Stored]:
        """The parameters by path, in the model's order; of a directory without faults."""
        return {path: Stored(self.files, source) for path, source in self.served.items()}


def survey(path: str | Path, cfg: ModelConfig | None = None) -> Survey:
    """Look at a directory, or at the checkpoint of a run, without reading a tensor.

    cfg: the model that it must hold, instead of the one of its config.json.
    Raises ConfigError for the config, and ValueError if there are no tensor files.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path}: is {'a file' if path.exists() else 'not there'}, must be a model's directory")
    if (path / STATE).is_file():
        config, kind, promised = {}, "native", cfg or settings.load(path / CONFIG).model
        files = open_item(path, "params")
        found, faults = files.rows, []
    else:
        config = read_json(path)
        kind: Kind = "ChatGLM" if config.get("model_type") == legacy.MODEL_TYPE else "Hugging Face"
        kind = "native" if config.get("format") == FORMAT else kind
        promised = cfg or ModelConfig.from_hf(config)
        found, faults = survey_directory(path)
        files = TensorFiles(path, {key: row for key, row in found.items() if row})
    model = promised if kind == "native" or cfg else without_absent_mtp(promised, found)
    served = sources(model, found, kind)
    spare = {} if kind == "native" else copies(promised)
    if kind == "ChatGLM":
        spare = {
            legacy.place(copy, promised.dims)[0]: legacy.place(key, promised.dims)[0] for copy, key in spare.items()
        }
    asked = {key: row for key, row in found.items() if not (key.endswith(BUFFERS) or key in spare)}
    wanted = {key: size for source in served.values() for key, size in source.contract.items()}
    notices = []
    if model != promised:
        sets = promised.num_nextn_predict_layers
        absent = f"num_nextn_predict_layers is {sets}, but no tensor of it is there"
        notices.append(f"{absent}: multi-token prediction is off")
    state = [key for source in served.values() for key in source.keys if source.row.part == "state"]
    if other := [key for key in state if (row := found.get(key)) and row.dtype != torch.float32]:
        notices.append(f"stored in another dtype than float32, which is held from here on: {', '.join(other)}")
    return Survey(
        directory=path,
        kind=kind,
        cfg=model,
        files=files,
        found=found,
        served=served,
        spare=spare,
        faults=(*faults, *method_faults(config), *contract(asked, wanted), *dtype_faults(asked, served)),
        notices=tuple(notices),
    )


def open_model(path: str | Path, cfg: ModelConfig | None = None) -> tuple[ModelConfig, dict[str, Any]]:
    """Open a native or a Hugging Face directory, or a run's checkpoint; of its tensors only copies of others are read.

    cfg: the model that it must hold, instead of the one of its config.json.
    Returns the config, and the parameters as `Stored` leaves in the model's order. Where a Hugging Face config.json
    promises multi-token prediction and no tensor of it is there, the config that is returned has it off, and a warning
    says so.
    Raises ConfigError for the config, and ValueError that names every missing, unexpected, misshapen, non-float or
    unreadable tensor with its file.
    """
    seen = survey(path, cfg)
    if faults := seen.faults or differing_copies(seen.files, seen.spare):
        raise ValueError(report(path, faults))
    for notice in seen.notices:
        warn(f"{path}: {notice}", stacklevel=2)
    return seen.cfg, unflatten(seen.stored)


def verify(path: Path) -> None:
    """Read all of a run's checkpoint. Raises ValueError that names the file that does not hold what was written."""
    if (path / STATE).is_file() and (found := altered(path, prints_in(path))):
        raise ValueError("; ".join(found))


def method_faults(config: Mapping[str, Any]) -> list[str]:
    """What of a quantization_config is not the FP8 by blocks that is read here; which tensors are, their keys show."""
    given = config.get("quantization_config") or {}
    if not isinstance(given, Mapping):
        return [f"quantization_config ({given!r}) must be a mapping"]
    return [
        f"quantization_config.{name} ({given.get(name)!r}) must be {METHOD[name]!r}: nothing else is supported"
        for name in ("quant_method", "weight_block_size", "fmt")
        if given and given.get(name, METHOD[name] if name == "fmt" else None) != METHOD[name]
    ]


def dtype_faults(found: Rows, served: Mapping[str, Source]) -> list[str]:
    """The tensors that have a dtype which they must not have, and those to be stacked that differ in theirs."""
    dtypes = {key: row.dtype for key, row in found.items() if row}
    scaled = {key for source in served.values() if source.scaled for key in source.keys}
    scales = {key + SCALE for key in scaled}

    def allowed(key: str) -> tuple[torch.dtype, ...]:
        return (E4M3,) if key in scaled else (torch.float32,) if key in scales else FLOATS

    return [
        f"{key} in {row.file} is {dtype_name(row.dtype)}, must be {' or '.join(map(dtype_name, allowed(key)))}"
        + (f": {fp8_needs(key)}" if row.dtype == E4M3 else "")
        for row, key in ((row, key) for key, row in found.items() if row)
        if row.dtype not in allowed(key)
    ] + [
        f"{', '.join(source.keys)} must have one dtype, have {', '.join(sorted(kinds))}"
        for source in served.values()
        if len(kinds := {dtype_name(dtypes[key]) for key in source.keys if key in dtypes}) > 1
    ]


def fp8_needs(key: str) -> str:
    if key.endswith(".weight"):
        return f"FP8 needs its factors beside it, as {key}{SCALE}"
    return "experts in FP8 must come one by one, not stacked"


def load(
    path: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[ModelConfig, dict[str, Any]]:
    """Read a model: a native or a Hugging Face directory -> its config and its parameters, in the model's order.

    dtype: of the parameters; the stored dtypes when None, and bfloat16 for FP8. Errors as in `open_model`.
    """
    cfg, stored = open_model(path)
    specs = model_specs(cfg)
    return cfg, tree_map(lambda row, leaf: leaf.read().to(device, row.dtype(dtype or leaf.dtype)), specs, stored)
