"""Objectives, optimizers, recomputation and vision transformers on meshes, with accumulation: three
steps on eight virtual devices are those of one, losses, weights and the optimizer's state, or the
combination is refused before anything is compiled. The end of the output lists each as `equal`,
`refused: MESSAGE` or `unequal: NUMBERS`."""

import contextlib
import functools

import jax
import numpy as np
import pytest
import tiers
import tiny
import tiny_vision
from objectives import test_post_training
from test_meshes import GRADIENT

from maxstack import startup
from maxstack.config import plain_data
from maxstack.data.feed import Feed
from maxstack.errors import ConfigError
from maxstack.load import load

STEPS, ROWS = 3, 16
TOLERANCE = 1e-5
"""Relative; weights that begin with another last bit, on one device, end 4e-6 apart under muon and
lamb, 1e-6 under the others."""
TRAIN = {"batch_size": ROWS, "steps": STEPS}
EXPERTS = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 32, "router": {"balance_loss": 0.01}}
OBJECTIVES = {
    "kto": {"kind": "unpaired"},
    "bco": {"kind": "unpaired", "loss": "bco"},
    "sequence": {"kind": "sft", "weigh": "sequence"},
    "distill": {"kind": "distill", "next_token": 0.5},
}
"""On every mesh; tests/objectives/test_post_training.py has all that learn from records, on one."""
OPTIMIZERS = "muon", "adafactor", "lamb"
REMAT = {
    "full": {"policy": "full"},
    "dots": {"policy": "dots"},
    "dots_no_batch": {"policy": "dots_no_batch"},
    "save": {"policy": "save", "names": ["mixer_out", "mlp_gate"]},
    "offload": {"policy": "offload", "names": ["mixer_out", "mlp_gate"]},
}
PICTURES = {"vit": False, "vit of 17 tokens": True}
"""By name, whether a class token comes before the 16 patches."""
MESHES = {
    "accumulated": {"train": {"accumulate": 4}},
    "data": {"mesh": {"data": 8}},
    "tensor": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
    "zero": {"mesh": {"data": 8, "optimizer_rules": {"embed": ["data", "fsdp"]}}},
    "ring": {"mesh": {"data": 2, "context": 4}},
    "ulysses": {"mesh": {"fsdp": 4, "context": 2, "context_kind": "ulysses"}},
    "stage": {"mesh": {"data": 2, "fsdp": 2, "stage": 2}},
    "expert": {"mesh": {"fsdp": 2, "expert": 4}},
    "host": {"mesh": {"data": 2, "fsdp": 4, "offload": ["optimizer", "params"]}},
}
"""All but the first, which is of one device, with two microbatches."""
ALL = [name for name in MESHES if name != "zero"]
CASES = [
    *((subject, mesh) for subject in (*OBJECTIVES, *PICTURES) for mesh in ALL),
    *((subject, mesh) for subject in OPTIMIZERS for mesh in MESHES if mesh != "ulysses"),
    *((subject, mesh) for subject in REMAT for mesh in ("tensor", "ring", "stage")),
]
REFUSED = {
    ("vit", "expert"): "no block of the model has a mixture of experts; use mesh.fsdp=4",
    ("vit of 17 tokens", "expert"): "no block of the model has a mixture of experts",
    ("vit of 17 tokens", "tensor"): "use mesh.tensor=1 or mesh.rules.residual: null",
    ("vit of 17 tokens", "ring"): "in a ring each device holds two pieces; use mesh.context=1",
    ("vit of 17 tokens", "ulysses"): "use mesh.context=1 or mesh.rules.seq: null",
}
SLOW = ("kto", "tensor"), ("distill", "host"), ("muon", "tensor"), *REFUSED


