"""ModelConfig: what a checkpoint is. EngineConfig: how the user wants it run. UserError: what is wrong, and the fix."""

import math
from dataclasses import dataclass, field, fields, replace
from numbers import Real

DTYPES = ("float32", "bfloat16", "float16")
KERNELS = ("auto", "portable", "native", "flash", "triton")  # for attention, see common/kernels

# architecture -> (bias of q, k and v; of o; of the MLP; are q and k normalised per head?). A name: that key of
# config.json decides.
ARCHITECTURES = {
    "LlamaForCausalLM": ("attention_bias", "attention_bias", "mlp_bias", False),
    "MistralForCausalLM": (False, False, False, False),
    "Qwen2ForCausalLM": (True, False, False, False),
    "Qwen3ForCausalLM": ("attention_bias", "attention_bias", False, True),
}


class UserError(ValueError):
    """A mistake in the input. The message is one sentence that says how to correct it; a run.py ends with status 2."""


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
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_ids: frozenset[int] = frozenset()

    @classmethod
    def from_hf(cls, hf, eos_ids: frozenset[int] = frozenset()) -> "ModelConfig":
        """From a transformers config object. Raises UserError for what the model does not implement."""
        names = hf.architectures or ["(none named)"]
        if names[0] not in ARCHITECTURES:
            raise UserError(f"architecture {names[0]} is not supported; supported are {', '.join(ARCHITECTURES)}")
        qkv_bias, o_bias, mlp_bias, qk_norm = (
            getattr(hf, value, False) if isinstance(value, str) else value for value in ARCHITECTURES[names[0]]
        )
        if hf.num_attention_heads % hf.num_key_value_heads:
            raise UserError(
                f"num_key_value_heads is {hf.num_key_value_heads}; it must divide num_attention_heads, {hf.num_attention_heads}"
            )
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        if head_dim % 2:
            raise UserError(f"head_dim is {head_dim}; the rotary embedding needs an even number")
        if hf.hidden_act != "silu":
            raise UserError(f"activation {hf.hidden_act!r} is not supported; only 'silu' is")
        max_position = hf.max_position_embeddings
        if getattr(hf, "use_sliding_window", True) and getattr(hf, "sliding_window", None):
            check_range("sliding_window", hf.sliding_window, 1)
            max_position = min(max_position, hf.sliding_window)  # inside the window it equals full attention
        return cls(
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads,
            head_dim=head_dim,
            max_position=max_position,
            rms_norm_eps=hf.rms_norm_eps,
            tie_embeddings=hf.tie_word_embeddings,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            eos_ids=eos_ids,
            **_rope(hf.rope_parameters),
        )

    @property
    def fused(self) -> dict[str, dict[str, int]]:
        """Projections that the model keeps as one matrix: its name -> Hugging Face's names of the parts, in their order
        in the matrix, each with its number of outputs."""
        kv = self.num_kv_heads * self.head_dim
        return {
            "qkv_proj": {"q_proj": self.num_heads * self.head_dim, "k_proj": kv, "v_proj": kv},
            "gate_up_proj": {"gate_proj": self.intermediate_size, "up_proj": self.intermediate_size},
        }

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """K and V of one position in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_element


def _rope(rope: dict) -> dict:
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise UserError(f"rope scaling {kind!r} is not supported; supported are 'default' and 'llama3'")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for key in ("rope_theta", *(keys if kind == "llama3" else ())):
        check_range(key, rope.get(key), 0, open_low=True)
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


def flag(default, text: str, **by_device):
    """A setting, described once: the help of all parsers and the README's table are made of this.

    by_device: the default on cpu or on cuda, where it differs; or words for it, where it is no fixed value.
    """
    return field(default=default, metadata={"help": text, **by_device})


DEVICE_TYPES = ("cpu", "cuda")
DTYPE_NAMES, KERNEL_NAMES = (", ".join(f"`{name}`" for name in names) for names in (DTYPES, KERNELS))


@dataclass(frozen=True)
class EngineConfig:
    """Everything `build_engine` needs; each run.py offers the fields that its stage uses as flags.

    None means: what fits a laptop, on a CPU; what fills a GPU. `resolve` puts that in its place.
    """

    model: str = flag(
        "smollm2-135m",
        "`smollm2-135m`, a folder in Hugging Face's layout, a hub id, or `dummy:NAME` for random weights",
    )
    device: str = flag("auto", "`auto`, `cpu`, `cuda` or `cuda:N`")
    dtype: str = flag(
        "auto", f"`auto`, {DTYPE_NAMES}", cpu="bfloat16 if the CPU multiplies it, else float32", cuda="bfloat16"
    )
    attn: str = flag(
        "auto", f"attention kernels: {KERNEL_NAMES}", cpu="native; portable where there is no C compiler", cuda="triton"
    )
    max_model_len: int | None = flag(
        None,
        "longest sequence in tokens, prompt and output together; never more than the model was made for",
        cpu=2048,
        cuda="the model's own",
    )
    max_running: int | None = flag(None, "requests that compute at the same time", cpu=16, cuda=256)
    max_batch_tokens: int | None = flag(
        None, "positions computed in one step; longer prompts come in chunks of this", cpu=512, cuda=8192
    )
    page_size: int | None = flag(None, "tokens in a page of the KV pool", cpu=16, cuda=1)
    kv_tokens: int | None = flag(None, "size of the KV pool in tokens", cpu=16384, cuda="what is free")
    memory_fraction: float = flag(
        0.9, "share of a GPU's memory for weights, KV pool and the largest step; CUDA graphs come on top", cpu=""
    )
    graph: bool | None = flag(None, "replay steps from CUDA graphs", cpu=False, cuda=True)
    graph_max_batch: int = flag(256, "requests that decode in the largest CUDA graph", cpu="")
    graph_max_tokens: int = flag(
        1024, "positions in the largest CUDA graph of a step with prompts; 0: capture no such steps", cpu=""
    )
    overlap: bool = flag(True, "schedule the next step while the device computes this one")
    radix: bool = flag(True, "keep the prefixes of earlier requests and share them")
    order: str = flag("fcfs", "of the waiting queue: `fcfs`, or `prefix` for the longest known prefix first")
    tp: int = flag(1, "ranks that share the model (tensor parallelism)")
    seed: int = flag(0, "decides the draws of requests without a seed of their own")

    def __post_init__(self):
        whole = ("max_model_len", "max_running", "max_batch_tokens", "page_size", "kv_tokens", "graph_max_batch", "tp")
        for name in (*whole, "graph_max_tokens", "seed"):
            value = getattr(self, name)
            if value is None and getattr(EngineConfig, name) is None:  # the default: `resolve` decides
                continue
            if not isinstance(value, int):
                raise UserError(f"{name} is {value!r}; it must be a whole number")
            if name != "seed":
                check_range(name, value, 0 if name == "graph_max_tokens" else 1)
        check_range("memory_fraction", self.memory_fraction, 0, 1, open_low=True)
        if self.order not in ("fcfs", "prefix"):
            raise UserError(f"order {self.order!r} is unknown; use fcfs or prefix")
        if self.order == "prefix" and not self.radix:
            raise UserError("order prefix needs the prefix cache; leave out --no-radix")

    def resolve(self, device_type: str, max_position: int) -> "EngineConfig":
        """With the device's defaults in place of None."""
        defaults = {f.name: f.metadata.get(device_type) for f in fields(self) if getattr(self, f.name) is None}
        changes = {name: value for name, value in defaults.items() if not isinstance(value, str)}
        longest = changes.get("max_model_len") or self.max_model_len or max_position
        if self.max_model_len is not None and longest > max_position:
            raise UserError(
                f"max_model_len is {longest}, but the model was made for {max_position} tokens; give at most that"
            )
        return replace(self, **changes | {"max_model_len": min(longest, max_position)})


def check_range(name: str, value: float, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """UserError unless low <= value <= high (low < value if open_low); NaN and infinity never pass."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UserError(f"{name} is {value!r}; it must be a number")
    if not (low < value if open_low else low <= value) or not value <= high or value == math.inf:
        lower = f"a number above {low:g}" if open_low else f"a number of at least {low:g}"
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise UserError(f"{name} is {value}; it must be {lower}{upper}")
