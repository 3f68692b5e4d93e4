"""Stage 4 in one place: many requests per step, each in a region of its own."""

from common.checkpoint import load
from common.config import EngineConfig
from stage2_req.engine import Engine
from stage2_req.runner import ModelRunner
from stage2_req.sampling import GumbelSampler
from stage3_kvcache.kv_pool import KVCachePool
from stage4_batch.attention import PagedAttention  # NEW
from stage4_batch.cache import FixedCacheManager  # NEW
from stage4_batch.scheduler import BatchScheduler  # NEW


def build_engine(config: EngineConfig) -> Engine:
    m = load(config)
    cache = FixedCacheManager(m.config.max_running, m.config.max_model_len, m.device)
    pool = KVCachePool(m, m.config.max_running * m.config.max_model_len)
    attention = PagedAttention(m.kernels, pool, cache.page_table)
    runner = ModelRunner(m.model, attention, GumbelSampler(m.kernels.ops))
    scheduler = BatchScheduler(cache, m.config.max_batch_tokens)
    return Engine(m.shape, scheduler, cache, runner, m.device, m.config.seed)
