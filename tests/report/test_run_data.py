"""What a run's folder says of it now."""

import json

import pytest

from maxstack.report.run_data import RunData


def test_speed_is_all_tokens_over_all_seconds(tmp_path):
    """Steps of unequal length: the mean of their rates would be 556 tokens a second."""
    steps = [(1000, 1.0, 0.5), (1000, 9.0, 0.1)]
    rows = [
        {
            "step": number,
            "loss": float(number),
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds,
            "mfu": share,
        }
        for number, (tokens, seconds, share) in enumerate(steps, 1)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    data = RunData(tmp_path).data([])
    assert data["rate"] == [pytest.approx(2000 / 10), "tokens/s"]
    assert data["mfu"] == pytest.approx((0.5 * 1 + 0.1 * 9) / 10)
    assert data["loss"] == 1.5
