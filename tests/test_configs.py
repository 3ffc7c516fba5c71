"""Every file in configs/ loads, assembles and lowers: a whole run as it stands, a preset inside a
tiny run."""

import math
import re

import jax
import pytest
import tiers
import tiny
import yaml

from maxstack import config, sharding
from maxstack.config.compose import presets_dir
from maxstack.load import load
from maxstack.run import assemble
from maxstack.schema import mesh_rules
from maxstack.schema.config import Config
from maxstack.schema.mesh import AXES, RULES

FILES = sorted(
    path
    for path in presets_dir().rglob("*.yml")
    if path.name != "defaults.yml" and path.parent.name not in ("clusters", "tasks")
)  # which are no runs
KINDS = re.compile(r"kind: \w+|placement: \w+|scaling|prefix|per_layer|share_kv")
WIDE = tiny.model(
    embed=128,
    layers=1,
    pattern=[],
    blocks={
        "b": {
            "mixer": {"kind": "attention", "heads": 4, "head_dim": 32},
            "mlp": {"kind": "gated", "hidden": 128},
        }
    },
)  # recipes share scales among up to 128 inputs
SECTIONS = {
    folder: section for section, folders in reversed(Config.PRESETS.items()) for folder in folders
}  # the first section that takes a folder's files

WITH_RECORDS = {"sft": "sft", "preference": "dpo", "unpaired": "kto", "reward": "reward"}
"""Recipes whose records an objective of a kind learns from."""


def loaded(path, folder) -> Config:
    """The run in a file, or a tiny run with the preset in it."""
    section = SECTIONS[str(path.parent.relative_to(presets_dir()))]
    if not section:
        return load(path)
    if section == "model" and re.search("^kind: ", path.read_text(), re.M):
        data = {"sources": [{"kind": "synthetic", "vocab": 2}]}
        cfg = load({section: path.stem, "data": data})
        headless = cfg.objective.kind == "classify" and not cfg.model.classes
        return load({section: path.stem, "data": data}, ["model.classes=2"] * headless)
    kind = yaml.safe_load(path.read_text())["kind"] if section == "objective" else ""
    if kind in WITH_RECORDS:
        return load(f"recipes/{WITH_RECORDS[kind]}.yml", [f"objective={path.stem}"])
    sizes = {"model": WIDE} if section == "quantization" else {}
    cfg = tiny.with_rollouts() if section == "objective" else tiny.config(**sizes)
    (folder / "tiny.yml").write_text(config.dump(cfg))
    changes = [f"{section}={path.stem}"]
    if section == "mesh":  # with two devices on each axis that it uses
        cfg = load(
            folder / "tiny.yml",
            [
                *changes,
                *(f"mesh.rules.{axis}=null" for axis in RULES),
                "train.batch_size=8192",
            ],
        )
        changes += [f"mesh.{axis}={min(getattr(cfg.mesh, axis), 2)}" for axis in AXES]
    return load(folder / "tiny.yml", changes)


def representative(paths):
    """Every file, but of the models one of each set of kinds; tests/models/test_presets.py builds
    them all."""
    seen = set()
    for path in paths:
        kinds = frozenset(KINDS.findall(path.read_text())) if path.parent.name == "models" else path
        if kinds not in seen and not (
            path.parent.name == "models" and "extends:" in path.read_text()
        ):
            seen.add(kinds)
            yield path


TRACED = [*representative(FILES)]


@pytest.mark.parametrize(
    "path",
    tiers.of(TRACED, slow=[path for path in TRACED if path.parent.name != "models"]),
    ids=lambda path: str(path.relative_to(presets_dir())),
)
def test_a_shipped_file_loads_assembles_and_is_traced(path, tmp_path):
    cfg = loaded(path, tmp_path)
    run = assemble(
        cfg,
        sharding.make_mesh(
            cfg.mesh, jax.devices()[: math.prod(mesh_rules.mesh_sizes(cfg).values())]
        ),
    )
    state, scalars = run.step.trace(*run.abstract_arguments).out_info
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), run.abstract
    )
    assert {"loss", "grad_norm"} <= scalars.keys()
