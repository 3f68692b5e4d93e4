"""One engine over several ranks: all of them run the same scheduler on the same inputs, and so decide the same.

Rank 0 is the one that callers talk to. It tells the others, in one message a step, what was asked of it since the last
one; and it samples for all. Nothing else is agreed upon: no rank's decision depends on anything that another might see
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
from stage2_req.engine import Engine, Stats
from stage2_req.params import SamplingParams
from stage2_req.req import Output, Req
from stage2_req.sampling import Sampler, Samples
from stage7_radix.params import RequestParams
from stage8_tp.ranks import Alone, Ranks


class Add(Struct, tag=True):
    prompt_ids: list[int]
    params: RequestParams


class Abort(Struct, tag=True):
    uid: int


class Step(Struct, tag=True):
    pass


class Generate(Struct, tag=True):
    prompts: list[list[int]]
    params: list[RequestParams]


class Close(Struct, tag=True):
    pass


Call = Add | Abort | Step | Generate | Close
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[Call]).decode


class RankSampler:
    """Stage 2's sampler on rank 0, whose tokens all ranks get, on the device.

    Every rank has the same logits and could draw for itself; but a last bit that differs, on another kind of GPU say,
    would let the ranks part company without a word.
    """

    def __init__(self, sampler: Sampler, ranks: Ranks | Alone):
        self.sampler, self.ranks = sampler, ranks

    def __call__(self, logits: Tensor, reqs: list[Req]) -> Samples:
        if self.ranks.rank == 0:
            samples = self.sampler(logits, reqs)
        else:
            samples = Samples(torch.empty(len(reqs), dtype=torch.int64, device=logits.device))
        self.ranks.broadcast(samples.tokens)
        return samples

    def draw_raw(self, logits: Tensor, numbers: Tensor) -> Tensor:
        return self.ranks.broadcast(self.sampler.draw_raw(logits, numbers))


class TPEngine:
    """An engine's interface on rank 0; on the others only `follow`. Both hold an ordinary engine, of this rank's part."""

    def __init__(self, engine: Engine, ranks: Ranks | Alone):
        self.engine, self.ranks = engine, ranks
        self.model, self.device, self.scheduler = engine.model, engine.device, engine.scheduler
        self.cache, self.runner = engine.cache, engine.runner
        self.untold: list[Call] = []  # what this engine has done and the others have yet to do

    # --- on rank 0 ---

    def add(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a request; returns its uid. Raises UserError if it can't be served, and then nothing has changed."""
        uid = self.engine.add(prompt_ids, params)
        self.untold.append(Add(ints(prompt_ids), without_seed(params)))
        return uid

    def abort(self, uid: int) -> bool:
        """End a request without a further token; False if it is not here (any more)."""
        found = self.engine.abort(uid)
        if found:
            self.untold.append(Abort(uid))
        return found

    def has_work(self) -> bool:
        return self.engine.has_work()

    def step(self) -> list[Output]:
        """Compute one batch; returns its tokens. Without work nothing is sent, and the others sleep on."""
        if not self.has_work():
            return []
        self.tell(Step())
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
        self.tell(Generate([ints(prompt) for prompt in prompts], [without_seed(p) for p in params]))
        return self.engine.generate(prompts, params, progress)

    def close(self) -> None:
        """The others return from `follow`."""
        self.tell(Close())

    def tell(self, call: Call) -> None:
        self.ranks.tell(encode([*self.untold, call]))
        self.untold.clear()

    # --- on the others ---

    def follow(self) -> None:
        """Do what rank 0 does, in the same order, until it closes."""
        engine, closed = self.engine, False
        while not closed:
            for call in decode(self.ranks.tell()):
                match call:
                    case Add(prompt_ids, params):
                        engine.add(prompt_ids, params)
                    case Abort(uid):
                        engine.abort(uid)
                    case Step():
                        engine.step()
                    case Generate(prompts, params):
                        with contextlib.suppress(UserError):  # rank 0 raises the same
                            engine.generate(prompts, params)
                    case Close():
                        closed = True


def ints(ids: Sequence[int]) -> list[int]:
    return [int(token) for token in ids]


def without_seed(params: SamplingParams) -> SamplingParams:
    """Only rank 0 draws, and a seed may have more digits than a message can carry."""
    return replace(params, seed=None)
