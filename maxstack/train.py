"""`python -m maxstack.train CONFIG [key=value ...]`: the story of a run, top to bottom; loop.py has
what happens in each step.

Processes find each other, then what can be wrong is checked on shapes, before any array exists: the
mesh, the step's trace, memory, flags, weights. Only then is the run's folder claimed, the state
restored or made, and the step compiled meanwhile. Whatever has to end with the run is put on one
ExitStack, in the order in which it was begun.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import maxstack
from maxstack import cli
from maxstack.cluster.exit_codes import CRASHED
from maxstack.command import CONFIG, OVERRIDES, argument, command, load_config
from maxstack.errors import ConfigError
from maxstack.faults import preemption, supervisor
from maxstack.hardware import devices, memory
from maxstack.report import trace_requests

if TYPE_CHECKING:
    from maxstack.callbacks import Callback
    from maxstack.schema.config import Config, RunConfig


GRACE = 5.0
"""Seconds that a process has to end after an error."""
TRACKERS_GRACE = 1.0
"""The same after a run in which a tracker failed."""
_TRAINS = threading.Lock()
_is_program = False
"""Whether this process ends with its run."""


def program(argv: Sequence[str]) -> int:
    """Run `main` as a process of its own. An error that is not the user's exits with 70, so that a
    supervisor tries again."""
    if {"-h", "--help", "--supervise"} & {*argv}:
        return main(argv)
    global _is_program
    _is_program = True
    # First of all: it executes the program anew, which loses what was done before. A step of the
    # reference work took 0.75 in place of 0.98 s.
    memory.use_huge_pages()
    gc.set_threshold(200_000, 20, 100)  # else the search for cycles takes a twentieth of the start
    # Before what takes long, so that a signal during imports and compilation is heard.
    preemption.listen()
    trace_requests.listen()
    # After `listen`: the parent's death comes as a SIGTERM, which needs its handler.
    supervisor.follow_parent()
    try:
        code = main(argv)
    except Exception as error:
        explained = (
            hasattr(error, "exit_code") or isinstance(error, BrokenPipeError) or cli.lasting(error)
        )
        code = 1 if cli.lasting(error) else getattr(error, "exit_code", CRASHED)
        # The timer first: at its exit Python waits for threads of libraries, some of which never
        # end.
        _end_anyway(code, GRACE)
        if explained:
            raise
        traceback.print_exc()
        return code
    import jax

    from maxstack.report.trackers import FAULTY

    if FAULTY:  # several processes wait for one another first
        _end_anyway(code, TRACKERS_GRACE if jax.process_count() == 1 else GRACE)
    return code


@command(
    "train",
    "Train a model from one YAML file. Run it again to resume from the last checkpoint.",
    "train configs/quickstart.yml train.steps=200 run.name=short",
    CONFIG,
    OVERRIDES,
    argument(
        "--force-config",
        metavar="KEY",
        action="append",
        default=[],
        help="resume even if KEY, or a key below it, has changed since the checkpoint; repeatable",
    ),
    argument(
        "--supervise",
        action="store_true",
        help="run as a supervisor that restarts training after a crash, a hang or a lost peer, "
        "with a growing delay; to stop the run, signal every supervisor",
    ),
    argument(
        "--max-restarts",
        type=int,
        default=10,
        metavar="N",
        help="with --supervise: give up after N restarts in a row without a new step (default: 10)",
    ),
)
def main(args: argparse.Namespace) -> int:
    """Train -> the exit code: 0 when all steps are done, 42 when a signal ended the run, which the
    same command resumes."""
    if args.max_restarts < 0:
        raise ConfigError(f"--max-restarts {args.max_restarts}: must be 0 or more")
    cfg = load_config(args)
    if args.supervise:
        forced = [part for key in args.force_config for part in ("--force-config", key)]
        command = [sys.executable, "-m", "maxstack.train", args.config, *args.overrides, *forced]
        return supervisor.run(command, Path(cfg.run.output_dir) / cfg.run.name, args.max_restarts)
    from maxstack import elastic

    def once(cfg: "Config", left: Sequence[Any] | None) -> int:
        with contextlib.ExitStack() as ending:
            return _run(cfg, ending, args.force_config, left)[0]

    return elastic.train(cfg, once)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run that has ended without an error."""

    folder: Path
    """The run's folder, which other functions and commands take as a model."""
    finished: bool
    """All steps are done, or evaluations stopped improving."""
    why: str
    """Why it ended before its last step; "" where it did not."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl in order, of all sessions, without steps that were done
        again."""
        from maxstack.report.history import FILE
        from maxstack.report.metrics import rows_that_count

        lines = (self.folder / FILE).read_text(encoding="utf-8").splitlines()
        return rows_that_count([*map(json.loads, lines)], sys.maxsize - 1)


