"""Beginnings of Python functions, which a model of code goes on from."""

import random
from typing import Any

NAMES = "add build check close count find get join load make open parse read run send set".split()


def prompts(index: int) -> dict[str, Any]:
    """`def` and a name, at one of two depths."""
    draw = random.Random(index)
    return {"prompt": f"\n{draw.choice(('', '    '))}def {draw.choice(NAMES)}_"}
