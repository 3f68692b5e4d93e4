"""ModelConfig: what a checkpoint is. EngineConfig: how the user wants it run. UserError: what is wrong, and the fix."""

import math
from dataclasses import dataclass, replace

DTYPES = ("float32", "bfloat16", "float16")
KERNELS = ("auto", "portable", "flash", "triton")  # for attention; common/kernels says who they are

# architecture -> (q, k and v have a bias, q and k are normalised a head). None: config.attention_bias decides.
ARCHITECTURES = {
    "LlamaForCausalLM": (None, False),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (None, True),
}


class UserError(ValueError):
    """A mistake in the input. The message is one sentence that says how to mend it; a run.py ends with status 2."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder of the Llama family. Sizes are numbers of elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    llama3_rope: tuple[float, float, float, int] | None = None  # factor, low, high, original length
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_ids: frozenset[int] = frozenset()

    @classmethod
    def from_hf(cls, hf, eos_ids: frozenset[int] = frozenset()) -> "ModelConfig":
        """From a transformers config object. Raises UserError for what the model does not implement."""
        names = hf.architectures or ["(none named)"]
        if names[0] not in ARCHITECTURES:
            raise UserError(f"architecture {names[0]} is not supported; supported are {', '.join(ARCHITECTURES)}")
        bias, qk_norm = ARCHITECTURES[names[0]]
        if hf.hidden_act != "silu":
            raise UserError(f"activation {hf.hidden_act!r} is not supported; only 'silu' is")
        max_position = hf.max_position_embeddings
        if getattr(hf, "use_sliding_window", True) and getattr(hf, "sliding_window", None):
            max_position = min(max_position, hf.sliding_window)  # inside the window it equals full attention
        return cls(
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            max_position=max_position,
            rms_norm_eps=hf.rms_norm_eps,
            tie_embeddings=hf.tie_word_embeddings,
            qkv_bias=getattr(hf, "attention_bias", False) if bias is None else bias,
            qk_norm=qk_norm,
            eos_ids=eos_ids,
            **_rope(hf.rope_parameters),
        )

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """K and V of one position in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_element


def _rope(rope: dict) -> dict:
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise UserError(f"rope scaling {kind!r} is not supported; supported are 'default' and 'llama3'")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {
        "rope_theta": rope["rope_theta"],
        "llama3_rope": tuple(rope[key] for key in keys) if kind == "llama3" else None,
    }


# Real shapes for `--model dummy:NAME`, which fills them with random weights.
DUMMY_MODELS = {
    "tiny": ModelConfig(512, 64, 128, 2, 4, 2, 16, 4096),
    "smollm2-135m": ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 100000.0, tie_embeddings=True),
    "qwen3-0.6b": ModelConfig(151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, 1e6, tie_embeddings=True, qk_norm=True),
    "llama3-8b": ModelConfig(128256, 4096, 14336, 32, 32, 8, 128, 8192, 1e-5, 500000.0),
    "qwen3-32b": ModelConfig(151936, 5120, 25600, 64, 64, 8, 128, 40960, 1e-6, 1e6, qk_norm=True),
}


@dataclass(frozen=True)
class EngineConfig:
    """Everything `build_engine` needs; each run.py offers the fields that its stage uses as flags.

    None means: the default of the device, from DEVICE_DEFAULTS.
    """

    model: str = "smollm2-135m"
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    dtype: str = "auto"  # auto, or one of DTYPES
    attn: str = "auto"  # one of KERNELS
    seed: int = 0  # decides the draws of requests that bring no seed of their own
    max_model_len: int | None = None  # prompt and output together, in tokens; never more than the model was made for
    max_running: int | None = None  # requests that compute at the same time
    max_batch_tokens: int | None = None  # positions computed in one step; longer prompts come in chunks
    page_size: int | None = None  # tokens
    kv_tokens: int | None = None  # size of the KV pool; on a GPU None means: what is free
    memory_fraction: float = 0.9  # of a GPU's memory, for weights, pool and the largest step; CUDA graphs come on top
    graph: bool | None = None  # replay steps from CUDA graphs; on a CPU, call what would be recorded
    graph_max_batch: int = 256  # requests that decode in the largest of them
    graph_max_tokens: int = 1024  # positions in the largest one of a step with prompts; 0: those are never recorded
    overlap: bool = True  # schedule the next step while the device computes this one
    radix: bool = True  # keep the prefixes of earlier requests and share them
    order: str = "fcfs"  # of the waiting queue: fcfs (first come, first served) | prefix (longest known prefix first)
    tp: int = 1  # ranks that share the model (tensor parallelism)

    def __post_init__(self):
        for name in ("max_model_len", "max_running", "max_batch_tokens", "page_size", "kv_tokens", "graph_max_batch"):
            if (value := getattr(self, name)) is not None:
                check_range(name, value, 1)
        check_range("graph_max_tokens", self.graph_max_tokens, 0)
        check_range("memory_fraction", self.memory_fraction, 0, 1, open_low=True)
        if self.order not in ("fcfs", "prefix"):
            raise UserError(f"order {self.order!r} is unknown; use fcfs or prefix")
        if self.order == "prefix" and not self.radix:
            raise UserError("order prefix needs the prefix cache; leave out --no-radix")
        check_range("tp", self.tp, 1)

    def resolve(self, device_type: str, max_position: int) -> "EngineConfig":
        """With the device's defaults in place of None."""
        defaults = DEVICE_DEFAULTS[device_type]
        changes = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        longest = changes.get("max_model_len") or self.max_model_len or max_position
        if self.max_model_len is not None and longest > max_position:
            raise UserError(
                f"max_model_len is {longest}, but the model was made for {max_position} tokens; give at most that"
            )
        return replace(self, **changes | {"max_model_len": min(longest, max_position)})


# What fits a laptop, and what fills a GPU.
DEVICE_DEFAULTS = {
    "cpu": {
        "max_model_len": 2048,
        "max_running": 16,
        "max_batch_tokens": 512,
        "page_size": 16,
        "kv_tokens": 16384,
        "graph": False,
    },
    "cuda": {
        "max_model_len": None,
        "max_running": 256,
        "max_batch_tokens": 8192,
        "page_size": 1,
        "kv_tokens": None,
        "graph": True,
    },
}


def check_range(name: str, value: float, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """UserError unless low <= value <= high (low < value if open_low); NaN and infinity never pass."""
    if not (low < value if open_low else low <= value) or not value <= high or value == math.inf:
        lower = f"a number above {low:g}" if open_low else f"a number of at least {low:g}"
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise UserError(f"{name} is {value}; it must be {lower}{upper}")
