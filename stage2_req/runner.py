"""One pass of the model over a batch."""

from torch import Tensor

from common.interfaces import Attention
from common.model import CausalLM
from stage2_req.req import Batch


class ModelRunner:
    """Runs the model eagerly: kernel by kernel, as Python comes to them."""

    def __init__(self, model: CausalLM, attention: Attention):
        self.model, self.attention, self.device = model, attention, model.norm.weight.device

    def run(self, batch: Batch) -> Tensor:
        """Logits [S, V] of the requests in batch.sampled."""
        batch.prepare(self.device)
        self.attention.plan(batch)
        hidden = self.model(batch.input_ids, batch.positions, self.attention)
        return self.model.head(hidden[batch.last_index])
