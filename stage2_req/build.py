"""Stage 2 in one place: every part in its simplest form."""

from common.checkpoint import load
from common.config import EngineConfig
from stage2_req.attention import FullAttention  # NEW
from stage2_req.cache import NullCacheManager  # NEW
from stage2_req.engine import Engine  # NEW
from stage2_req.runner import ModelRunner  # NEW
from stage2_req.sampling import GumbelSampler  # NEW
from stage2_req.scheduler import FCFSScheduler  # NEW


def build_engine(config: EngineConfig) -> Engine:
    m = load(config)
    cache = NullCacheManager(m.config.max_model_len)
    runner = ModelRunner(m.model, FullAttention(m.kernels, m.device), GumbelSampler(m.kernels.ops))
    return Engine(m.shape, FCFSScheduler(cache), cache, runner, m.device, m.config.seed)
