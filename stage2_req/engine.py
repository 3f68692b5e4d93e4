"""The engine: takes requests in, drives the parts step by step, hands tokens out. It knows token ids, never text."""

from collections.abc import Sequence

import torch
from tqdm import tqdm

from common.config import ModelConfig, UserError
from stage2_req.params import SamplingParams, check_vocab, token_ids
from stage2_req.parts import CacheManager, Runner, Scheduler, Stats
from stage2_req.req import Batch, Output, Req, Samples


class Engine:
    def __init__(
        self,
        model: ModelConfig,
        scheduler: Scheduler,
        cache: CacheManager,
        runner: Runner,
        device: torch.device,
        seed: int = 0,
    ):
        self.model, self.device, self.seed = model, device, seed
        self.scheduler, self.cache, self.runner = scheduler, cache, runner
        self.next_uid = 0
        self.steps = self.computed_tokens = self.output_tokens = 0

    # --- for callers that stream: add, step, abort ---

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, uid: int | None = None) -> int:
        """Queue a request; returns its uid, the caller's or the next free number.

        Raises UserError if it can't be served, and then nothing has changed.
        """
        req = self.make_req(prompt_ids, params, self.next_uid if uid is None else uid)
        self.scheduler.add(req)
        self.next_uid = max(self.next_uid, req.uid + 1)
        return req.uid

    def abort(self, uid: int) -> bool:
        """End a request without a further token; False if it is not here (any more)."""
        return self.scheduler.abort(uid)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[Output]:
        """Compute one batch; returns its tokens."""
        batch = self.scheduler.schedule()
        return [] if batch is None else self.collect(batch, self.launch(batch))

    def stats(self) -> Stats:
        parts = vars(self.scheduler.stats()) | vars(self.cache.stats())
        return Stats(**parts, steps=self.steps, computed_tokens=self.computed_tokens, output_tokens=self.output_tokens)

    # --- for callers that wait ---

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        progress: bool = False,
    ) -> list[Req]:
        """Run prompts (lists of token ids) to their end; returns their finished requests in the same order."""
        if self.scheduler.has_work():
            raise UserError("generate needs an idle engine; step() the requests that are under way to their end first")
        if not isinstance(prompts, Sequence) or not isinstance(params, SamplingParams | Sequence):
            raise UserError(
                "generate takes a list of prompts, each a list of token ids, and SamplingParams for all or for each"
            )
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise UserError(
                f"there are {len(prompts)} prompts and {len(params)} params; give one for all, or one for each"
            )
        pairs = enumerate(zip(prompts, params, strict=True), self.next_uid)
        reqs = [self.make_req(ids, p, uid) for uid, (ids, p) in pairs]  # all are checked before any starts
        self.next_uid += len(reqs)
        for req in reqs:
            self.scheduler.add(req)
        try:
            with tqdm(total=len(reqs), unit="req", disable=not progress) as bar:
                while self.has_work():
                    if done := sum(output.finish_reason is not None for output in self.step()):
                        bar.set_postfix(tokens=self.output_tokens, refresh=False)
                        bar.update(done)
        except BaseException:  # Ctrl-C too: leave nothing behind
            for req in reqs:
                self.abort(req.uid)
            raise
        self.cache.check_integrity()
        return reqs

    # --- inside a step ---

    def make_req(self, prompt_ids: Sequence[int], params: SamplingParams, uid: int) -> Req:
        prompt, limit = token_ids(prompt_ids, "the prompt"), self.cache.max_len
        if not isinstance(params, SamplingParams):
            raise UserError(f"params is {params!r:.80}; it must be SamplingParams")
        if not isinstance(uid, int):
            raise UserError(f"uid is {uid!r:.80}; it must be a whole number")
        if not prompt:
            raise UserError("the prompt is empty; give at least one token")
        if len(prompt) > limit:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, but there is room for {limit}; shorten it, or raise max_model_len (and kv_tokens, where the pool is smaller)"
            )
        if min(prompt) < 0 or max(prompt) >= self.model.vocab_size:
            raise UserError(
                f"the prompt has token ids outside 0 to {self.model.vocab_size - 1}; was it encoded for another model?"
            )
        check_vocab(params, self.model.vocab_size)
        seed = params.seed if params.seed is not None else (self.seed << 40) + uid
        return Req(uid, prompt, params, seed, limit, self.model.eos_ids)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Samples:
        """Enqueue a step on the device. The lengths move now, before the tokens are known."""
        samples = self.runner.forward(batch)
        self.cache.commit(batch)
        for req in batch.sampled:
            req.device_len += 1
        self.steps += 1
        self.computed_tokens += batch.num_tokens
        return samples

    def collect(self, batch: Batch, samples: Samples) -> list[Output]:
        """Wait for a step's tokens and book them."""
        outputs = self.scheduler.update(batch, *samples.to_host())
        self.output_tokens += len(outputs)
        return outputs
