"""Stage 3 in one place: the frame of stage 2, with a memory."""

from common.checkpoint import load
from common.config import EngineConfig
from stage2_req.engine import Engine
from stage2_req.runner import ModelRunner
from stage2_req.sampling import GumbelSampler
from stage2_req.scheduler import FCFSScheduler
from stage3_kvcache.attention import CachedAttention  # NEW
from stage3_kvcache.cache import SingleCacheManager  # NEW
from stage3_kvcache.kv_pool import KVCachePool  # NEW


def build_engine(config: EngineConfig) -> Engine:
    m = load(config)
    cache = SingleCacheManager(m.config.max_model_len)
    pool = KVCachePool(m, m.config.max_model_len)
    runner = ModelRunner(m.model, CachedAttention(m.kernels, pool, m.device), GumbelSampler(m.kernels.ops))
    return Engine(m.shape, FCFSScheduler(cache), cache, runner, m.device, m.config.seed)
