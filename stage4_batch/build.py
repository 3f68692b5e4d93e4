"""Stage 4 in one place: many requests a step, each in a slot of its own."""

from common.checkpoint import load
from common.config import EngineConfig
from stage2_req.engine import Engine
from stage2_req.runner import ModelRunner
from stage2_req.sampling import Sampler
from stage3_kvcache.kv_pool import KVCachePool
from stage4_batch.attention import SlotAttention  # NEW
from stage4_batch.cache import SlotCacheManager  # NEW
from stage4_batch.scheduler import BatchScheduler  # NEW


def build_engine(config: EngineConfig) -> Engine:
    m = load(config)
    cache = SlotCacheManager(m.config.max_running, m.config.max_model_len)
    pool = KVCachePool(m, m.config.max_running * m.config.max_model_len)
    runner = ModelRunner(m.model, SlotAttention(m.kernels, pool, cache, m.device))
    scheduler = BatchScheduler(cache, m.config.max_batch_tokens)
    return Engine(m.model.config, scheduler, cache, runner, Sampler(m.kernels.ops), m.device, config.seed)
