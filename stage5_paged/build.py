"""Stage 5 in one place: pages instead of fixed regions, and retraction when they run out."""

from common.checkpoint import load
from common.config import EngineConfig
from stage2_req.engine import Engine
from stage2_req.runner import ModelRunner
from stage2_req.sampling import GumbelSampler
from stage3_kvcache.kv_pool import KVCachePool
from stage4_batch.attention import PagedAttention
from stage5_paged.cache import PagedCacheManager  # NEW
from stage5_paged.scheduler import PagedScheduler  # NEW
from stage5_paged.sizing import pool_tokens  # NEW


def build_engine(config: EngineConfig) -> Engine:
    m = load(config)
    tokens, size = pool_tokens(m), m.config.page_size
    cache = PagedCacheManager(tokens // size, size, m.config.max_running, m.config.max_model_len, m.device)
    attention = PagedAttention(m.kernels, KVCachePool(m, tokens), cache.page_table)
    runner = ModelRunner(m.model, attention, GumbelSampler(m.kernels.ops))
    scheduler = PagedScheduler(cache, m.config.max_batch_tokens)
    return Engine(m.shape, scheduler, cache, runner, m.device, m.config.seed)
