"""What a request asks for, besides how to sample: with which requests it shares prefixes, and which texts will do."""

from dataclasses import dataclass
from functools import cached_property

from common.config import UserError
from stage2_req.params import SamplingParams


@dataclass(frozen=True)
class RequestParams(SamplingParams):
    cache_salt: str = ""  # cached prefixes are shared only among requests of equal salt
    grammar: str = ""  # the text has to follow it; for a sampler that reads it (the server's)

    def __post_init__(self):
        super().__post_init__()
        if self.grammar and (self.min_tokens or self.ignore_eos):
            raise UserError("a grammar says where the text ends; leave out min_tokens and ignore_eos")

    @cached_property
    def needs_text(self) -> bool:
        return bool(self.grammar) or super().needs_text

    @cached_property
    def plain(self) -> bool:
        return not self.grammar and super().plain
