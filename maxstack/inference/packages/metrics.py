"""Metrics of the packages that are served, in Prometheus' text format."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from maxstack.inference.server.metrics import FIRST, Histogram, histogram_lines

BOUNDS = (0.0005, *FIRST)
"""Bounds of histograms, in seconds."""
COUNTERS = {
    "requests": "requests that named the model",
    "failures": "of these, answered with an error",
    "batches": "runs of a program",
    "rows": "rows of requests in these",
    "padded_rows": "rows of zeros beside them",
}


@dataclasses.dataclass
class SignatureMetrics:
    """Metrics of one signature of one version."""

    model: str
    version: str
    requests: int = 0
    failures: int = 0
    batches: int = 0
    rows: int = 0
    padded_rows: int = 0
    waited: Histogram = dataclasses.field(default_factory=lambda: Histogram(BOUNDS))
    """Seconds between a request's arrival and the begin of its batch."""
    latency: Histogram = dataclasses.field(default_factory=lambda: Histogram(BOUNDS))
    """Seconds between the end of a request's body and its answer."""

    @property
    def labels(self) -> str:
        """Labels of each of its lines."""
        return f'model="{_escaped(self.model)}",version="{self.version}"'


def text(metrics: Iterable[SignatureMetrics], waiting: Mapping[tuple[str, str], int]) -> str:
    """Return all metrics; `waiting` are the lengths of queues by model and version."""
    return "\n".join(_lines([*metrics], waiting)) + "\n"


def _lines(
    metrics: list[SignatureMetrics], waiting: Mapping[tuple[str, str], int]
) -> Iterator[str]:
    for name, meaning in COUNTERS.items():
        yield f"# HELP maxstack_package_{name}_total {meaning}"
        yield f"# TYPE maxstack_package_{name}_total counter"
        for each in metrics:
            yield f"maxstack_package_{name}_total{{{each.labels}}} {getattr(each, name)}"
    yield "# HELP maxstack_package_queue requests that wait for a batch"
    yield "# TYPE maxstack_package_queue gauge"
    for each in metrics:
        if (length := waiting.get((each.model, each.version))) is not None:
            yield f"maxstack_package_queue{{{each.labels}}} {length}"
    for name in ("waited", "latency"):
        lines = (
            line
            for each in metrics
            for line in histogram_lines(
                f"maxstack_package_{name}_seconds", getattr(each, name), each.labels
            )
        )
        # Prometheus wants the type of a metric once, before its lines.
        yield from dict.fromkeys(lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
