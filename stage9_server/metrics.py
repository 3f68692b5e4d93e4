"""What /metrics shows: the API server's own counts, and the scheduler's as last reported. One registry per app.

The counts are kept as plain numbers, because some are touched for every token; prometheus_client turns them into its
text when it is asked for.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from stage9_server.messages import EngineStats, Piece

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)  # seconds
ITL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)

# name -> (kind, help, value)
FROM_STATS = {
    "sglang_running_requests": (GaugeMetricFamily, "Sequences that compute", lambda s: s.running),
    "sglang_waiting_requests": (GaugeMetricFamily, "Sequences in the queue", lambda s: s.waiting),
    "sglang_kv_usage": (GaugeMetricFamily, "Share of the KV pool in use, 0 to 1", lambda s: s.usage),
    "sglang_pages_free": (GaugeMetricFamily, "Pages of the KV pool that no request holds", lambda s: s.pages_free),
    "sglang_pages": (GaugeMetricFamily, "Pages of the KV pool", lambda s: s.pages_total),
    "sglang_cache_hit_rate": (
        GaugeMetricFamily,
        "Share of the prompts' tokens that the prefix cache had, since the start",
        lambda s: s.cache_hit_tokens / max(1, s.cache_lookup_tokens),
    ),
    "sglang_steps": (CounterMetricFamily, "Steps of the engine", lambda s: s.steps),
    "sglang_computed_tokens": (CounterMetricFamily, "Positions computed", lambda s: s.computed_tokens),
    "sglang_retractions": (CounterMetricFamily, "Sequences thrown out for want of pages", lambda s: s.retracted),
}


class Histogram:
    def __init__(self, buckets: tuple[float, ...]):
        self.buckets, self.counts, self.sum = buckets, [0] * (len(buckets) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.buckets, value)] += times
        self.sum += value * times

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        edges = [*map(str, map(float, self.buckets)), "+Inf"]
        return HistogramMetricFamily(
            name, text, buckets=list(zip(edges, accumulate(self.counts), strict=True)), sum_value=self.sum
        )


class Metrics:
    def __init__(self, stats: Callable[[], EngineStats | None]):
        self.stats = stats
        self.requests: Counter[tuple[str, int]] = Counter()  # (endpoint, status)
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.in_flight = 0  # sequences
        self.ttft, self.itl = Histogram(TTFT_BUCKETS), Histogram(ITL_BUCKETS)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def count(self, pieces: list[Piece], told_at: dict[int, float | None], start: float) -> None:
        """The tokens in these pieces, and the time since their sequence's last one, or since the start. Updates told_at.

        Those that came together share that time; behind a first token no time has passed.
        """
        now, tokens = time.perf_counter(), {}
        for piece in pieces:
            if piece.num_tokens:
                tokens[piece.uid] = tokens.get(piece.uid, 0) + piece.num_tokens
        for uid, new in tokens.items():
            self.output_tokens += new
            if last := told_at[uid]:
                self.itl.observe((now - last) / new, new)
            else:
                self.ttft.observe(now - start)
                self.itl.observe(0.0, new - 1)
            told_at[uid] = now

    def count_prompts(self, usage: dict) -> None:
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """All of it, in prometheus_client's terms."""
        requests = CounterMetricFamily("sglang_requests", "HTTP requests", labels=["endpoint", "status"])
        for (endpoint, status), count in self.requests.items():
            requests.add_metric([endpoint, str(status)], count)
        yield requests
        yield CounterMetricFamily("sglang_prompt_tokens", "Tokens of prompts", self.prompt_tokens)
        yield CounterMetricFamily("sglang_cached_tokens", "Those that the prefix cache had", self.cached_tokens)
        yield CounterMetricFamily("sglang_output_tokens", "Tokens handed out", self.output_tokens)
        yield GaugeMetricFamily("sglang_sequences_in_flight", "Sequences that clients wait for", self.in_flight)
        yield self.ttft.family("sglang_time_to_first_token_seconds", "From the request to its first token")
        yield self.itl.family("sglang_inter_token_latency_seconds", "Between two tokens of a sequence")
        if stats := self.stats():
            for name, (kind, text, value) in FROM_STATS.items():
                yield kind(name, text, value(stats))
