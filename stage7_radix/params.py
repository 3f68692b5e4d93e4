"""What a request asks for, besides how to sample: with which requests it shares prefixes."""

from dataclasses import dataclass

from stage2_req.params import SamplingParams


@dataclass(frozen=True)
class RequestParams(SamplingParams):
    cache_salt: str = ""  # cached prefixes are shared only among requests of equal salt
