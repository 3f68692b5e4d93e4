"""One pass of the model over a batch, and of the sampler over what comes out."""

from functools import partial

import numpy as np
from torch import Tensor

from common.model import CausalLM
from stage2_req.parts import Attention, Sampler
from stage2_req.prompt_logprobs import rows, score
from stage2_req.req import Batch, ForwardBatch, Samples, upload


class ModelRunner:
    """Runs the model eagerly: kernel by kernel, as Python comes to them."""

    def __init__(self, model: CausalLM, attention: Attention, sampler: Sampler):
        self.model, self.attention, self.sampler = model, attention, sampler
        self.device = model.norm.weight.device

    def forward(self, batch: Batch) -> Samples:
        """One token for each request in batch.sampled."""
        hidden = self.compute(self.prepare(batch))
        return self.sample(hidden, batch)

    def prepare(self, batch: Batch) -> ForwardBatch:
        """The batch for the device."""
        all_sampled = len(batch.sampled) == batch.num_tokens
        return ForwardBatch(
            input_ids=self.input_ids(batch),
            positions=upload(batch.positions(), self.device),
            last_indices=None if all_sampled else upload(np.append(batch.last_indices(), rows(batch)), self.device),
            metadata=self.attention.plan(batch),
        )

    def input_ids(self, batch: Batch) -> Tensor:
        """[T] int64"""
        return upload(batch.input_ids(), self.device)

    def compute(self, step: ForwardBatch) -> Tensor:
        """Hidden states [S + P, hidden_size] of the tokens whose logits are sampled, and of the P that are scored."""
        hidden = self.model(step.input_ids, step.positions, partial(self.attention, step.metadata))
        return hidden if step.last_indices is None else hidden[step.last_indices]

    def sample(self, hidden: Tensor, batch: Batch) -> Samples:
        """What `compute` returns -> a token for each request in batch.sampled."""
        count = len(batch.sampled)
        samples = self.sampler(self.model.head(hidden[:count]), batch.sampled)
        if len(hidden) > count:
            samples.prompt_logprobs = score(self.model.head, hidden[count:], batch)
        return samples
