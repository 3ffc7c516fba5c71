"""Metrics of a server in Prometheus' text format, by vLLM's names."""

import bisect
import collections
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxstack.inference.engine import Engine

FIRST = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
BETWEEN = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
WHOLE = (0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)
"""Bounds of histograms, in seconds."""


class Histogram:
    """Counts of observations by bounds."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """Metrics of the requests that a service has answered."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.finished: collections.Counter[str] = collections.Counter()
        self.first = Histogram(FIRST)
        self.between = Histogram(BETWEEN)
        self.whole = Histogram(WHOLE)
        self.queued = Histogram(FIRST)

    def text(self, engine: "Engine", model: str) -> str:
        """Return all metrics, the engine's too, labelled with the model's name."""
        # The escapes of Prometheus' text format; a model's name may hold anything.
        escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        return "\n".join(self._lines(engine, f'model_name="{escaped}"')) + "\n"

    def _lines(self, engine: "Engine", label: str) -> Iterator[str]:
        scheduler = engine.scheduler
        pools = [pool for pools in scheduler.pools for pool in pools]
        pages = sum(pool.size for pool in pools)
        used = pages - sum(pool.available for pool in pools)
        gauges = {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": used / pages if pages else 0.0,
        }
        counters = {
            "prefix_cache_queries": scheduler.queried,
            "prefix_cache_hits": scheduler.hits,
            "num_preemptions": scheduler.preemptions,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "spec_decode_num_draft_tokens": engine.drafted,
            "spec_decode_num_accepted_tokens": engine.accepted,
        }
        for name, value in gauges.items():
            yield f"# TYPE vllm:{name} gauge"
            yield f"vllm:{name}{{{label}}} {value}"
        for name, count in counters.items():
            yield f"# TYPE vllm:{name} counter"
            yield f"vllm:{name}_total{{{label}}} {count}"
        yield "# TYPE vllm:request_success counter"
        for reason in ("stop", "length", "abort", "error"):
            labels = f'{label},finished_reason="{reason}"'
            yield f"vllm:request_success_total{{{labels}}} {self.finished[reason]}"
        histograms = {
            "time_to_first_token_seconds": self.first,
            "inter_token_latency_seconds": self.between,
            "e2e_request_latency_seconds": self.whole,
            "request_queue_time_seconds": self.queued,
        }
        for name, histogram in histograms.items():
            yield from histogram_lines(f"vllm:{name}", histogram, label)


def histogram_lines(name: str, histogram: Histogram, label: str) -> Iterator[str]:
    """Yield the lines of a histogram, with the type first."""
    yield f"# TYPE {name} histogram"
    # Buckets of Prometheus are cumulative.
    total = 0
    for bound, count in zip([*histogram.bounds, "+Inf"], histogram.counts, strict=True):
        total += count
        yield f'{name}_bucket{{{label},le="{bound}"}} {total}'
    yield f"{name}_sum{{{label}}} {histogram.total}"
    yield f"{name}_count{{{label}}} {total}"
