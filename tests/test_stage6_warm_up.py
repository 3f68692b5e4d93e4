"""After the warm-up no kernel is compiled any more. On the CPU Triton's launches are replaced by a count of what it would
compile; the test marked `gpu` asks Triton.
"""

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs
from triton.runtime.jit import JITFunction

from common import checkpoint, kernels
from common.checkpoint import load
from common.config import DUMMY_MODELS, EngineConfig, ModelConfig
from common.kernels import triton_linear
from stage2_req.params import SamplingParams
from stage2_req.sampling import GumbelSampler
from stage6_cudagraph.warm_up import WAYS, warm_up
from stage7_radix.build import assemble, build_engine

# sizes that the kernels for products take; with and without the norms of q and k
SHAPES = [ModelConfig(1536, 1024, 2048, 1, 8, kv_heads, 64, 4096, qk_norm=kv_heads > 1) for kv_heads in (1, 2)]
FLAGS = {"dtype": "bfloat16", "attn": "triton", "graph": True, "max_running": 24, "page_size": 1}
CONFIGS = {  # what differs, and the longest prompts
    "graphs for most": ({"kv_tokens": 6000, "max_model_len": 3000, "max_batch_tokens": 1500}, 2500),
    "graphs for few": ({"kv_tokens": 1200, "max_model_len": 700, "graph_max_batch": 4, "graph_max_tokens": 40}, 600),
    "no graphs": ({"kv_tokens": 640, "max_model_len": 700, "graph": False, "page_size": 16}, 600),
    "small steps": ({"kv_tokens": 300, "max_model_len": 120, "max_batch_tokens": 20, "graph_max_tokens": 0}, 100),
}


PARAMS = [*WAYS, SamplingParams(prompt_logprobs=1), SamplingParams(0.5, seed=1), SamplingParams(frequency_penalty=1)]


class Compiled:
    """The kernels, by everything that Triton compiles them for."""

    def __init__(self):
        self.keys: set[tuple] = set()

    def launch(self, kernel: JITFunction, *args, grid, warmup, **kwargs) -> None:
        names = {param.name for param in kernel.params}
        options = {name: value for name, value in kwargs.items() if name not in names}
        bound = kernel.signature.bind(*args, **{name: value for name, value in kwargs.items() if name in names})
        key = [kernel.fn.__name__, *sorted(options.items())]
        for param in kernel.params:
            value = bound.arguments[param.name]
            key.append((param.name, value if param.is_constexpr else self.kind(value, param)))
            if torch.is_tensor(value) and param.name in ("out_ptr", "total_ptr", "tokens_ptr", "where_ptr"):
                value.zero_()
        self.keys.add(tuple(key))

    @staticmethod
    def kind(value, param):
        """What of an argument is known when a kernel is compiled."""
        aligns = not param.do_not_specialize_on_alignment
        if torch.is_tensor(value):
            return value.dtype, aligns and value.data_ptr() % 16 == 0
        if isinstance(value, int):
            special = not param.do_not_specialize
            return value < 2**31, special and value == 1, special and aligns and value % 16 == 0
        return value if value is None else type(value)


@pytest.fixture
def compiled(monkeypatch):
    found = Compiled()
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: found.launch(kernel, *args, **kwargs))
    monkeypatch.setattr(kernels, "_triton_obstacle", lambda device: None)
    monkeypatch.setattr(checkpoint, "speed_up_linears", lambda model, *_: triton_linear.speed_up_linears(model))
    monkeypatch.setattr(triton_linear, "has_pdl", lambda device: True)
    monkeypatch.setattr(triton_linear, "pdl", lambda device: {"PDL": True, "launch_pdl": True})
    monkeypatch.setattr(triton_linear.F, "linear", lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight)))
    return found


def everything(engine, longest: int, rng: random.Random) -> None:
    """Requests of all lengths that sample in all ways, alone and in crowds, some with a prefix that is known."""
    vocab, known = engine.model.vocab_size, [7] * longest
    for crowd in (1, 2, 40, 1, 24, 60):
        few = rng.random() < 0.5
        for _ in range(crowd):
            prompt = known[: rng.randrange(longest)] if rng.random() < 0.5 else []
            prompt = prompt + rng.choices(range(vocab), k=rng.randint(1, 20 if few else longest))
            prompt = prompt[: rng.choice([5, longest])]
            params = replace(rng.choice(PARAMS), max_tokens=rng.choice([1, 3, 30]), ignore_eos=True)
            engine.add(prompt, params)
            if rng.random() < 0.2:
                engine.step()
        while engine.has_work():
            engine.step()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_is_compiled_after_the_warm_up(compiled, monkeypatch, name, shape):
    monkeypatch.setitem(DUMMY_MODELS, "small", shape)
    changes, longest = CONFIGS[name]
    m = load(EngineConfig("dummy:small", device="cpu", **FLAGS | changes))
    engine = assemble(m, m.config.kv_tokens, GumbelSampler(m.kernels.ops))
    for graphs in getattr(engine.runner, "graphs", ()):
        for replay in graphs.replays.values():  # on a GPU this is how they are captured
            replay()
    warm_up(engine.runner, m.config, engine.cache.max_len)
    before = set(compiled.keys)
    everything(engine, longest, random.Random(0))
    assert compiled.keys == before


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_gpu_nothing_is_compiled_after_the_warm_up(monkeypatch, name):
    changes, longest = CONFIGS[name]
    monkeypatch.setitem(DUMMY_MODELS, "small", SHAPES[1])
    engine = build_engine(EngineConfig("dummy:small", device="cuda", **FLAGS | changes))
    late = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda repr, **_: late.append(repr))
    everything(engine, longest, random.Random(0))
    assert late == []
