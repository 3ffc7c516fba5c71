"""Cost of a checkpoint of a large state: seconds that a save blocks the loop, seconds until it is
on disk, and seconds of a verified restore; beside Orbax's own save and restore of the same arrays,
which write and check no checksums. In turns, several rounds. A save blocks the loop by its call,
and by the longer next step, which may not overwrite the old state yet; here that step adds one to
each array.

example: python scripts/bench_checkpoint.py --rounds 5 --gigabytes 1 --json checkpoint.json
"""

import functools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import arguments

from maxstack.hardware import devices

devices.environment(None)

import jax  # noqa: E402
from orbax.checkpoint import v1 as ocp  # noqa: E402

from maxstack import sharding  # noqa: E402
from maxstack.checkpoint.store import Checkpoints, _flat  # noqa: E402
from maxstack.data.feed import Feed  # noqa: E402
from maxstack.run import Run, assemble  # noqa: E402
from maxstack.schema.config import Config  # noqa: E402

BYTES_A_WEIGHT = 12
"""Bytes in float32, with two moments."""
LAYERS, EMBED, HIDDEN = 8, 1024, 4096


def main() -> None:
    """Run everything, print the table, write the JSON."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the whole state")
    arguments.takes_json(parser)
    args = parser.parse_args()
    rounds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), _run(args.gigabytes, Path(name))
        state = jax.block_until_ready(run.init())
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        for number in range(args.rounds):
            for kind, measure in (
                ("a folder that all see", _ours),
                ("the host's own disk", _ours),
                ("Orbax, no checksums", _orbax),
            ):
                print(f"round {number + 1}/{args.rounds}: {kind}", file=sys.stderr, flush=True)
                own_folder = folder / kind.partition(",")[0].replace(" ", "-")
                state, seconds_of = measure(run, state, own_folder, kind)
                shutil.rmtree(own_folder)
                for figure, seconds in seconds_of.items():
                    rounds.setdefault(kind, {}).setdefault(figure, []).append(seconds)
    print(
        f"{size / 1e9:.2f} GB of state; medians of {args.rounds} rounds, the first of "
        "each left out where there are more"
    )
    print(
        f"{'':24} {'blocked, s':>10} {'on disk, s':>10} {'restored, s':>11} "
        f"{'first save blocked, s':>21}"
    )
    for kind, figures in rounds.items():
        middle = {
            figure: statistics.median(seconds[1:] or seconds) for figure, seconds in figures.items()
        }
        print(
            f"{kind:24} {middle['blocked']:10.3f} {middle['written']:10.2f} "
            f"{middle['restored']:11.2f} {figures['blocked'][0]:21.3f}"
        )
    arguments.write_json(args.json, {"bytes": size, "seconds": rounds})


def _run(gigabytes: float, folder: Path) -> Run:
    in_blocks = LAYERS * (3 * EMBED * HIDDEN + 4 * EMBED * EMBED)
    vocab = max(256, round((gigabytes * 1e9 / BYTES_A_WEIGHT - in_blocks) / (2 * EMBED)))
    block = {
        "mixer": {"kind": "attention", "heads": 16, "kv_heads": 16, "head_dim": 64},
        "mlp": {"kind": "gated", "hidden": HIDDEN},
    }
    if gigabytes < 0.2:
        sys.exit("--gigabytes: at least 0.2, of one layer")
    cfg = Config.model_validate(
        {
            "model": {
                "vocab": vocab,
                "embed": EMBED,
                "layers": min(LAYERS, int(gigabytes * 5)),
                "dtype": "float32",
                "blocks": {"block": block},
            },
            "data": {"seq_len": 64, "sources": [{"kind": "synthetic", "vocab": 256}]},
            "train": {"batch_size": 1},
            "run": {"output_dir": str(folder)},
            "checkpoint": {"every": 1, "keep": 1},
        }
    )
    return assemble(cfg, sharding.make_mesh(cfg.mesh, jax.devices()[:1]))


def _ours(run: Run, state: Any, folder: Path, kind: str) -> tuple[Any, dict[str, float]]:
    own = []
    if not kind.startswith("a folder"):
        own = [{"path": str(folder / "ssd"), "every": 1, "keep": 1, "replicate": 0}]
    cfg = run.cfg.model_validate(
        run.cfg.model_dump(mode="json")
        | {"checkpoint": {"every": 0 if own else 1, "keep": 1, "tiers": own}}
    )
    run = assemble(cfg, run.mesh)
    feed = Feed(cfg.data, run.batches.rows(1), 1)
    saves = Checkpoints(run, folder / "checkpoints", print)
    return _timed(
        state, lambda state: saves.save(1, state, feed, {}), saves.wait, lambda: saves.restore(feed)
    )


def _orbax(run: Run, state: Any, folder: Path, kind: str) -> tuple[Any, dict[str, float]]:
    wanted, saving = _flat(run.abstract), list[Any]()
    return _timed(
        state,
        lambda state: saving.append(
            ocp.save_checkpointables_async(folder / "1", {"state": _flat(state)})
        ),
        lambda: saving[0].result(),
        lambda: ocp.load_checkpointables(folder / "1", {"state": wanted}),
    )


def _timed(
    state: Any, save: Callable[[Any], Any], wait: Callable[[], Any], restore: Callable[[], Any]
) -> tuple[Any, dict[str, float]]:
    """The state after two steps, of which the first has no save before it, and the seconds of each
    phase. The state is donated."""
    begin = time.perf_counter()
    state = jax.block_until_ready(step(state))
    stepped = time.perf_counter()
    save(state)
    state = jax.block_until_ready(step(state))
    blocked = time.perf_counter()
    wait()
    written = time.perf_counter()
    copy = jax.block_until_ready(restore())
    restored = time.perf_counter()
    jax.tree.map(lambda leaf: leaf.delete(), copy)
    return state, {
        "blocked": blocked - stepped - (stepped - begin),
        "written": written - stepped,
        "restored": restored - written,
    }


@functools.partial(jax.jit, donate_argnums=0)
def step(state: Any) -> Any:
    """A step that reads and writes the whole state."""
    return jax.tree.map(lambda leaf: leaf + 1, state)


if __name__ == "__main__":
    main()
