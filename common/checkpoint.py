"""From a model's name to a CausalLM with its weights in place: out of its folder, one tensor at a time, or at random
for a `dummy:` shape.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.config import DUMMY_MODELS, EngineConfig, ModelConfig, UserError
from common.device import resolve_device, resolve_dtype, timed_start
from common.fetch import resolve_model
from common.kernels import Kernels, select_kernels, speed_up_linears
from common.kernels import ops as plain_ops
from common.model import CausalLM

SIZES = (  # in config.json: whole numbers of at least 1, where they are given
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)


class Loaded(NamedTuple):
    """What every stage starts from."""

    config: EngineConfig  # with nothing left open but kv_tokens
    shape: ModelConfig  # of the whole model
    model: CausalLM  # the whole, or the part that was asked for
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype


class Part(Protocol):
    """As much of a model as one process computes."""

    config: ModelConfig  # of this part, which is a smaller model of its own

    def take(self, name: str, weight: Tensor) -> Tensor:
        """What this part has of a weight, by Hugging Face's name. `weight` may be what safetensors' get_slice returns."""

    def attach(self, model: CausalLM) -> None:
        """Make the finished part one of the whole: wrap what has to ask the other parts."""


class Whole:
    """The null form: all of it."""

    def __init__(self, shape: ModelConfig):
        self.config = shape

    def take(self, name: str, weight: Tensor) -> Tensor:
        return weight[...]

    def attach(self, model: CausalLM) -> None:
        pass


def load(config: EngineConfig, part_of: Callable[[ModelConfig], Part] = Whole) -> Loaded:
    """Everything that is settled before the first part is built. Raises UserError."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    shape, folder = load_config(config.model)
    has_head = folder and shape.tie_embeddings and "lm_head.weight" in tensor_names(folder)
    if has_head:  # a head of its own counts, as in transformers
        shape = replace(shape, tie_embeddings=False)
    part = part_of(shape)
    kernels = select_kernels(config.attn, device, dtype, shape.head_dim)
    config = config.resolve(device.type, shape.max_position)
    with timed_start("weights", device):
        model = empty_model(part.config, device, dtype, kernels.ops)
        tensors = dummy_tensors(shape, device, dtype) if folder is None else checkpoint_tensors(folder, device)
        load_weights(model, tensors, part)
        if has_head and torch.equal(model.lm_head.weight, model.embed_tokens.weight):  # it takes its memory for nothing
            model.lm_head.weight = model.embed_tokens.weight
        part.attach(model)
        model.init_rope(config.max_model_len, device)
        speed_up_linears(model, kernels, device)
    return Loaded(config, shape, model, kernels, device, dtype)


def load_config(name: str) -> tuple[ModelConfig, Path | None]:
    """(config, folder); the folder is None for a dummy model."""
    if name.startswith("dummy:"):
        shape = name.removeprefix("dummy:")
        if shape not in DUMMY_MODELS:
            raise UserError(f"there is no dummy shape {shape!r}; there are {', '.join(DUMMY_MODELS)}")
        return DUMMY_MODELS[shape], None
    from transformers import AutoConfig

    folder = resolve_model(name)
    file = folder / "config.json"
    given = _read_json(file)
    try:
        if quantized := given.get("quantization_config"):
            method = quantized.get("quant_method") if isinstance(quantized, dict) else None
            raise UserError(
                f"weights quantized by {method or quantized} are not supported; take the original checkpoint"
            )
        for key in SIZES:
            if given.get(key) is not None and not (isinstance(given[key], int) and given[key] >= 1):
                raise UserError(f"{key} is {given[key]!r}; it must be a whole number of at least 1")
        hf = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return ModelConfig.from_hf(hf, _eos_ids(folder, hf.eos_token_id)), folder
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except Exception as error:  # whatever the library makes of what it did not expect
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{file} (model_type {given.get('model_type')!r}) is not a model that can be read here: {reason:.300}"
        ) from error


