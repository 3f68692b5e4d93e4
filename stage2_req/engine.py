"""The engine: takes requests in, drives the parts step by step, hands tokens out. It knows token ids, never text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from common.config import ModelConfig, UserError
from common.device import upload
from common.interfaces import CacheManager, Runner, Scheduler
from common.interfaces import Sampler as SamplerPart
from stage2_req.params import SamplingParams, check_vocab
from stage2_req.req import Batch, Output, Req
from stage2_req.sampling import Samples


@dataclass
class Stats:
    running: int = 0  # requests
    waiting: int = 0
    usage: float = 0.0  # share of the cache in use, 0 to 1
    steps: int = 0
    computed_tokens: int = 0  # positions that went through the model
    output_tokens: int = 0


class Engine:
    def __init__(
        self,
        model: ModelConfig,
        scheduler: Scheduler,
        cache: CacheManager,
        runner: Runner,
        sampler: SamplerPart,
        device: torch.device,
        seed: int = 0,
    ):
        self.model, self.device, self.seed = model, device, seed
        self.scheduler, self.cache, self.runner, self.sampler = scheduler, cache, runner, sampler
        self.next_uid = 0
        self.counts = Stats()

    # --- for callers that stream: add, step, abort ---

    def add(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a request; returns its uid. Raises UserError if it can't be served, and then nothing has changed."""
        req = self.make_req(self.next_uid, prompt_ids, params)
        self.next_uid += 1
        self.scheduler.add(req)
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
        queues = self.scheduler
        return replace(self.counts, running=len(queues.running), waiting=len(queues.waiting), usage=self.cache.usage())

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
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise UserError(
                f"there are {len(prompts)} prompts and {len(params)} params; give one for all, or one for each"
            )
        pairs = enumerate(zip(prompts, params, strict=True), self.next_uid)
        reqs = [self.make_req(uid, ids, p) for uid, (ids, p) in pairs]  # all are checked before any starts
        self.next_uid += len(reqs)
        for req in reqs:
            self.scheduler.add(req)
        try:
            with tqdm(total=len(reqs), unit="req", disable=not progress) as bar:
                while self.has_work():
                    if done := sum(output.finish_reason is not None for output in self.step()):
                        bar.set_postfix(tokens=self.counts.output_tokens, refresh=False)
                        bar.update(done)
        except BaseException:  # Ctrl-C too: leave nothing behind
            for req in reqs:
                self.abort(req.uid)
            raise
        self.cache.check_integrity()
        return reqs

    # --- inside a step ---

    def make_req(self, uid: int, prompt_ids: Sequence[int], params: SamplingParams) -> Req:
        prompt, limit = [int(token) for token in prompt_ids], self.cache.max_len
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
        """Enqueue a step on the device. The lengths move now, before anybody knows the tokens."""
        batch.input_ids = self.input_ids(batch)
        samples = self.sampler(self.runner.run(batch), batch.sampled)
        self.cache.commit(batch)
        for req in batch.sampled:
            req.device_len += 1
        self.counts.steps += 1
        self.counts.computed_tokens += batch.num_tokens
        return samples

    def input_ids(self, batch: Batch) -> Tensor:
        """The tokens [T] at the new positions."""
        ids = []
        for req, start, end in zip(batch.reqs, batch.starts.tolist(), batch.ends.tolist(), strict=True):
            ids += req.token_ids[start:end]
        return upload(np.array(ids), self.device)

    def collect(self, batch: Batch, samples: Samples) -> list[Output]:
        """Wait for a step's tokens and book them."""
        outputs = self.scheduler.update(batch, *samples.to_host())
        self.counts.output_tokens += len(outputs)
        return outputs
