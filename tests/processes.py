"""Real `maxstack` processes for tests: started, watched, signalled, and their runs read back."""

import contextlib
import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from flags import flags
from forked import Forked

from maxstack import strict_json

TIMED = ("tokens_per_second", "step_seconds", "data_wait", "eval_seconds")
SILENT = 120.0
FLAGS = flags(xla_backend_optimization_level="1")
COMPILED = os.environ.get("MAXSTACK_TESTS_COMPILED", "")
"""The folder of compiled programs of this session of tests, of all its processes (conftest.py)."""


def command(config: Path, *overrides: str) -> list[str]:
    """The command line of a training run."""
    return [sys.executable, "-m", "maxstack.train", str(config), *overrides]


def environment() -> dict[str, str]:
    """One CPU device, programs compiled quickly."""
    return os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}


def train(config: Path, *overrides: str, code: int = 0) -> str:
    """Run to the end; its output. Fails unless it leaves with `code`."""
    return run(command(config, *overrides), environment(), code)


def run(words: list[str], env: Mapping[str, str], code: int = 0, cwd: Path | None = None) -> str:
    """A Python command in a fork, to its end; its output. Fails unless it leaves with `code`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        process = Forked(words, env, output, cwd=cwd)
        try:
            found = process.wait(300)
        finally:
            process.kill()
        text = output.read_text(errors="replace")
    assert found == code, f"exit {found} of {' '.join(words)}\n{text}"
    return text


def interrupt(config: Path, folder: Path, after: int, number: int, *overrides: str) -> int:
    """Start a run, send it a signal once it has reported step `after`, or for 0 once it has its
    folder; its exit code."""
    process = Forked(command(config, *overrides), environment(), Path(os.devnull))
    deadline = time.monotonic() + 240
    while process.poll() is None and not (
        any(row["step"] >= after for row in rows(folder)) if after else (folder / ".lock").exists()
    ):
        assert time.monotonic() < deadline, "the run never reached the step"
        time.sleep(0.02)
    process.send_signal(number)
    return process.wait(timeout=120)


def stand_ins(folder: Path, programs: Mapping[str, str]) -> dict[str, str]:
    """Programs of a cluster, by the bash of each -> the PATH that finds them first."""
    folder.mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(stat.S_IRWXU)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def children(pid: int) -> list[int]:
    """The pids of the processes that a process has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def training(submitted: int, number: int) -> int:
    """The pid of training process `number` below its supervisor, below the process of `maxstack
    submit --target local`."""
    own = f"JAX_PROCESS_ID={number}".encode()
    supervisor = next(
        pid
        for pid in children(submitted)
        if own in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
    return children(supervisor)[0]


def rows(folder: Path, key: str = "loss") -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that hold `key`, in order, without a last one still being
    written."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    read = (strict_json.restore(json.loads(line)) for line in lines)
    return [row for row in read if key in row]


def numbers(folder: Path, key: str = "loss") -> dict[int, dict[str, Any]]:
    """Step -> everything in its last row that does not depend on the clock."""
    return {
        row["step"]: {k: v for k, v in row.items() if k not in TIMED} for row in rows(folder, key)
    }


def write_config(folder: Path, **sections: Any) -> Path:
    """A tiny run over Python's own source text, packed, as a mixture of two sources, saved every 4
    steps."""
    block = {
        "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 8},
        "mlp": {"kind": "gated", "hidden": 64},
    }
    base: dict[str, Any] = {
        "run": {
            "name": "run",
            "output_dir": str(folder),
            "trackers": [],
            "compilation_cache": COMPILED or str(folder / "cache"),
        },
        "model": {
            "vocab": 320,
            "embed": 32,
            "layers": 2,
            "dtype": "float32",
            "blocks": {"block": block},
        },
        "data": {
            "seq_len": 64,
            "sources": [
                {"kind": "text", "files": ["{stdlib}/[a-f]*.py"], "holdout": 0.2, "weight": 3.0},
                {"kind": "synthetic", "documents": 100, "length": 80, "ragged": True, "vocab": 320},
            ],
        },
        "optimizer": {"learning_rate": 0.01},
        "train": {"steps": 24, "batch_size": 8},
        "checkpoint": {"every": 4},
    }
    path = folder / "config.yml"
    path.write_text(
        yaml.safe_dump({key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})
    )
    return path


def serve(words: list[str], env: Mapping[str, str], log: Path) -> tuple[Forked, str]:
    """A server in a fork, once it is up, and its address. Fails where it ends before, or says
    nothing for SILENT seconds: how long it takes is the machine's affair."""
    process = Forked([sys.executable, "-m", "maxstack.cli", *words], env, log)
    grown, told = time.monotonic(), ""
    while True:
        text = log.read_text() if log.exists() else ""
        if found := re.search(r"http://\S+:\d+", text):
            return process, found[0]
        if text != told:
            grown, told = time.monotonic(), text
        if process.poll() is not None or time.monotonic() - grown > SILENT:
            process.kill()
            raise AssertionError(f"{words} did not come up, exit {process.poll()}\n{text}")
        time.sleep(0.05)


def until(true: Callable[[], Any], seconds: float = 240.0) -> Any:
    """What `true` gives once that is true; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)
    return found