def _eos_ids(folder: Path, of_config: int | list[int] | None) -> frozenset[int]:
    """All tokens that end a text: those of config.json, of generation_config.json and of the tokenizer. Each of them may
    know of one that the others lack, as fine-tunes of base models have it."""
    file = folder / "generation_config.json"
    found = [of_config, _read_json(file).get("eos_token_id") if file.is_file() else None, _tokenizers_eos(folder)]
    ids = [i for value in found for i in (value if isinstance(value, list) else [value]) if i is not None]
    if wrong := [i for i in ids if not isinstance(i, int)]:
        raise UserError(f"eos_token_id is {wrong[0]!r} in {file.name}; it must be a token id")
    return frozenset(ids)


def _tokenizers_eos(folder: Path) -> int | None:
    """The id of the tokenizer's eos_token, without the seconds that loading a tokenizer takes."""
    settings, tokenizer = folder / "tokenizer_config.json", folder / "tokenizer.json"
    given = _read_json(settings) if settings.is_file() else {}
    token = given.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    for i, entry in given.get("added_tokens_decoder", {}).items():
        if entry.get("content") == token:
            return int(i)
    added = _read_json(tokenizer).get("added_tokens", []) if token and tokenizer.is_file() else []  # megabytes of it
    return {entry.get("content"): entry.get("id") for entry in added}.get(token)


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


def dummy_tensors(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) one at a time: random weights from a fixed seed, right for speed and meaningless as text."""
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in empty_model(config, torch.device("meta"), dtype).named_parameters():
        weight = torch.empty(parameter.shape, dtype=dtype, device=device)
        weight = weight.normal_(0, 0.02, generator=generator) if weight.dim() > 1 else weight.fill_(1)
        *path, module, kind = name.split(".")
        parts = config.fused.get(module, {module: len(weight)})
        for part, piece in zip(parts, weight.split([*parts.values()]), strict=True):
            yield ".".join((*path, part, kind)), piece


def checkpoint_tensors(folder: Path, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """(name, slice) one at a time out of a folder's files. What is not taken of a slice is never read."""
    for file in weight_files(folder):
        with readable(file), safe_open(file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_slice(name)


def tensor_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in weight_files(folder):
        with readable(file), safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return names


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """UserError if what is read inside is damaged."""
    try:
        yield
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


def load_weights(model: CausalLM, tensors: Iterator[tuple[str, Tensor]], part: Part) -> None:
    """Copy a checkpoint's tensors to where they belong. Raises UserError for what is missing, unknown or misshapen."""
    config, parameters = model.config, dict(model.named_parameters())
    place = {}  # Hugging Face's name of a projection -> the matrix that it is a part of, and where in it
    for fused, sizes in config.fused.items():
        first = 0
        for name, size in sizes.items():
            place[name] = (fused, first, size)
            first += size
    missing = {name: parameter.numel() for name, parameter in parameters.items()}
    for name, tensor in tensors:
        path = name.removeprefix("model.").split(".")
        projection = path[-2] if len(path) > 1 else ""
        fused, *span = place.get(projection, (projection,))
        ours = ".".join([*path[:-2], fused, path[-1]])
        if (ours == "lm_head.weight" and config.tie_embeddings) or name.endswith("rotary_emb.inv_freq"):
            continue
        if ours not in parameters:
            raise UserError(
                f"the checkpoint has {name}, which this model has no use for: its architecture is not the one that config.json names"
            )
        target = parameters[ours].data
        if span:
            target = target.narrow(0, *span)
        taken = part.take(name, tensor)
        if target.shape != taken.shape:
            raise UserError(f"{name} has shape {list(taken.shape)}, but config.json asks for {list(target.shape)}")
        target.copy_(taken)
        missing[ours] -= taken.numel()
    if absent := [name for name, left in missing.items() if left]:
        raise UserError(
            f"the checkpoint lacks (parts of) {', '.join(absent[:3])}{' and more' if len(absent) > 3 else ''}"
        )