def settings(subject, experts):
    """What is trained, on one device."""
    if subject in OBJECTIVES:
        cfg = test_post_training.config(OBJECTIVES[subject], train=TRAIN)
    elif subject in PICTURES:
        cfg = tiny_vision.config(model=tiny_vision.model(cls=PICTURES[subject]), train=TRAIN)
    else:
        cfg = tiny.config(model=tiny.model(**tiny.ONE_KIND), train=TRAIN)
    made = plain_data(cfg) | {"optimizer": GRADIENT}
    if subject in OPTIMIZERS:
        made["optimizer"] = {"preset": subject, "schedule": None, "learning_rate": 0.01}
    if subject in REMAT:
        made["model"]["remat"] = REMAT[subject]
    if subject == "distill":
        made["teacher"] |= {"layers": 2, "embed": 16}
    if experts:
        made["model"]["blocks"]["local"]["mlp"] = EXPERTS
    return made


def batches(run):
    """A batch for each step, as numpy."""
    cfg = run.cfg
    if not cfg.data.has_records:
        made = tiny_vision.batch if cfg.objective.kind == "classify" else tiny.batch
        return [made(cfg, i) for i in range(STEPS)]
    feed = Feed(cfg.data, range(ROWS), ROWS, fields=run.objective.fields)
    with contextlib.closing(feed):
        return [next(feed) for _ in range(STEPS)]


def trained(run, begin, frozen):
    """Losses and norms of the steps, and the weights and the optimizer's state after the last, by
    name."""
    places = jax.tree.map(lambda leaf: leaf.sharding, run.abstract_arguments)
    state, beside, found = jax.device_put(begin, places[0]), jax.device_put(frozen, places[2:]), {}
    for i, batch in enumerate(batches(run)):
        state, scalars = run.step(state, run.batches.place(batch, ROWS), *beside)
        found |= {f"{name} {i}": np.asarray(scalars[name]) for name in ("loss", "grad_norm")}
    leaves = jax.tree_util.tree_leaves_with_path({"weight": state.params, "state": state.opt})
    return found | {jax.tree_util.keystr(path): jax.device_get(leaf) for path, leaf in leaves}


@functools.cache
def alone(subject, experts):
    """What a subject begins with, what it has beside, and what one device makes of it."""
    run = tiny.make_run(load(settings(subject, experts)))
    state = run.init()
    if subject in PICTURES:
        state = state._replace(params=tiny_vision.spread(state.params))
    begin, frozen = jax.device_get((state, startup.frozen_weights(run)))
    return begin, frozen, trained(run, begin, frozen)


def outcome(subject, mesh):
    """equal, refused: MESSAGE, or unequal: NUMBERS."""
    experts = mesh == "expert" and subject not in PICTURES
    made = settings(subject, experts)
    changes = {"train": {"accumulate": 2}} | MESHES[mesh]
    for section, keys in ({"mesh": {"data": 1}} | changes).items():
        made[section] = made[section] | ({"data": 1} if section == "mesh" else {}) | keys
    try:
        run = tiny.make_run(load(made), 8 if "mesh" in changes else 1)
    except ConfigError as error:
        return f"refused: {error}"
    begin, frozen, wanted = alone(subject, experts)
    found = trained(run, begin, frozen)
    off = {
        name: np.linalg.norm(found[name] - value) / max(np.linalg.norm(value), 1e-30)
        for name, value in wanted.items()
    }
    wrong = [f"{name} by {share:.1e}" for name, share in off.items() if not share <= TOLERANCE]
    if wrong:
        return f"unequal: {', '.join(wrong)}"
    assert all(wanted[f"grad_norm {i}"] > 0 for i in range(STEPS))
    return f"equal (by {max(off.values()):.0e})"


@pytest.mark.parametrize(("subject", "mesh"), tiers.of(CASES, slow=SLOW))
def test_a_combination_is_that_of_one_device_or_is_refused(subject, mesh, record_property):
    found = outcome(subject, mesh)
    record_property("combination", f"{subject}, {mesh}: {found}")
    if words := REFUSED.get((subject, mesh)):
        assert found.startswith("refused: ") and words in found
    else:
        assert found.startswith("equal")
