"""From a model's name to a CausalLM with its weights in place: out of its folder, one tensor at a time, or at random
for a `dummy:` shape.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from common.config import DUMMY_MODELS, EngineConfig, ModelConfig, UserError
from common.device import resolve_device, resolve_dtype
from common.fetch import first_line, resolve_model
from common.kernels import Kernels, select_kernels, speed_up_linears
from common.kernels import ops as plain_ops
from common.model import CausalLM

# Projections that the model keeps as one matrix: Hugging Face's name -> (ours, place in the stack).
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class Loaded(NamedTuple):
    """What every stage starts from."""

    config: EngineConfig  # with nothing left open but kv_tokens
    model: CausalLM
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype


def load(config: EngineConfig) -> Loaded:
    """Everything that is settled before the first part is built. Raises UserError."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    shape, folder = load_config(config.model)
    kernels = select_kernels(config.attn, device, dtype, shape.head_dim)
    config = config.resolve(device.type, shape.max_position)
    model = empty_model(shape, device, dtype, kernels.ops)
    if folder is None:
        fill_dummy(model)
    else:
        load_weights(model, checkpoint_tensors(folder, device))
    return Loaded(config, finish_model(model, config.max_model_len), kernels, device, dtype)


def load_config(name: str) -> tuple[ModelConfig, Path | None]:
    """(config, folder); the folder is None for a dummy model."""
    if name.startswith("dummy:"):
        shape = name.removeprefix("dummy:")
        if shape not in DUMMY_MODELS:
            raise UserError(f"there is no dummy shape {shape!r}; there are {', '.join(DUMMY_MODELS)}")
        return DUMMY_MODELS[shape], None
    from transformers import AutoConfig

    folder = resolve_model(name)
    kind = _read_json(folder / "config.json").get("model_type")
    try:
        hf = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder / 'config.json'} (model_type {kind!r}) is not a model that can be read here: {first_line(error)}"
        ) from error
    return ModelConfig.from_hf(hf, _eos_ids(folder, hf)), folder


def _eos_ids(folder: Path, hf) -> frozenset[int]:
    """All of them: the generation config may name more than the model's."""
    ids = hf.eos_token_id
    if (file := folder / "generation_config.json").is_file():
        ids = _read_json(file).get("eos_token_id", ids)
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is no JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no JSON object; fetch it again")
    return content


def empty_model(config: ModelConfig, device: torch.device, dtype: torch.dtype, ops: ModuleType = plain_ops) -> CausalLM:
    """Parameters without values."""
    with torch.device("meta"):
        model = CausalLM(config, ops).to(dtype)
    model.to_empty(device=device).requires_grad_(False).eval()
    model.tie_embeddings()
    return model


def finish_model(model: CausalLM, max_len: int) -> CausalLM:
    """What follows from the weights: rope tables for max_len positions, and faster matrix products."""
    device = model.norm.weight.device
    model.init_rope(max_len, device)
    speed_up_linears(model, device)
    return model


def fill_dummy(model: nn.Module) -> None:
    """Random weights with a fixed seed: right for speed, meaningless as text."""
    generator = dummy_generator(next(model.parameters()).device)
    for parameter in model.parameters():
        fill_random(parameter, generator)


def dummy_generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def fill_random(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Small numbers in a matrix; ones in what scales, or adds to, a vector."""
    return weight.normal_(0, 0.02, generator=generator) if weight.dim() > 1 else weight.fill_(1)


def read_whole(file: safe_open, name: str) -> Tensor:
    return file.get_tensor(name)


def checkpoint_tensors(
    folder: Path, device: torch.device, read: Callable[[safe_open, str], Tensor] = read_whole
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) one at a time out of a folder's files; memory-mapped, so a tensor's life is its cost.

    read: takes a tensor, or as much of it as is wanted, out of an open file.
    """
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt", device=str(device)) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    yield name, read(tensors, name)
        except SafetensorError as error:
            raise UserError(f"{file} is damaged ({error}); fetch it again") from error


def weight_files(folder: Path) -> list[Path]:
    """Those that the index names; else model.safetensors; else all *.safetensors. Others may hold the weights once more."""
    files = {file.name: file for file in sorted(folder.glob("*.safetensors")) if file.is_file()}
    if (index := folder / "model.safetensors.index.json").is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{index} has no weight_map; fetch it again")
        names = sorted(set(map(str, weight_map.values())))
        if absent := [name for name in names if name not in files]:
            raise UserError(
                f"{index} names {absent[0]!r}, which is no *.safetensors file of that folder; fetch it again"
            )
        return [files[name] for name in names]
    if not files:
        raise UserError(
            f"{folder} has no *.safetensors file; other weight formats are not read (pickled ones can run code)"
        )
    return [files["model.safetensors"]] if "model.safetensors" in files else list(files.values())


def load_weights(model: CausalLM, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Copy a checkpoint's tensors to where they belong. Raises UserError for what is missing, unknown or misshapen."""
    config, parameters = model.config, dict(model.named_parameters())
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    mlp = config.intermediate_size
    span = {"q_proj": (0, q), "k_proj": (q, kv), "v_proj": (q + kv, kv), "gate_proj": (0, mlp), "up_proj": (mlp, mlp)}
    missing = {name: parameter.numel() for name, parameter in parameters.items()}
    for name, tensor in tensors:
        parts = name.removeprefix("model.").split(".")
        projection = parts[-2] if len(parts) > 1 else ""
        ours = ".".join([*parts[:-2], FUSED.get(projection, projection), parts[-1]])
        if (ours == "lm_head.weight" and config.tie_embeddings) or name.endswith("rotary_emb.inv_freq"):
            continue
        if ours not in parameters:
            raise UserError(
                f"the checkpoint has {name}, which this model has no use for: its architecture is not the one that config.json names"
            )
        rows = parameters[ours].data
        if projection in FUSED:
            rows = rows.narrow(0, *span[projection])
        if rows.shape != tensor.shape:
            raise UserError(f"{name} has shape {list(tensor.shape)}, but config.json asks for {list(rows.shape)}")
        rows.copy_(tensor)
        missing[ours] -= tensor.numel()
    if absent := [name for name, left in missing.items() if left]:
        raise UserError(
            f"the checkpoint lacks (parts of) {', '.join(absent[:3])}{' and more' if len(absent) > 3 else ''}"
        )
