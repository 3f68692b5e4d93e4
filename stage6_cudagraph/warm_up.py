"""Steps before the first request, for what happens only once: kernels are compiled, libraries choose theirs, memory is
reserved. Without them the first requests wait for it, each for hundreds of milliseconds.

Triton compiles a kernel again for every combination of its constants, and matrix libraries choose by the number of rows.
So these steps have every size, and every way in which requests can sample.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import torch

from common.config import EngineConfig
from stage2_req.params import SamplingParams
from stage2_req.req import Batch, Req
from stage6_cudagraph.mixed_graphs import token_sizes
from stage6_cudagraph.overlap import FutureRunner

Step = list[tuple[int, int]]  # of each request: cached positions, new positions
ALL = {"min_tokens": 1, "repetition_penalty": 1.1, "presence_penalty": 0.1, "logit_bias": {0: 1.0}}
FILTERS = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
GREEDY = SamplingParams()
WAYS = (
    GREEDY,
    SamplingParams(temperature=1.0),
    SamplingParams(**FILTERS),
    SamplingParams(**ALL, logprobs=5),
    SamplingParams(**ALL, **FILTERS, logprobs=5),
)


@torch.inference_mode()
def warm_up(runner: FutureRunner, config: EngineConfig, max_len: int) -> None:
    """Runs steps of all kinds, with requests of up to `max_len` tokens; from graphs where they fit. They write into page 0,
    which no request owns yet: in an empty page table it is everybody's."""
    for step, params in steps(replace(config, max_model_len=max_len)):
        runner.forward(batch_of(step, params))


def steps(config: EngineConfig) -> Iterator[tuple[Step, SamplingParams]]:
    """What the flags allow, at the ends of every range, and at all sizes where something may change in between."""
    most, budget, longest = config.max_running, config.max_batch_tokens, config.max_model_len
    for tokens in token_sizes(budget):
        yield prompts(tokens, config), GREEDY
    decodes = {(length, 1) for length in doubled(longest)} | {(longest, n) for n in doubled(most)} | {(1, most)}
    for length, count in sorted(decodes):
        step = [(length - 1, 1), *[(0, 1)] * (min(count, budget) - 1)]
        yield step, GREEDY
        yield beside(step[: most - 1], 0, config), GREEDY
    few = [(0, 2)] * min(most - 1, budget // 4)
    for prefix, others in product((0, longest // 2), ([], few)):  # chunks of one length, or of very different ones
        yield beside(others, prefix, config, budget), GREEDY
    for params, count in product(WAYS, {1, min(16, most), most}):
        yield [(0, 1)] * min(count, budget), params
    yield prompts(min(budget, longest), config), SamplingParams(prompt_logprobs=5)


def beside(step: Step, prefix: int, config: EngineConfig, most: int = 0) -> Step:
    """The step, shortened where there is no room, and one chunk more; together so many tokens, or just too many for a graph."""
    step = step[: config.max_batch_tokens - 2]
    taken = sum(extend for _, extend in step)
    room = max(most or config.graph_max_tokens + 1, taken + 2)
    room = min(room, config.max_batch_tokens) - taken
    room = min(room, config.max_model_len - prefix)
    return [*step, (prefix, room)] if room > 1 else step


def prompts(tokens: int, config: EngineConfig) -> Step:
    """As few prompts as hold so many tokens."""
    full, rest = divmod(tokens, config.max_model_len)
    step = [(0, config.max_model_len)] * full + [(0, rest)] * bool(rest)
    return step[: config.max_running]


def doubled(longest: int) -> list[int]:
    """1, 2, 4, … and the longest."""
    return [*(1 << i for i in range((longest - 1).bit_length())), longest]


def batch_of(step: Step, params: SamplingParams) -> Batch:
    """The step as a scheduler would hand it out, all of its requests sampled."""
    picks = []
    for uid, (prefix, extend) in enumerate(step):
        req = Req(uid, [0] * (prefix + extend), params, uid, prefix + extend, frozenset({0}))
        req.cached_len = prefix
        picks.append((req, extend))
    return Batch.build(picks, np.arange(len(picks)))
