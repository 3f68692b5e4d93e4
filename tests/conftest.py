"""What the tests share: tiny random checkpoints, Hugging Face's own answers for them, and the default model."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # tiny models gain nothing from threads, nor do processes that share two cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import functools
import json
import shutil
import signal
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from common.config import EngineConfig
from common.fetch import fetch_default

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that sends us to the background has it ignored

# What tests of random histories build on: HYPOTHESIS_PROFILE=nightly tries many more, and others every time.
base = settings(deadline=None, suppress_health_check=[*HealthCheck])
settings.register_profile("ci", base, derandomize=True, max_examples=100, stateful_step_count=30)
settings.register_profile("nightly", base, max_examples=2000, stateful_step_count=80, print_blob=True)
PROFILE = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
TIME_LIMIT = 300 if PROFILE.derandomize else 3 * 3600  # seconds that a test may take

MAX_POSITION = 512
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "initializer_range": 0.4,  # wide, so that texts vary and no two logits are nearly equal
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name -> (architecture, what differs from SHAPE)
CHECKPOINTS = {
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    "llama3": ("LlamaForCausalLM", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "hidden_size": 48}),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": False, "head_dim": 24}),
    "mistral": ("MistralForCausalLM", {"tie_word_embeddings": False, "sliding_window": None}),
}


@dataclass
class Checkpoint:
    """A folder in Hugging Face's layout, and the transformers model that it was written from."""

    path: Path
    hf: torch.nn.Module
    answers: dict = field(default_factory=dict)  # what `reference` has computed already

    @property
    def vocab_size(self) -> int:
        return self.hf.config.vocab_size

    def config(self, **changes) -> EngineConfig:
        return EngineConfig(**{"model": str(self.path), "device": "cpu", "dtype": "float32"} | changes)

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(1000 * seed + length)
        return torch.randint(self.vocab_size, (length,), generator=generator).tolist()


def make_checkpoint(folder: Path, name: str, **changes) -> Checkpoint:
    """Write the named tiny model with random weights; also biases and norms, which Hugging Face starts at 0 and 1."""
    import transformers

    architecture, differences = CHECKPOINTS[name]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(sum(name.encode()))
    hf = model_class(model_class.config_class(**SHAPE | differences | changes)).eval().requires_grad_(False)
    for parameter in hf.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    hf.save_pretrained(folder)
    return Checkpoint(folder, hf)


@torch.inference_mode()
def reference(checkpoint: Checkpoint, prompt: list[int], n: int) -> list[int]:
    """The n tokens that Hugging Face's greedy `generate` puts after the prompt."""
    key = (tuple(prompt), n)
    if key not in checkpoint.answers:
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False}
        out = checkpoint.hf.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        checkpoint.answers[key] = out[0, len(prompt) :].tolist()
    return checkpoint.answers[key]


def copy_with_eos(checkpoint: Checkpoint, folder: Path, eos_token_id: int | list[int]) -> Path:
    """A copy of the folder in which generation_config.json names these eos ids."""
    shutil.copytree(checkpoint.path, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """tiny_checkpoint(name) -> Checkpoint, for a name in CHECKPOINTS; written once a session."""

    @functools.cache
    def get(name: str) -> Checkpoint:
        return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / name, name)

    return get


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory) -> Checkpoint:
    return make_text_checkpoint(tmp_path_factory.mktemp("text") / "model")


def make_text_checkpoint(folder: Path) -> Checkpoint:
    """A tiny Llama with a tokenizer: <s>, </s>, then a token a byte; a chat template that can be made to fail; </s> ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    checkpoint = make_checkpoint(folder, "llama", vocab_size=len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.content == 'fail' %}{{ raise_exception('the template says no') }}"
        "{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    ).save_pretrained(checkpoint.path)
    (checkpoint.path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return checkpoint


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder, fetched if it is not here yet."""
    return fetch_default()


@contextmanager
def time_limit(seconds: int, error: Exception):
    """Raise the error inside after so many seconds."""

    def give_up(*_):
        raise error

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def no_test_hangs():
    """An engine that can't go on would be stepped for ever: after TIME_LIMIT seconds a test fails."""
    with time_limit(TIME_LIMIT, TimeoutError(f"the test ran for {TIME_LIMIT} seconds")):
        yield


def pytest_configure(config):
    """In two processes: files in their order, not the one with the fewest tests last, which may take the longest."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; PyTorch sees none"))
