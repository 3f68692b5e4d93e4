"""Stage 8 in one place: stage 7's engine on every rank, over this rank's part of the model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

from common.checkpoint import load
from common.config import EngineConfig, UserError
from stage2_req.engine import Engine
from stage2_req.parts import Sampler
from stage2_req.sampling import GumbelSampler
from stage5_paged.sizing import pool_tokens
from stage7_radix import build as stage7
from stage8_tp.engine import RankSampler, TPEngine  # NEW
from stage8_tp.ranks import Alone, Ranks, join  # NEW
from stage8_tp.shard import RankPart  # NEW


def build_engine(config: EngineConfig) -> Engine | TPEngine:
    return build_rank(config, join(config.tp, config.device))


def build_rank(
    config: EngineConfig, ranks: Ranks | Alone, sampler: Callable[[ModuleType], Sampler] = GumbelSampler
) -> Engine | TPEngine:
    """One rank alone has stage 7's engine, and nothing is encoded or sent. sampler: is made from the small operations."""
    if ranks.world == 1:
        m = load(config)
        return stage7.assemble(m, pool_tokens(m), sampler(m.kernels.ops))
    if ranks.staged:
        if config.graph:
            raise UserError("a CUDA graph can't capture what ranks that share a GPU send to each other; use --no-graph")
        config = replace(config, graph=False)
    m = load(replace(config, device=str(ranks.device)), partial(RankPart, ranks))
    tokens = min(own for (own,) in ranks.all_gather_ints([pool_tokens(m)]))  # the least that any rank has room for
    return TPEngine(stage7.assemble(m, tokens, RankSampler(sampler(m.kernels.ops), ranks)), ranks)
