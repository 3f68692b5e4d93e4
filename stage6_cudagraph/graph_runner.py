"""The runner that replays recorded steps.

A graph repeats the same kernels on the same addresses. So its inputs live in static buffers, and a step is padded up to
the next size that was recorded.
"""

from torch import Tensor

from common.config import EngineConfig
from stage2_req.req import Batch, Req
from stage2_req.runner import ModelRunner
from stage2_req.sampling import Sampler, Samples
from stage6_cudagraph.decode_graphs import DecodeGraphs
from stage6_cudagraph.mixed_graphs import MixedGraphs
from stage6_cudagraph.recorder import Recorder


class GraphRunner:
    """Replays a graph where one fits; hands everything else to the eager runner.

    Without a GPU the recorded functions are called instead: same buffers, same padding, no speed.
    """

    def __init__(self, eager: ModelRunner, sampler: Sampler, config: EngineConfig):
        self.eager, self.model, self.sampler = eager, eager.model, sampler
        max_batch = min(config.graph_max_batch, config.max_running)
        max_tokens = min(config.graph_max_tokens, config.max_batch_tokens)
        if not eager.attention.kernels.records_varlen:
            max_tokens = 0
        recorder = Recorder(eager.device)
        self.mixed = MixedGraphs(eager, recorder, max_batch, max_tokens)
        self.decode = DecodeGraphs(eager, sampler, recorder, max_batch)
        recorder.report()
        self.num_replays = 0

    def run(self, batch: Batch) -> Tensor:
        """Logits [S, V]; of a replay they stay valid until the next one."""
        for graphs in (self.decode, self.mixed):
            if graphs.fit(batch):
                self.num_replays += 1
                return graphs.run(batch)
        return self.eager.run(batch)


class GraphSampler:
    """Stage 2's sampler, less the work that the last replay has done already."""

    def __init__(self, runner: GraphRunner):
        self.runner = runner

    def __call__(self, logits: Tensor, reqs: list[Req]) -> Samples:
        """logits [S, V] -> one token for each of S requests; those of a replay stay valid until the next one."""
        decode = self.runner.decode
        if logits is decode.drawn:
            return Samples(decode.ids[: len(reqs)])
        return self.runner.sampler(logits, reqs)
