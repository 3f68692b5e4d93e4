"""What /metrics shows: the API server's own counts, and the scheduler's as last reported. One registry per app.

The names are SGLang's, with the label `model_name`, so that its dashboard shows them. The counts are kept as plain numbers,
because some are touched for every token; prometheus_client turns them into its text when it is asked for.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from stage9_server.messages import EngineStats, Piece
from stage9_server.observe.logs import log

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)  # seconds
ITL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)
E2E_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)

# name -> (kind, help, value)
FROM_STATS = {
    "num_running_reqs": (GaugeMetricFamily, "Sequences that compute", lambda s: s.running),
    "num_queue_reqs": (GaugeMetricFamily, "Sequences in the queue", lambda s: s.waiting),
    "token_usage": (GaugeMetricFamily, "Share of the KV pool in use, 0 to 1", lambda s: s.usage),
    "cache_hit_rate": (
        GaugeMetricFamily,
        "Share of the prompts' tokens that the prefix cache had, since the start",
        lambda s: s.hit_tokens / max(1, s.prompt_tokens),
    ),
    "pages_free": (GaugeMetricFamily, "Pages of the KV pool that no request holds", lambda s: s.free_pages),
    "pages": (GaugeMetricFamily, "Pages of the KV pool", lambda s: s.num_pages),
    "steps": (CounterMetricFamily, "Steps of the engine", lambda s: s.steps),
    "computed_tokens": (CounterMetricFamily, "Positions computed", lambda s: s.computed_tokens),
    "num_retracted_requests": (CounterMetricFamily, "Sequences thrown out for want of pages", lambda s: s.retracted),
}


class Histogram:
    def __init__(self, buckets: tuple[float, ...]):
        self.buckets, self.counts, self.sum = buckets, [0] * (len(buckets) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.buckets, value)] += times
        self.sum += value * times


class Metrics:
    def __init__(self, model: str, stats: Callable[[], EngineStats | None]):
        self.model, self.stats = model, stats
        self.requests: Counter[tuple[str, int]] = Counter()  # (endpoint, status)
        self.finished: Counter[str] = Counter()  # sequences, by reason
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.in_flight = 0  # sequences
        self.ttft, self.itl, self.e2e = Histogram(TTFT_BUCKETS), Histogram(ITL_BUCKETS), Histogram(E2E_BUCKETS)
        self.queue = Histogram(TTFT_BUCKETS)
        self.looked_at, self.seen_tokens = time.perf_counter(), 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """All of it, in prometheus_client's terms."""
        counters = {
            "prompt_tokens": ("Tokens of prompts", self.prompt_tokens),
            "cached_tokens": ("Those that the prefix cache had", self.cached_tokens),
            "generation_tokens": ("Tokens handed out", self.output_tokens),
            "num_requests": ("Sequences that have ended", self.finished.total()),
            "num_aborted_requests": ("Those whose client left, or that failed", self.finished["abort"]),
        }
        for name, (text, value) in counters.items():
            yield self.family(CounterMetricFamily, name, text, value)
        yield self.family(GaugeMetricFamily, "gen_throughput", "Output tokens/s since the last look", self.throughput())
        yield self.family(GaugeMetricFamily, "sequences_in_flight", "Sequences that clients wait for", self.in_flight)
        histograms = {
            "time_to_first_token_seconds": ("From the request to its first token", self.ttft),
            "inter_token_latency_seconds": ("Between two tokens of a sequence", self.itl),
            "e2e_request_latency_seconds": ("From the request to a sequence's last token", self.e2e),
            "queue_time_seconds": ("From a sequence's arrival at the engine to its admission", self.queue),
        }
        for name, (text, histogram) in histograms.items():
            family = HistogramMetricFamily(f"sglang:{name}", text, labels=["model_name"])
            edges = [*map(str, map(float, histogram.buckets)), "+Inf"]
            buckets = list(zip(edges, accumulate(histogram.counts), strict=True))
            family.add_metric([self.model], buckets, histogram.sum)
            yield family
        if stats := self.stats():
            for name, (kind, text, value) in FROM_STATS.items():
                yield self.family(kind, name, text, value(stats))
        ended = CounterMetricFamily(
            "sglang:finish_reasons", "Sequences that have ended, and why", labels=["model_name", "reason"]
        )
        for reason, count in self.finished.items():
            ended.add_metric([self.model, reason], count)
        yield ended
        requests = CounterMetricFamily("sglang:http_requests", "HTTP requests", labels=["endpoint", "status"])
        for (endpoint, status), count in self.requests.items():
            requests.add_metric([endpoint, str(status)], count)
        yield requests

    def throughput(self) -> float:
        now = time.perf_counter()
        result = (self.output_tokens - self.seen_tokens) / max(1e-3, now - self.looked_at)
        self.looked_at, self.seen_tokens = now, self.output_tokens
        return result

    def family(self, kind: type[Metric], name: str, text: str, value: float) -> Metric:
        family = kind(f"sglang:{name}", text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family


class Watch:
    """One call, for metrics and log, from its beginning to its end (a context manager)."""

    def __init__(self, metrics: Metrics, request_id: str, uids: list[int], n: int):
        """uids: n for each prompt."""
        self.metrics, self.request_id, self.n, self.started_at = metrics, request_id, n, time.perf_counter()
        self.told_at: dict[int, float] = {}  # uid -> when its newest token came
        self.last: dict[int, Piece | None] = dict.fromkeys(uids)  # its newest piece
        self.first_token: float | None = None  # seconds
        self.output_tokens = 0

    def __enter__(self) -> "Watch":
        self.metrics.in_flight += len(self.last)
        return self

    def count(self, pieces: list[Piece]) -> None:
        """One piece for a sequence. Tokens that came together share the time since the last one; behind a first token no time
        has passed.
        """
        metrics, now = self.metrics, time.perf_counter()
        for piece in pieces:
            self.last[piece.uid] = piece
            if piece.queue_seconds is not None:
                metrics.queue.observe(piece.queue_seconds)
            if new := len(piece.token_ids):
                metrics.output_tokens += new
                self.output_tokens += new
                if last := self.told_at.get(piece.uid):
                    metrics.itl.observe((now - last) / new, new)
                else:
                    metrics.ttft.observe(now - self.started_at)
                    metrics.itl.observe(0.0, new - 1)
                    self.first_token = self.first_token or now - self.started_at
                self.told_at[piece.uid] = now
            if piece.finish_reason:
                metrics.finished[piece.finish_reason] += 1
                metrics.e2e.observe(now - self.started_at)

    def __exit__(self, *_) -> None:
        metrics, pieces = self.metrics, list(self.last.values())
        metrics.in_flight -= len(pieces)
        prompts = [[piece for piece in pieces[i : i + self.n] if piece] for i in range(0, len(pieces), self.n)]
        prompt_tokens = sum(group[0].prompt_tokens for group in prompts if group)
        cached_tokens = sum(min(piece.cached_tokens for piece in group) for group in prompts if group)
        metrics.prompt_tokens += prompt_tokens
        metrics.cached_tokens += cached_tokens
        reasons = [piece.finish_reason if piece and piece.finish_reason else "abort" for piece in pieces]
        metrics.finished["abort"] += sum(not piece or not piece.finish_reason for piece in pieces)
        log.info(
            "request %s: prompt %d, cached %d, output %d tokens; first token %s, total %.3f s; %s",
            self.request_id, prompt_tokens, cached_tokens, self.output_tokens,
            "-" if self.first_token is None else f"{self.first_token:.3f} s",
            time.perf_counter() - self.started_at, ", ".join(dict.fromkeys(reasons)),
        )  # fmt: skip
