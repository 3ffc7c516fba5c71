"""A compiled step in a file, so that a start skips compilation: `maxstack plan --save-executable`
writes it, run.executable names it."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from maxstack.config import ConfigError, atomic, dump
from maxstack.run import Run

MAGIC = b"maxstack step 1\n"
SECTIONS = ("model", "mesh", "quantization", "lora", "objective", "optimizer", "faults")


def save(run: Run, compiled: Any, path: Path) -> int:
    """Write the step with what it was compiled for -> bytes written. ConfigError where the file
    cannot be written."""
    payload, _, out_tree = serialize_executable.serialize(compiled)
    scalars = [str(key.key) for key, _ in _scalars(out_tree)]
    header = json.dumps({"made_for": _made_for(run), "scalars": scalars}).encode() + b"\n"
    try:
        with atomic.writing(path) as unfinished:
            unfinished.write_bytes(MAGIC + header + payload)
    except OSError as error:
        raise ConfigError(
            f"--save-executable {path}: cannot be written: {error.strerror}"
        ) from error
    return len(MAGIC) + len(header) + len(payload)


def load(run: Run, path: Path) -> Any:
    """The step in `path`, to be called as run.step is. It is a program: load only what you made.
    ConfigError where it is of another run, version or hardware, with what differs."""
    remedy = (
        f"make it again with `maxstack plan CONFIG --topology ... --save-executable {path}`, "
        "or set run.executable: null"
    )
    try:
        magic, header, payload = path.read_bytes().split(b"\n", 2)
        found = json.loads(header)
    except OSError as error:
        raise ConfigError(
            f"run.executable: cannot read {path}: {error.strerror}; {remedy}"
        ) from error
    except ValueError:
        raise ConfigError(f"run.executable: {path} is no compiled step; {remedy}") from None
    if magic + b"\n" != MAGIC:
        raise ConfigError(
            f"run.executable: {path} is no compiled step of this version of maxstack; {remedy}"
        )
    wanted, made = _made_for(run), found["made_for"]
    if differing := [
        f"{name} {made.get(name)!r}, not {value!r}"
        for name, value in wanted.items()
        if made.get(name) != value
    ]:
        raise ConfigError(
            f"run.executable: {path} was compiled for {'; '.join(differing)}; {remedy}"
        )
    in_tree = jax.tree.structure(((run.abstract, run.abstract_batch()), {}))
    out_tree = jax.tree.structure((run.abstract, dict.fromkeys(found["scalars"], 0)))
    return serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, execution_devices=list(run.mesh.devices.flat)
    )


def _scalars(out_tree: Any) -> list[tuple[Any, Any]]:
    numbered = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    return [(path[0], leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(numbered[1])]


def _made_for(run: Run) -> dict[str, Any]:
    """What decides the program, and where it can run; the program of a run with dropout holds its
    seed."""
    cfg, device = run.cfg, run.mesh.devices.flat[0]
    shape = {name: list(leaf.shape) for name, leaf in run.abstract_batch().items()}
    program = "".join(dump(section) if (section := getattr(cfg, name)) else "" for name in SECTIONS)
    seed = cfg.train.seed if cfg.lora and cfg.lora.dropout else None
    return {
        "configuration": hashlib.sha256(program.encode()).hexdigest()[:16],
        "steps": cfg.train.steps,
        "accumulate": cfg.train.accumulate,
        "seed": seed,
        "batch": shape,
        "mesh": dict(run.mesh.shape),
        "device": device.device_kind,
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
    }
