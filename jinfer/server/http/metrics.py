"""Prometheus metrics, under vLLM's names with the prefix `jinfer`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jinfer.engine.engine_stats import Stats
from jinfer.engine.output.completion import Chunk, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABEL = "model_name"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_LAGS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_PERIOD = 0.05  # seconds between two measurements of the event loop's lag

_HISTOGRAMS = {
    "time_to_first_token_seconds": "from a request's arrival to its first token",
    "inter_token_latency_seconds": "between two pieces of an answer",
    "e2e_request_latency_seconds": "from a request's arrival to its last token",
    "request_queue_time_seconds": "waiting time of a request for a slot",
    "request_prefill_time_seconds": "from its slot to its first token",
    "request_decode_time_seconds": "from its first token to its last",
}
_GAUGES: Mapping[str, tuple[str, Callable[[Stats], float]]] = {
    "num_requests_running": ("requests that have a slot", lambda s: s.running),
    "num_requests_waiting": ("requests that wait for a slot", lambda s: s.waiting),
    "kv_cache_blocks": ("blocks of the KV cache", lambda s: s.blocks),
    "kv_cache_blocks_held": ("blocks that requests hold", lambda s: s.blocks_held),
    "kv_cache_usage_perc": (
        "share of KV cache blocks that requests hold",
        lambda s: s.blocks_held / s.blocks if s.blocks else 0.0,
    ),
    "prefix_offload_ram_bytes": (
        "bytes of offloaded blocks in host memory",
        lambda s: s.offload_ram_bytes,
    ),
    "prefix_offload_disk_bytes": (
        "bytes of offloaded blocks on disk",
        lambda s: s.offload_disk_bytes,
    ),
}
_COUNTERS: Mapping[str, tuple[str, Callable[[Stats], float]]] = {
    "prefix_cache_queries": (
        "prompt tokens looked up in the prefix cache",
        lambda s: s.prompt_tokens,
    ),
    "prefix_cache_hits": ("prompt tokens found in the prefix cache", lambda s: s.cached_tokens),
    "prompt_tokens": ("prompt tokens", lambda s: s.prompt_tokens),
    "generation_tokens": ("new tokens", lambda s: s.new_tokens),
    "num_preemptions": ("preempted requests", lambda s: s.preemptions),
    "spec_decode_num_drafts": ("verified drafts", lambda s: s.drafts),
    "spec_decode_num_draft_tokens": ("draft tokens", lambda s: s.draft_tokens),
    "spec_decode_num_accepted_tokens": (
        "accepted draft tokens",
        lambda s: s.accepted_tokens,
    ),
    "prefix_offload_saved_blocks": ("offloaded blocks", lambda s: s.saved_blocks),
    "prefix_offload_saved_bytes": ("bytes of offloaded blocks", lambda s: s.saved_bytes),
    "prefix_offload_restored_blocks": (
        "restored blocks",
        lambda s: s.restored_blocks,
    ),
    "prefix_offload_restored_bytes": ("bytes of restored blocks", lambda s: s.restored_bytes),
    "prefix_offload_lost_blocks": (
        "offloaded blocks that were damaged or missing",
        lambda s: s.lost_blocks,
    ),
    "compilations": ("programs compiled, or found on disk", lambda s: s.compilations),
}


class Metrics:
    """Counters, gauges and histograms of the server.

    Attributes:
        stats: engine statistics of each loaded model.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stats: Callable[[], Mapping[str, Stats]] = dict
        self._before: dict[str, Stats] = {}
        self.histograms = {
            name: Histogram(
                f"jinfer:{name}", text, [_LABEL], registry=self.registry, buckets=_SECONDS
            )
            for name, text in _HISTOGRAMS.items()
        }
        self.success = Counter(
            "jinfer:request_success",
            "answers by finish reason",
            [_LABEL, "finished_reason"],
            registry=self.registry,
        )
        self.http = Counter(
            "jinfer:http_requests",
            "answers by route and status",
            ["route", "status"],
            registry=self.registry,
        )
        self.lag = Histogram(
            "jinfer:event_loop_lag_seconds",
            "delay of the event loop",
            registry=self.registry,
            buckets=_LAGS,
        )
        self.slowest = Gauge(
            "jinfer:event_loop_lag_max_seconds",
            "longest delay of the event loop",
            registry=self.registry,
        )
        self.tasks = Gauge("jinfer:tasks", "tasks of the event loop", registry=self.registry)
        self.registry.register(_StatsCollector(self))

    async def watch_loop(self) -> None:
        """Measure the event loop's lag until it is cancelled."""
        slowest = 0.0
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_PERIOD)
            late = max(0.0, time.perf_counter() - before - _PERIOD)
            slowest = max(slowest, late)
            self.lag.observe(late)
            self.slowest.set(slowest)
            self.tasks.set(len(asyncio.all_tasks()))

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def keep_totals(self, model: str, last: Stats) -> None:
        """Keep the totals of an unloaded model, so that counters never decrease."""
        self._before[model] = self._summed(model, last)

    def totals(self) -> dict[str, Stats]:
        """Return the statistics of each model, including its earlier loads."""
        return self._before | {name: self._summed(name, s) for name, s in self.stats().items()}

    def _summed(self, model: str, now: Stats) -> Stats:
        before = self._before.get(model)
        if before is None:
            return now
        still = {
            *("running", "waiting", "blocks", "blocks_held"),
            *("offload_ram_bytes", "offload_disk_bytes"),
        }
        names = [field.name for field in fields(Stats)]
        return Stats(
            **{n: getattr(now, n) + (0 if n in still else getattr(before, n)) for n in names}
        )


