"""Makes tests/goldens/trl: values and gradients that TRL's own losses give for fixed arrays.

losses.json holds the value of each loss by name, arrays.npz the arrays that go in and, as
NAME/grad_ARRAY, the gradients. Needs trl: `make oracle` makes an environment.

example: python scripts/make_trl_goldens.py --check
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from bench import arguments

OUT = Path(__file__).resolve().parent.parent / "tests/goldens/trl"
CLOSE = 1e-6


def main() -> int:
    """Write the goldens; or compare them, and 1 where one differs."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    from bench import trl_losses, trl_policies

    made = trl_losses.Goldens()
    for add in (*trl_losses.FAMILIES, *trl_policies.FAMILIES):
        add(made)
    losses, arrays = made.losses, made.arrays
    if check:
        known = json.loads((OUT / "losses.json").read_text())["losses"]
        held = dict(np.load(OUT / "arrays.npz"))
        bad = [
            *(known.keys() ^ losses.keys()),
            *(held.keys() ^ arrays.keys()),
            *(name for name, loss in losses.items() if not _close(loss, known.get(name))),
            *(name for name, made in arrays.items() if not _close(made, held.get(name))),
        ]
        if bad:
            print(f"not as in {OUT.name}: {', '.join(sorted(bad))}", file=sys.stderr)
        return 1 if bad else 0
    OUT.mkdir(exist_ok=True)
    versions = {name: importlib.metadata.version(name) for name in ("trl", "torch")}
    (OUT / "losses.json").write_text(json.dumps(versions | {"losses": losses}, indent=1) + "\n")
    np.savez_compressed(OUT / "arrays.npz", **arrays)
    return 0


def _close(made: Any, known: Any) -> bool:
    return known is not None and np.allclose(made, known, rtol=CLOSE, atol=CLOSE)


if __name__ == "__main__":
    sys.exit(main())
