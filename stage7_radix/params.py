"""What a request says about sharing, besides how to sample."""

from dataclasses import dataclass

from stage2_req.params import SamplingParams


@dataclass(frozen=True)
class RequestParams(SamplingParams):
    cache_salt: str = ""  # cached prefixes are shared only among requests of equal salt