class _StatsCollector(Collector):
    """Reads the engines' statistics on each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        yield from self._families(self._metrics.totals(), _GAUGES, GaugeMetricFamily)
        yield from self._families(self._metrics.totals(), _COUNTERS, CounterMetricFamily)

    @staticmethod
    def _families(
        stats: Mapping[str, Stats],
        table: Mapping[str, tuple[str, Callable[[Stats], float]]],
        kind: type[GaugeMetricFamily | CounterMetricFamily],
    ) -> Iterator[Metric]:
        for name, (text, value) in table.items():
            family = kind(f"jinfer:{name}", text, labels=[_LABEL])
            for model, figures in stats.items():
                family.add_metric([model], value(figures))
            yield family


@dataclass
class RequestTimer:
    """Measures latencies of a request's answers: time to first token, time per output token.

    Attributes:
        metrics: receives the measurements.
        model: name of the model.
        reasons: finish reason of each answer.
        counts: tokens of each answer so far.
    """

    metrics: Metrics
    model: str
    reasons: dict[int, str] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    _begun: dict[int, float] = field(default_factory=dict)
    _first: dict[int, float] = field(default_factory=dict)
    _last: dict[int, float] = field(default_factory=dict)

    def begin(self, index: int) -> None:
        """Start the clock of an answer."""
        self._begun[index] = time.perf_counter()

    def chunk(self, index: int, chunk: Chunk) -> None:
        """Record a chunk of an answer."""
        now = time.perf_counter()
        if (last := self._last.get(index)) is None:
            self._first[index] = now
            self._observe("time_to_first_token_seconds", now - self._begun[index])
        else:
            self._observe("inter_token_latency_seconds", now - last)
        self._last[index] = now
        self.counts[index] = self.counts.get(index, 0) + len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self.reasons[index] = chunk.finish_reason

    def seconds(self, index: int) -> tuple[float, float]:
        """Return the seconds to an answer's first token, and from there to its latest token."""
        now = time.perf_counter()
        begun, first = self._begun.get(index, now), self._first.get(index, now)
        return first - begun, self._last.get(index, first) - first

    def end(self, index: int, usage: Usage) -> None:
        """Record a complete answer."""
        queued = usage.queue_seconds
        self._observe("e2e_request_latency_seconds", time.perf_counter() - self._begun[index])
        self._observe("request_queue_time_seconds", queued)
        self._observe("request_prefill_time_seconds", max(0.0, usage.prefill_seconds - queued))
        self._observe("request_decode_time_seconds", usage.decode_seconds)
        self.metrics.success.labels(self.model, self.reasons.get(index, "stop")).inc()

    def abort(self, index: int) -> None:
        """Record an answer whose client disconnected."""
        self.reasons[index] = "abort"
        self.metrics.success.labels(self.model, "abort").inc()

    def _observe(self, name: str, seconds: float) -> None:
        self.metrics.histograms[name].labels(self.model).observe(seconds)
