"""Stage 7 in one place: stage 6 with a cache manager that shares prefixes."""

from common.checkpoint import Loaded, load
from common.config import EngineConfig
from stage2_req.engine import Engine
from stage2_req.parts import Sampler
from stage2_req.sampling import GumbelSampler
from stage4_batch.scheduler import first_come
from stage5_paged.cache import PagedCacheManager
from stage5_paged.sizing import pool_tokens
from stage6_cudagraph import build as stage6
from stage7_radix.cache import RadixCacheManager  # NEW
from stage7_radix.order import LongestPrefixFirst  # NEW


def build_engine(config: EngineConfig) -> Engine:
    m = load(config)
    return assemble(m, pool_tokens(m), GumbelSampler(m.kernels.ops))


def assemble(m: Loaded, tokens: int, sampler: Sampler) -> Engine:
    """The parts put together, around a cache manager for so many tokens."""
    config, size = m.config, m.config.page_size
    manager = RadixCacheManager if config.radix else PagedCacheManager
    cache = manager(tokens // size, size, config.max_running, config.max_model_len, m.device)
    order = LongestPrefixFirst(cache) if config.order == "prefix" else first_come
    return stage6.assemble(m, cache, sampler, order)
