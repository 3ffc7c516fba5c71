"""trl/: values and gradients that TRL's own losses give for fixed arrays.

losses.json holds the value of each loss by name, arrays.npz the arrays that go in and, as
NAME/grad_ARRAY, the gradients.
"""

import importlib.metadata
import json
from pathlib import Path

import numpy as np

from golden import trl_losses, trl_policies

NAMES, CLOSE = ["trl"], 1e-6


def make(name: str, out: Path) -> None:
    """Write both files."""
    made = trl_losses.Goldens()
    for add in (*trl_losses.FAMILIES, *trl_policies.FAMILIES):
        add(made)
    (out / "trl").mkdir()
    versions = {package: importlib.metadata.version(package) for package in ("trl", "torch")}
    text = json.dumps({**versions, "losses": made.losses}, indent=1)
    (out / "trl" / "losses.json").write_text(text + "\n")
    np.savez_compressed(out / "trl" / "arrays.npz", **made.arrays)
