"""Classification of images: the loss, mixup, figures; the same on every mesh; bit for bit after a
kill."""

import shutil

import jax
import numpy as np
import parity
import pytest
import tiers
import tiny
import tiny_vision
from flax import nnx

from maxstack import cli, train
from maxstack.errors import ConfigError
from maxstack.load import load
from maxstack.objectives.objective import Models


def logits_of(run, params, rows):
    model = nnx.merge(run.graph, nnx.State(params))
    pixels = (rows["image"].astype(np.float32) / 255 - 0.5) / 0.5
    return np.asarray(model.logits(model.features(model.trunk({"pixels": pixels})[0])), np.float64)


def log_p_of(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_the_loss_is_cross_entropy_with_smoothing_and_mixup():
    cfg = tiny_vision.config(objective={"smoothing": 0.1, "mixup": 0.4})
    run, rows = tiny.make_run(cfg), tiny_vision.batch(cfg)
    params = tiny_vision.spread(run.init().params)
    prepared = run.objective.prepare(rows, jax.random.key(1))
    share = float(prepared["share"])
    assert 0.5 <= share < 1
    image = rows["image"].astype(np.float64)
    mixed = share * image + (1 - share) * np.roll(image, 1, axis=0)
    log_p = log_p_of(logits_of(run, params, {"image": mixed}))
    total = 0.0
    for weight, label in ((share, rows["label"]), (1 - share, np.roll(rows["label"], 1))):
        target = 0.9 * np.eye(tiny_vision.CLASSES)[label] + 0.1 / tiny_vision.CLASSES
        total -= (weight * (target * log_p).sum(-1) * rows["real"]).sum()
    found = run.objective.loss(Models(nnx.merge(run.graph, nnx.State(params))), prepared)
    assert float(found.total) == pytest.approx(total, rel=1e-4)
    assert float(found.weight) == rows["real"].sum()


def test_evaluation_counts_images_that_are_right():
    cfg = tiny_vision.config(objective={"smoothing": 0.1})
    run, rows = tiny.make_run(cfg), tiny_vision.batch(cfg, 3)
    params = tiny_vision.spread(run.init().params)
    log_p, real = log_p_of(logits_of(run, params, rows)), rows["real"] > 0
    own = np.take_along_axis(log_p, rows["label"][:, None], 1)
    placed = run.batches.place(rows, cfg.train.batch_size)
    sums = {name: float(value) for name, value in run.eval_step(params, placed).items()}
    assert sums["nll"] == pytest.approx(-own[real].sum(), rel=1e-4)
    for name, most in {"accuracy": 1, "top5": 5}.items():
        assert sums[name] == (((log_p >= own).sum(1) <= most) & real).sum()
        assert sums[f"{name}/weight"] == sums["weight"] == real.sum()


MESHES = {
    "tensor": ("own", {"mesh": {"tensor": 2, "fsdp": 2}}, 4),
    "context": (None, {"mesh": {"context": 4, "data": 2}}, 8),
    "ulysses": (None, {"mesh": {"context": 2, "context_kind": "ulysses"}}, 2),
    "stages": ("shared", {"mesh": {"stage": 2}}, 2),
    "accumulated": (None, {"train": {"accumulate": 4}}, 1),
}
"""How a condition reaches the blocks of a diffusion transformer, or None for a classifier; sections
of the configuration; and the number of devices."""


@pytest.mark.parametrize("name", tiers.of(MESHES, "accumulated", slow=["stages"]))
@pytest.mark.slow
def test_a_mesh_trains_image_models_as_one_device_does(name):
    """The random numbers of mixup and of flow matching too are those of the step."""
    modulation, sections, devices = MESHES[name]
    figures = []
    for more, number in (({}, 1), (sections, devices)):
        if modulation:
            cfg = tiny_vision.dit(modulation, **more)
        else:
            cfg = tiny_vision.config(objective={"mixup": 0.4}, **more)
        figures.append(tiny_vision.three_steps(cfg, number))
    for one, other in zip(*figures, strict=True):
        for figure in ("loss", "grad_norm", "weight"):
            assert other[figure] == pytest.approx(one[figure], rel=2e-5, abs=1e-6), figure


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A file of a few steps on scikit-learn's digits."""
    folder = tmp_path_factory.mktemp("vit")
    return tiny_vision.recipe(
        "vit-digits", folder, "model.layers=1", "model.unroll=1", "objective.mixup=0.2"
    )


def rows_of(recipe, *overrides):
    """The figures of steps, without times, and the accuracies of evaluations."""
    rows = tiny_vision.trained(recipe, *overrides)
    kept = ("loss", "accuracy", "grad_norm")
    return (
        {row["step"]: [row[key] for key in kept] for row in rows if "loss" in row},
        [row["eval_accuracy"] for row in rows if "eval_accuracy" in row],
        rows,
    )


@pytest.mark.release
def test_a_run_goes_on_bit_for_bit_whatever_reads_its_images(recipe):
    """After a checkpoint, with worker processes and on a mesh: the same pictures, changed alike."""
    whole, accuracies, rows = rows_of(recipe, "run.name=whole")
    assert len(whole) == 6 and len(accuracies) == 3
    assert all(row["images_per_second"] > 0 for row in rows if "loss" in row)
    shutil.copytree(recipe.parent / "whole", recipe.parent / "again")
    shutil.rmtree(recipe.parent / "again" / "checkpoints" / "6")
    again, _, _ = rows_of(recipe, "run.name=again", "data.workers=2")
    assert again == whole
    spread, _, _ = rows_of(
        recipe, "run.name=mesh", "mesh.fsdp=4", "mesh.tensor=2", "run.virtual_devices=8"
    )
    np.testing.assert_allclose([*spread.values()], [*whole.values()], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective={kind: next_token}"], "next_token is for model.kind=decoder"),
        (["data.seq_len=9"], "an image of model.image_size=8 is 16 tokens"),
        (["data.packing=fit"], "each image is a row"),
        (["data.image.mean=[0.5, 0.4, 0.3]"], "holds 3 numbers, and model.channels=1"),
        (["data.sources=[{kind: text, files: ['*.md']}]"], "learns from records"),
        (["mesh.stage=2"], "the pattern of blocks repeats 1 times"),
    ],
)
def test_a_mistake_is_named(recipe, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(recipe, overrides)


@pytest.mark.slow
def test_a_model_without_a_head_is_read_and_not_trained(recipe, tmp_path, maxstack, capsys):
    run = tmp_path / "run"
    maxstack(f"import {parity.GOLDENS / 'dinov2_gated'} --out {run}")
    maxstack(f"export {run} --out {tmp_path / 'out'}")
    assert cli.run(train.main, [str(recipe), "model.classes=null", "run.name=none"]) == 1
    assert "classify needs a number of classes; set model.classes" in capsys.readouterr().err


def test_what_is_for_language_models_refuses_others(tmp_path, maxstack):
    run = tmp_path / "vit"
    maxstack(f"import {parity.GOLDENS / 'vit'} --out {run}")
    for words in (f"generate {run} --prompt a", f"serve {run} --port 0"):
        assert "model.kind=encoder" in maxstack(words, code=1)


@pytest.mark.parametrize(("make", "mode"), [(tiny_vision.config, "qt"), (tiny_vision.dit, "ptq")])
@pytest.mark.slow
def test_low_precision_learns(make, mode):
    """int8 products, and adapters on weights kept in nf4 (of a head that is not zero)."""
    rule = {"module_path": ".*/(mixer|mlp)/.*", "weight_qtype": "int8", "act_qtype": "int8"}
    more = {"quantization": {"rules": [rule]}}
    if mode == "ptq":
        rule = {"module_path": ".*/(mixer|mlp)/.*", "weight_qtype": "nf4", "tile_size": 8}
        more = {"quantization": {"mode": "ptq", "rules": [rule]}, "lora": {"rank": 2}}
    cfg, rng = make(**more), np.random.default_rng(0)
    run = tiny.make_run(cfg, 8)

    def noisy(leaf):
        noise = rng.normal(size=leaf.shape).astype(np.float32)
        return leaf + 0.1 * noise if leaf.dtype == np.float32 else leaf

    state, losses = run.init(), []
    state = state._replace(params=jax.tree.map(noisy, state.params))
    for _ in range(6):
        state, scalars = run.step(state, run.batches.place(tiny_vision.batch(cfg), 8))
        losses.append(float(scalars["loss"]))
    assert losses[-1] < losses[0]
