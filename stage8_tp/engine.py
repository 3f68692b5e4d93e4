"""One engine over several ranks: all of them run the same scheduler on the same inputs, and so decide the same.

Rank 0 is the one that callers talk to. It broadcasts, in one message per step, what was asked of it since the last one;
and it samples for all. Nothing else is agreed upon: no rank's decision depends on anything that another might see
otherwise, be it a clock, the order of a set, or memory of its own.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from common.config import UserError
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams, token_ids
from stage2_req.parts import Sampler, Stats
from stage2_req.req import Output, Req, Samples
from stage7_radix.params import RequestParams
from stage8_tp.ranks import Ranks


class AddCall(Struct, tag=True):
    prompt_ids: list[int]
    params: RequestParams
    uid: int


class AbortCall(Struct, tag=True):
    uid: int


class StepCall(Struct, tag=True):
    pass


class GenerateCall(Struct, tag=True):
    prompts: list[list[int]]
    params: list[RequestParams]


class CloseCall(Struct, tag=True):
    pass


Call = AddCall | AbortCall | StepCall | GenerateCall | CloseCall
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[Call]).decode


class RankSampler:
    """Stage 2's sampler on rank 0, whose tokens are broadcast, on the device.

    Every rank has the same logits and could draw for itself; but a last bit that differs, on another kind of GPU say,
    would let the ranks diverge without an error.
    """

    def __init__(self, sampler: Sampler, ranks: Ranks):
        self.sampler, self.ranks = sampler, ranks

    def __call__(self, logits: Tensor, reqs: Sequence[Req]) -> Samples:
        if self.ranks.rank == 0:
            samples = self.sampler(logits, reqs)
        else:
            samples = Samples(torch.empty(len(reqs), dtype=torch.int64, device=logits.device))
        self.ranks.broadcast(samples.tokens)
        return samples

    def draw(self, logits: Tensor, inv_temperature: Tensor, key_low: Tensor, key_high: Tensor) -> Tensor:
        return self.ranks.broadcast(self.sampler.draw(logits, inv_temperature, key_low, key_high))


class TPEngine:
    """An engine's interface on rank 0; on the others only `follow`. Both hold an ordinary engine, of this rank's part."""

    def __init__(self, engine: Engine, ranks: Ranks):
        self.engine, self.ranks = engine, ranks
        # this rank's parts, for benchmarks and tests that look at them
        self.model, self.device, self.scheduler = engine.model, engine.device, engine.scheduler
        self.cache, self.runner = engine.cache, engine.runner
        self.pending: list[Call] = []  # what this engine has done and the others have yet to do

    # --- on rank 0 ---

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, uid: int | None = None) -> int:
        """Queue a request; returns its uid. Raises UserError if it can't be served, and then nothing has changed."""
        uid = self.engine.add(prompt_ids, params, uid)
        self.pending.append(AddCall(token_ids(prompt_ids, "the prompt"), without_seed(params), uid))
        return uid

    def abort(self, uid: int) -> bool:
        """End a request without a further token; False if it is not here (any more)."""
        found = self.engine.abort(uid)
        if found:
            self.pending.append(AbortCall(uid))
        return found

    def has_work(self) -> bool:
        return self.engine.has_work()

    def step(self) -> list[Output]:
        """Compute one batch; returns its tokens. Without work nothing is sent, and the others sleep on."""
        if not self.has_work():
            return []
        self.broadcast(StepCall())
        return self.engine.step()

    def stats(self) -> Stats:
        return self.engine.stats()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        progress: bool = False,
    ) -> list[Req]:
        """Run prompts to their end; returns their finished requests in the same order. One message in all."""
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        self.broadcast(
            GenerateCall([token_ids(prompt, "the prompt") for prompt in prompts], [without_seed(p) for p in params])
        )
        return self.engine.generate(prompts, params, progress)

    def close(self) -> None:
        """The others return from `follow`."""
        self.broadcast(CloseCall())

    def broadcast(self, call: Call) -> None:
        self.ranks.broadcast_bytes(encode([*self.pending, call]))
        self.pending.clear()

    # --- on the others ---

    def follow(self) -> None:
        """Do what rank 0 does, in the same order, until it closes."""
        engine, closed = self.engine, False
        while not closed:
            for call in decode(self.ranks.broadcast_bytes()):
                match call:
                    case AddCall(prompt_ids, params, uid):
                        engine.add(prompt_ids, params, uid)
                    case AbortCall(uid):
                        engine.abort(uid)
                    case StepCall():
                        engine.step()
                    case GenerateCall(prompts, params):
                        with contextlib.suppress(UserError):  # rank 0 raises the same
                            engine.generate(prompts, params)
                    case CloseCall():
                        closed = True


def without_seed(params: SamplingParams) -> SamplingParams:
    """Only rank 0 draws, and a seed may have more digits than a message can carry."""
    return replace(params, seed=None)
