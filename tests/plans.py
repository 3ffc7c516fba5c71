"""A plan for the tests of what reads one."""

from typing import Any

from maxstack.models.flops import Count
from maxstack.plan.report import Plan
from maxstack.plan.roofline import Roofline

PEAK = 1000.0


def plan(**changes: Any) -> Plan:
    """A step of 1,000 tokens in at least 0.5 s on 4 devices, with half of their peak."""
    known: dict[str, Any] = dict(
        config="run", topology="v5e:2x2", chip="TPU v5 lite", devices=4, mesh={}, batch_size=10,
        seq_len=100, parameters=1, memory={"code": 1}, needed=1, usable=2, buffers=(),
        flops={"all": Count(0.5 * 0.5 * PEAK * 4, 2.0 * PEAK)}, products={}, flows=(),
        roofline=Roofline(0.5, 0.0, 0.0, {}), peak=PEAK, bubble=0.0, seconds={},
    )  # fmt: skip
    return Plan(**known | changes)
