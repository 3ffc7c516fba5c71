"""Digits to be sorted, on which the recipes of reinforcement learning show that it learns."""

import random
from typing import Any

DIGITS = 8


def prompts(index: int) -> dict[str, Any]:
    """Eight digits and `=`, with the same digits in order as the `answer`; and as `completion`, of
    which the first recipe learns a little."""
    draw = random.Random(index)
    digits = [draw.randrange(10) for _ in range(DIGITS)]
    answer = "".join(map(str, sorted(digits)))
    return {"prompt": "".join(map(str, digits)) + "=", "answer": answer, "completion": answer}
