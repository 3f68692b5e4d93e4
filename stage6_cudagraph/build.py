"""Stage 6 in one place: steps replayed from graphs, the host one step ahead."""

from common.checkpoint import load
from common.config import EngineConfig
from stage2_req.engine import Engine
from stage2_req.runner import ModelRunner
from stage2_req.sampling import Sampler
from stage3_kvcache.kv_pool import KVCachePool
from stage5_paged.attention import PagedAttention
from stage5_paged.cache import PagedCacheManager
from stage5_paged.scheduler import PagedScheduler
from stage5_paged.sizing import pool_tokens
from stage6_cudagraph.graph_runner import GraphRunner, GraphSampler  # NEW
from stage6_cudagraph.overlap import OverlapEngine  # NEW


def build_engine(config: EngineConfig) -> Engine:
    m = load(config)
    tokens, size = pool_tokens(m), m.config.page_size
    cache = PagedCacheManager(tokens // size, size, m.config.max_running, m.config.max_model_len, m.device)
    pool = KVCachePool(m, tokens + size)  # one page beyond the allocator's range takes what padding rows write
    runner, sampler = ModelRunner(m.model, PagedAttention(m.kernels, pool, cache, m.device)), Sampler(m.kernels.ops)
    if m.config.graph:
        runner = GraphRunner(runner, sampler, m.config)
        sampler = GraphSampler(runner)
    engine = OverlapEngine if m.config.overlap else Engine
    scheduler = PagedScheduler(cache, m.config.max_batch_tokens)
    return engine(m.model.config, scheduler, cache, runner, sampler, m.device, config.seed)
