"""Random histories of an engine: what was asked of it, which texts came, and whether they are the right ones."""

import random
from collections.abc import Callable, Sequence

from stage2_req.params import SamplingParams


class History:
    """Of one engine. `want` and `texts` are by uid; what ended, and why, is in `ended`."""

    def __init__(self, engine, rng: random.Random):
        self.engine, self.rng = engine, rng
        self.want: dict[int, tuple[list[int], str]] = {}
        self.texts: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}

    def add(
        self,
        prompt: Sequence[int],
        text: Sequence[int],
        n: int,
        stop_chance: float,
        params: Callable[[set[int]], SamplingParams],
    ) -> None:
        """Ask for n tokens of what is known to be `text`; now and then one of these is a stop token, given to `params`."""
        stop = {text[self.rng.randrange(len(text))]} if self.rng.random() < stop_chance else set()
        end = next((i + 1 for i, token in enumerate(text[:n]) if token in stop), n)
        reason = "stop_token" if stop & set(text[:n]) else "max_tokens"
        uid = self.engine.add(prompt, params(stop))
        self.want[uid], self.texts[uid] = (text[:end], reason), []

    def abort_one(self, chance: float) -> None:
        if (live := [uid for uid in self.want if uid not in self.ended]) and self.rng.random() < chance:
            uid = self.rng.choice(live)
            assert self.engine.abort(uid)
            self.ended[uid] = "abort"

    def step(self) -> None:
        for output in self.engine.step():
            assert output.uid not in self.ended
            self.texts[output.uid].append(output.token_id)
            if output.finish_reason:
                self.ended[output.uid] = output.finish_reason
        self.engine.cache.check_integrity()

    def check(self) -> None:
        """At the end: every text is the one that was wanted, that of an aborted request a beginning of it; nothing is held."""
        for uid, (text, reason) in self.want.items():
            if self.ended[uid] == "abort":
                assert self.texts[uid] == text[: len(self.texts[uid])]
            else:
                assert (self.texts[uid], self.ended[uid]) == (text, reason)
        assert self.engine.stats().usage == 0
