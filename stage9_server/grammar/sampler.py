"""A sampler around another one: tokens that a request's grammar rules out are out of the draw."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par
from torch import Tensor

from stage2_req.parts import Sampler
from stage2_req.req import Req, Samples, upload
from stage2_req.sampling import top_logprobs
from stage7_radix.params import RequestParams
from stage9_server.grammar.compiler import Compiler


@dataclass(eq=False)
class State:
    """How far a request's text has come in its grammar."""

    matcher: LLMatcher
    seen: int = 0  # tokens of the output


class GrammarSampler:
    """Owns the state of every request with a grammar. It follows from the request's tokens alone, so a retraction changes
    nothing. A batch without such requests goes straight to the sampler inside.

    The grammar decides where the text ends: from there on, only the model's end tokens are left.
    """

    def __init__(self, sampler: Sampler, compiler: Compiler):
        self.sampler, self.compiler, self.executor = sampler, compiler, LLExecutor()
        self.states: WeakKeyDictionary[Req, State] = WeakKeyDictionary()

    def __call__(self, logits: Tensor, reqs: Sequence[Req]) -> Samples:
        """logits [S, V] -> one token for each of S requests; log-probabilities are still the model's own."""
        if not any(map(grammar_of, reqs)):
            return self.sampler(logits, reqs)
        bits = upload(self.masks(reqs, logits.shape[1]), logits.device).view(torch.uint8)
        place = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
        allowed = (bits[:, :, None] & place != 0).flatten(1)[:, : logits.shape[1]]
        masked = torch.where(allowed, logits, -math.inf)
        samples = self.sampler(masked, reqs)
        if samples.logprobs is not None:
            samples.logprobs = top_logprobs(logits, samples.tokens, samples.logprobs[1].shape[1])
        return samples

    def draw(self, logits: Tensor, inv_temperature: Tensor, key_low: Tensor, key_high: Tensor) -> Tensor:
        """Only for requests without a grammar, since others are not `plain`."""
        return self.sampler.draw(logits, inv_temperature, key_low, key_high)

    def masks(self, reqs: Sequence[Req], vocab_size: int) -> np.ndarray:
        """Which tokens may come next: a bit for each, [S, ceil(V / 32)] int32. Without a grammar, all."""
        masks = allocate_token_bitmask(len(reqs), vocab_size)  # all bits are set
        bound = [(i, req, self.follow(req).matcher) for i, req in enumerate(reqs) if grammar_of(req)]
        work = [(matcher, i) for i, _, matcher in bound if not matcher.is_error()]
        try:
            fill_next_token_bitmask_par(self.executor, work, masks)
        except ValueError:  # one of them has come to a limit; which one shows when they are asked one by one
            for matcher, i in work:
                with suppress(ValueError):
                    fill_next_token_bitmask(matcher, masks, i)
        for i, req, matcher in bound:
            if matcher.is_error():  # whoever owns the loop looks for it; until then the text can only end
                self.compiler.failed.setdefault(req.uid, matcher.get_error().strip())
                masks[i] = 0
                for token in self.compiler.eos_ids:
                    masks[i, token // 32] |= np.uint32(1 << token % 32).view(np.int32)
        return masks

    def follow(self, req: Req) -> State:
        """Its state after all tokens that it has."""
        if req not in self.states:
            self.states[req] = State(self.compiler.matcher(grammar_of(req)))
        state = self.states[req]
        if new := req.token_ids[req.prompt_len + state.seen :]:
            state.matcher.consume_tokens(new)
            state.seen += len(new)
        return state


def grammar_of(req: Req) -> str:
    return req.params.grammar if isinstance(req.params, RequestParams) else ""
