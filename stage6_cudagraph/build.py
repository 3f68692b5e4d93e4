"""Stage 6 in one place: steps replayed from graphs, the host one step ahead."""

from common.checkpoint import Loaded, load
from common.config import EngineConfig
from common.device import timed_start
from stage2_req.engine import Engine
from stage2_req.parts import Sampler
from stage2_req.sampling import GumbelSampler
from stage3_kvcache.kv_pool import KVCachePool
from stage4_batch.attention import PagedAttention
from stage4_batch.scheduler import Order, first_come
from stage5_paged.cache import PagedCacheManager
from stage5_paged.scheduler import PagedScheduler
from stage5_paged.sizing import pool_tokens
from stage6_cudagraph.graph_runner import GraphRunner  # NEW
from stage6_cudagraph.overlap import FutureRunner, OverlapEngine  # NEW
from stage6_cudagraph.warm_up import warm_up  # NEW


def build_engine(config: EngineConfig) -> Engine:
    m = load(config)
    size = m.config.page_size
    cache = PagedCacheManager(pool_tokens(m) // size, size, m.config.max_running, m.config.max_model_len, m.device)
    return assemble(m, cache, GumbelSampler(m.kernels.ops))


def assemble(m: Loaded, cache: PagedCacheManager, sampler: Sampler, order: Order = first_come) -> Engine:
    """The parts put together, around a cache manager."""
    config, num_pages = m.config, cache.stats().num_pages
    pool = KVCachePool(m, (num_pages + 1) * config.page_size)  # a page beyond the manager's takes what padding writes
    attention = PagedAttention(m.kernels, pool, cache.page_table)
    runner = FutureRunner(m.model, attention, sampler, config.max_running)
    if config.graph:
        runner = GraphRunner(runner, config)
    if m.device.type == "cuda":
        with timed_start("warm-up", m.device):
            warm_up(runner, config, cache.max_len)
    scheduler = PagedScheduler(cache, config.max_batch_tokens, order)
    engine = OverlapEngine if config.overlap else Engine
    return engine(m.shape, scheduler, cache, runner, m.device, config.seed)
