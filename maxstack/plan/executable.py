"""Saves and loads compiled steps, so that training starts without compiling: `maxstack plan
--save-executable` writes the file that run.executable names."""

import hashlib
import json
from importlib.metadata import version
from typing import Any

import jax
from jax.experimental import serialize_executable

from maxstack import strict_json
from maxstack.config import dump, storage
from maxstack.errors import ConfigError
from maxstack.run import Run

MAGIC = b"maxstack step 1\n"
SECTIONS = ("model", "mesh", "quantization", "lora", "objective", "optimizer", "faults")


def save(run: Run, compiled: Any, path: str) -> int:
    """Write the step with what it was compiled for; return the bytes written. ConfigError if the
    file cannot be written."""
    payload, _, out_tree = serialize_executable.serialize(compiled)
    # The run gives both trees again at loading, but for the names of the metrics, which are known
    # only after the step is traced.
    _, scalars = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    # The header is a line of JSON before the program, so that it is checked before anything is
    # executed.
    header = json.dumps({"made_for": _made_for(run), "scalars": [*scalars]}).encode() + b"\n"
    # The number in MAGIC changes with the format, so that an older file is refused by name.
    content = MAGIC + header + payload
    try:
        with storage.replacing(path) as unfinished:
            unfinished.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"--save-executable {path}: cannot be written: {error.strerror}"
        ) from error
    return len(content)


def load(run: Run, path: str) -> Any:
    """Load a step that is called like run.step. It is code: load only files that you made.
    ConfigError, with what differs, if it was compiled for another run, version or hardware."""

    def refusal(why: str) -> ConfigError:
        return ConfigError(
            f"run.executable: {why}; write it again with "
            f"`maxstack plan CONFIG --topology ... --save-executable {path}`, "
            "or set run.executable: null"
        )

    try:
        magic, header, payload = storage.read(path).split(b"\n", 2)
        made = strict_json.parse_object(header, path)
    except OSError as error:
        raise refusal(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise refusal(f"{path} is not a compiled step") from None
    if magic + b"\n" != MAGIC:
        raise refusal(f"{path} is not a compiled step of this version of maxstack")
    made_for = made["made_for"]
    differing = [
        f"{name} {made_for.get(name)!r}, not {value!r}"
        for name, value in _made_for(run).items()
        if made_for.get(name) != value
    ]
    if differing:
        raise refusal(f"{path} was compiled for {'; '.join(differing)}")
    # Trees come from the run, not from the file: its facts were compared above, so they are equal.
    in_tree = jax.tree.structure((run.abstract_arguments, {}))
    out_tree = jax.tree.structure((run.abstract, dict.fromkeys(made["scalars"], 0)))
    return serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, execution_devices=list(run.mesh.devices.flat)
    )


def _made_for(run: Run) -> dict[str, Any]:
    """Return what decides the program and where it can run. A program that draws random numbers
    contains the seed."""
    cfg = run.cfg
    device = run.mesh.devices.flat[0]
    shape = {name: list(leaf.shape) for name, leaf in run.batches.abstract().items()}
    program = "".join(dump(section) if (section := getattr(cfg, name)) else "" for name in SECTIONS)
    # Without random numbers the same file serves every seed.
    random = cfg.objective.draws or (cfg.lora and cfg.lora.dropout)
    seed = cfg.train.seed if random else None
    return {
        "configuration": hashlib.sha256(program.encode()).hexdigest()[:16],
        # Schedules are built from train.steps, so it is a constant of the program.
        "steps": cfg.train.steps,
        "accumulate": cfg.train.accumulate,
        "seed": seed,
        "batch": shape,
        "mesh": dict(run.mesh.shape),
        "device": device.device_kind,
        # A serialized program fits only the jaxlib that wrote it, and jax decides how it is called.
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
    }
