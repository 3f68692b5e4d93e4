"""How likely the model finds the tokens of a prompt: `SamplingParams.prompt_logprobs`.

The logits at a position say how likely each token is to come next, and a step computes the hidden states of all
positions anyway. So a prompt is *scored* by running the head at more of them than the last: P positions of a step, whose
next token is the prompt's too.
"""

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stage2_req.req import Batch, Logprobs, Req, upload
from stage2_req.sampling import top_logprobs

PIECE = 256  # positions whose logits are in memory at the same time


class Span(NamedTuple):
    req: Req
    positions: range
    row: int  # of the first position among the T tokens of the step


def spans(batch: Batch) -> list[Span]:
    """The scored positions of a step, by request."""
    if batch.num_decodes == len(batch.reqs) == len(batch.sampled):  # no prompt goes on after this step
        return []
    found = []
    for i, req in enumerate(batch.reqs):
        if req.params.prompt_logprobs is not None:
            positions = range(int(batch.prefix_lens[i]), min(int(batch.seq_lens[i]), req.prompt_len - 1))
            if positions:
                found.append(Span(req, positions, int(batch.extend_lens[:i].sum())))
    return found


def rows(batch: Batch) -> np.ndarray:
    """Where the scored positions are among the T tokens, [P] int64."""
    return np.array([row + i for _, positions, row in spans(batch) for i in range(len(positions))], np.int64)


def score(head: Callable[[Tensor], Tensor], hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the P tokens that follow hidden [P, hidden_size], and of the likeliest ones there."""
    scored = spans(batch)
    following = [token for req, span, _ in scored for token in req.token_ids[span.start + 1 : span.stop + 1]]
    tokens = upload(np.array(following), hidden.device)
    most = max(req.params.prompt_logprobs for req, *_ in scored)
    pieces = zip(hidden.split(PIECE), tokens.split(PIECE), strict=True)
    parts = [top_logprobs(head(states), ids, most) for states, ids in pieces]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def book(batch: Batch, logprobs: list[Logprobs]) -> None:
    """Give each request its part of the P entries, cut to what it asked for."""
    entries = iter(logprobs)
    for req, span, _ in spans(batch):
        most = req.params.prompt_logprobs
        # in their place: after a retraction the same positions come again
        req.prompt_logprobs[span.start + 1 : span.stop + 1] = [
            Logprobs(entry.chosen, entry.top[:most]) for entry in islice(entries, len(span))
        ]