def train(
    config: "Config | str | Path | dict[str, Any]",
    *,
    callbacks: "Sequence[Callback]" = (),
    force_config: Sequence[str] = (),
) -> Trained:
    """Train in this process as `maxstack train` does, to the end of the run; what the run's folder
    has of an earlier call is resumed. An interrupt (Ctrl-C, a stopped cell) lets the step under way
    end, saves, and returns; a second one is a KeyboardInterrupt at once. `force_config`: keys that
    may have changed since the checkpoint. ConfigError and DataError as on the command line."""
    from maxstack import elastic
    from maxstack.callbacks import check_callbacks

    check_callbacks(callbacks)
    cfg = config if isinstance(config, maxstack.Config) else maxstack.load(config)
    # Signals, the watchdog and Orbax's saves belong to the process.
    if not _TRAINS.acquire(blocking=False):
        raise ConfigError(
            "a run is training in this process already; start this one when it has ended, or in a "
            "process of its own"
        )
    why = ""

    def once(cfg: "Config", left: Sequence[Any] | None) -> int:
        nonlocal why
        with contextlib.ExitStack() as ending:
            code, why = _run(cfg, ending, force_config, left, callbacks)
            return code

    try:
        code = elastic.train(cfg, once)
    finally:
        _TRAINS.release()
    return Trained(Path(cfg.run.output_dir) / cfg.run.name, not code, why)


def _run(
    cfg: "Config",
    ending: contextlib.ExitStack,
    forced: Sequence[str] = (),
    left: Sequence[Any] | None = None,
    callbacks: "Sequence[Callback]" = (),
) -> tuple[int, str]:
    """One whole run, in its folder -> its exit code, and why it ended early. `ending` is closed
    however the run ends, so that a save under way is not lost. `forced`: keys that may have changed
    since the checkpoint. `left`: the devices that are left where some were lost."""
    started = time.monotonic()
    if cfg.runtime == "pathways":
        from maxstack.cluster import pathways

        pathways.environment()
    devices.environment(cfg.run.virtual_devices)  # before jax is imported
    import jax

    from maxstack import alike, startup
    from maxstack.cluster import membership
    from maxstack.compiled_steps import CompiledSteps
    from maxstack.hardware.compiling import keep_programs
    from maxstack.loop import Loop, Records
    from maxstack.meter import Meter
    from maxstack.report import run_folder
    from maxstack.report.ledger import Ledger
    from maxstack.report.log import Log
    from maxstack.run import assemble

    # Before jax looks for devices: after that it joins no other processes.
    membership.join(cfg, alike.facts)
    in_this_thread = _is_program and _on_one_cpu_device(cfg.run) and memory.run_in_this_thread()
    # Watched from here on: until all have joined, the roll call itself names who is missing.
    heart = startup.start_watchdog(cfg, ending, _is_program)
    # A profile shows names and lines, and the cache would give the program of older source.
    keep_programs(cfg.run.compilation_cache, named=cfg.train.profile is not None)

    mesh = startup.make_mesh(cfg, left)
    cfg, dealt = startup.count_steps(cfg, mesh)
    run = assemble(cfg, mesh)
    steps = CompiledSteps(run)
    # Before anything is compiled or written: a plan that cannot fit is told in seconds.
    steps.check_memory(startup.engine_bytes(run))
    startup.check_can_start(run)
    startup.prepare_tokenizer(cfg)
    startup.check_weights(run)

    first = jax.process_index() == 0
    # Only now: most mistakes were found above, before the run's folder is touched.
    folder = run_folder.claim(cfg, first, ending)
    ledger = Ledger(folder, first, started, doing=heart.doing if heart else None)
    ending.callback(ledger.stop)
    feed, maker = startup.open_feed(run, folder, ending, dealt)
    meter = Meter(run, feed)
    ending.push(lambda kind, error, _: startup.explain_memory(error, meter))
    log = Log(folder, cfg.train.steps, first)
    ending.push(log.ended)

    records = Records(folder, ledger, log, meter)
    loop = Loop(run, steps, feed, maker, records, ending, callbacks)
    loop.restore(forced)
    if loop.is_complete:
        return loop.close_complete(), ""
    loop.start(in_this_thread)
    while loop.goes_on:
        loop.run_step()
    return loop.finish(), loop.left_why


def _end_anyway(code: int, seconds: float) -> None:
    """End the process after this many seconds. Libraries leave threads and exit handlers behind
    that nothing ends: Orbax where it cannot write, trackers whose server does not answer."""

    def end() -> None:
        time.sleep(seconds)
        sys.stdout.flush()
        os._exit(code)

    threading.Thread(target=end, daemon=True).start()


def _on_one_cpu_device(run: "RunConfig") -> bool:
    """Whether the run has one process and one CPU device; jax has not looked for devices yet."""
    import jax

    # By settings, since the choice has to be made before jax looks for devices.
    alone = not jax.distributed.is_initialized() and run.virtual_devices in (None, 1)
    return alone and os.environ.get("JAX_PLATFORMS") == "cpu"


if __name__ == "__main__":
    sys.exit(cli.run(program, sys.argv[1:]))
else:
    maxstack._call(__name__, train)
