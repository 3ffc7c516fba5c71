"""Tiny vision transformers for tests, and images for them."""

from typing import Any

import jax
import numpy as np
import tiny

from maxstack import cli, train
from maxstack.config import dump
from maxstack.load import load
from maxstack.schema.config import Config

SIDE, CLASSES = 8, 6


def model(**changes: Any) -> dict[str, Any]:
    """Four patches a side, no class token, so that sequences are 16 tokens."""
    mixer = {"kind": "attention", "causal": False, "heads": 4, "kv_heads": 2, "head_dim": 8}
    block = {
        "mixer": mixer | {"rope": None},
        "mlp": {"kind": "dense", "hidden": 64, "bias": True},
        "norm": {"kind": "layer", "bias": True},
    }
    return {
        "kind": "encoder",
        "image_size": SIDE,
        "patch": 2,
        "channels": 1,
        "classes": CLASSES,
        "cls": False,
        "pool": {"kind": "mean"},
        "embed": 32,
        "layers": 2,
        "dtype": "float32",
        "blocks": {"block": block},
    } | changes


def config(**sections: Any) -> Config:
    """A classifier of made-up images."""
    source = {"kind": "synthetic", "documents": 64, "vocab": CLASSES, "length": 1}
    data = {"sources": [source], "packing": "none", "image": {"crop": "none", "flip": False}}
    given = sections.pop("model", model())
    patches = (given["image_size"] // given["patch"]) ** 2
    data["seq_len"] = patches + given.get("cls", 0) + given.get("registers", 0)
    for key, value in {"data": data, "objective": {"kind": "classify"}}.items():
        sections[key] = value | sections.get(key, {})
    return tiny.config(model=given, **sections)


def dit(modulation: str = "shared", **sections: Any) -> Config:
    """A diffusion transformer of made-up images."""
    given = model(kind="dit", norm={"kind": "layer", "scale": False})
    for key in ("cls", "pool"):
        del given[key]
    given["blocks"]["block"] |= {"modulation": modulation, "norm": given["norm"]}
    objective = {"kind": "flow"} | sections.pop("objective", {})
    return config(model=given, objective=objective, **sections)


def batch(cfg: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Images, the last of which is none."""
    rng, rows = np.random.default_rng(seed), cfg.train.batch_size
    image = rng.integers(0, 256, (rows, SIDE, SIDE, 1)).astype(np.uint8)
    real = np.ones(rows, np.float32)
    real[-1] = 0.0
    return {"image": image, "label": rng.integers(0, CLASSES, rows).astype(np.int32), "real": real}


def spread(params, seed=0):
    """Weights with noise, so that the head, which begins at zero, says something."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    noisy = [leaf + 0.3 * rng.normal(size=leaf.shape).astype(leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(tree, noisy)


def three_steps(cfg, devices):
    """The scalars of three steps."""
    run, rows = tiny.make_run(cfg, devices), []
    state = run.init()
    for i in range(3):
        placed = run.batches.place(batch(cfg, i), cfg.train.batch_size)
        state, scalars = run.step(state, placed)
        rows.append({name: float(value) for name, value in scalars.items()})
    return rows


def recipe(name, folder, *overrides):
    """A file of a few steps of a recipe on scikit-learn's digits."""
    cfg = load(
        f"recipes/{name}.yml",
        [
            *("train.steps=6", "train.batch_size=16", "eval.every=3", "eval.steps=2"),
            *("checkpoint.every=3", f"run.output_dir={folder}", "run.tensorboard=false"),
            *overrides,
        ],
    )
    (folder / "run.yml").write_text(dump(cfg))
    return folder / "run.yml"


def trained(recipe, *overrides):
    """The rows of metrics of a run of the file, which has a name."""
    assert cli.run(train.main, [str(recipe), *overrides]) == 0
    name = next(word.partition("=")[2] for word in overrides if word.startswith("run.name"))
    return tiny.metrics(recipe.parent / name)
