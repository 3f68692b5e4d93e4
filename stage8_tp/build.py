"""Stage 8 in one place: stage 7's engine on every rank, over this rank's part of the model."""

from common.config import EngineConfig
from stage2_req.engine import Engine
from stage2_req.runner import ModelRunner
from stage2_req.sampling import Sampler
from stage3_kvcache.kv_pool import KVCachePool
from stage5_paged.attention import PagedAttention
from stage5_paged.cache import PagedCacheManager
from stage5_paged.scheduler import PagedScheduler
from stage5_paged.sizing import pool_tokens
from stage6_cudagraph.graph_runner import GraphRunner, GraphSampler
from stage6_cudagraph.overlap import OverlapEngine
from stage7_radix.cache import RadixCacheManager
from stage7_radix.order import PrefixFirst
from stage8_tp.engine import RankSampler, TPEngine  # NEW
from stage8_tp.ranks import Alone, Ranks, join  # NEW
from stage8_tp.shard import load_shard  # NEW


def build_engine(config: EngineConfig) -> TPEngine:
    return build_rank(config, join(config.tp, config.device))


def build_rank(config: EngineConfig, ranks: Ranks | Alone) -> TPEngine:
    model, m = load_shard(config, ranks)  # the whole model's shape; this rank's part of it
    config, (tokens,) = m.config, min(ranks.share([pool_tokens(m)]))
    size, manager = config.page_size, RadixCacheManager if config.radix else PagedCacheManager
    cache = manager(tokens // size, size, config.max_running, config.max_model_len, m.device)
    pool = KVCachePool(m, tokens + size)  # one page beyond the allocator's range takes what padding rows write
    runner = ModelRunner(m.model, PagedAttention(m.kernels, pool, cache, m.device))
    sampler = RankSampler(Sampler(m.kernels.ops), ranks)
    if config.graph:
        runner = GraphRunner(runner, sampler, config)
        sampler = GraphSampler(runner)
    fcfs, engine = PagedScheduler(cache, config.max_batch_tokens), OverlapEngine if config.overlap else Engine
    scheduler = PrefixFirst(fcfs, cache) if config.order == "prefix" else fcfs
    return TPEngine(engine(model, scheduler, cache, runner, sampler, m.device, config.seed), ranks)
