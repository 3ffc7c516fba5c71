"""Flow matching of images: the loss, its random numbers, meshes, resume, samples."""

import sys

import jax
import numpy as np
import pytest
import tiny
import tiny_vision
from flax import nnx
from PIL import Image

from maxstack import cli
from maxstack.config import dump
from maxstack.errors import ConfigError
from maxstack.inference.images import Sampler
from maxstack.load import load
from maxstack.objectives.objective import Models

SIDE, CLASSES = tiny_vision.SIDE, tiny_vision.CLASSES


def model_of(run, seed=0):
    params = tiny_vision.spread(run.init().params, seed)
    return nnx.merge(run.graph, nnx.State(params)), params


def noise_of(seed, number):
    """What an image is made of."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), number)
    return np.asarray(jax.random.normal(key, (SIDE, SIDE, 1)))


def drawn_of(x):
    """Values of a picture, as they are written."""
    return np.clip(x * 0.5 + 0.5, 0, 1) * 255


@pytest.mark.parametrize("prediction", ["velocity", "x0", "eps"])
def test_the_loss_is_the_mean_squared_error_on_a_line_to_noise(prediction):
    run = tiny.make_run(tiny_vision.dit(objective={"prediction": prediction}))
    rows, (model, _) = tiny_vision.batch(run.cfg), model_of(run)
    prepared = run.objective.prepare(rows, jax.random.key(5))
    time, noise = (np.asarray(prepared[name], np.float64) for name in ("time", "noise"))
    x = (rows["image"] / 255 - 0.5) / 0.5
    t = time[:, None, None, None]
    given = {"pixels": (1 - t) * x + t * noise, "time": 1000 * time, "label": prepared["label"]}
    made = np.asarray(model({k: np.asarray(v) for k, v in given.items()})[0])
    wanted = {"velocity": noise - x, "x0": x, "eps": noise}[prediction]
    errors = ((made - wanted) ** 2).mean((1, 2, 3))
    found = run.objective.loss(Models(model), prepared)
    assert float(found.total) == pytest.approx((errors * rows["real"]).sum(), rel=1e-4)
    assert float(found.weight) == rows["real"].sum()
    ends = run.objective.ends(wanted, given["pixels"], t)  # of the right prediction: the right ones
    for found, right in zip(ends, (x, noise), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-3, atol=2e-3)


def test_times_classes_and_noise_are_drawn_as_the_keys_say():
    base = {"objective": {"drop": 0.25}, "train": {"batch_size": 512}}
    run = tiny.make_run(tiny_vision.dit(**base))
    rows = tiny_vision.batch(run.cfg)
    drawn = run.objective.prepare(rows, jax.random.key(0))
    time, label = np.asarray(drawn["time"]), np.asarray(drawn["label"])
    assert np.histogram(time, 4, (0, 1))[0].min() > 90
    hidden = label == CLASSES
    assert 0.18 < hidden.mean() < 0.32 and (label[~hidden] == rows["label"][~hidden]).all()
    assert abs(np.asarray(drawn["noise"]).std() - 1) < 0.02
    moved = {"times": "logit_normal", "shift": 3.0}
    other = tiny.make_run(tiny_vision.dit(objective=moved, train=base["train"]))
    time = np.asarray(other.objective.prepare(rows, jax.random.key(0))["time"])
    assert np.median(time) == pytest.approx(0.75, abs=0.03)  # 3 t / (1 + 2 t) at t = 1/2
    assert time.std() < 0.2


@pytest.mark.slow
def test_evaluation_is_on_fixed_times_with_noise_of_the_images_alone():
    run = tiny.make_run(tiny_vision.dit(objective={"eval_times": 3}))
    rows, (_, params) = tiny_vision.batch(run.cfg), model_of(run)
    order = np.random.default_rng(0).permutation(8)
    sums = []
    for given in (rows, {name: array[order] for name, array in rows.items()}):
        placed = run.batches.place(given, 8)
        sums.append({k: float(v) for k, v in run.eval_step(params, placed).items()})
    assert sums[0]["nll"] == pytest.approx(sums[1]["nll"], rel=1e-5)
    assert sums[0]["weight"] == rows["real"].sum()


@pytest.mark.slow
def test_a_sample_is_the_same_alone_and_follows_the_velocity():
    run = tiny.make_run(tiny_vision.dit())
    model, params = model_of(run)
    labels = np.arange(5, dtype=np.int32)
    sampler = Sampler(run, params, 3, "euler", 1.0)
    together = [*sampler(labels, 0, seed=7)]
    (alone,) = sampler(labels[3:4], 3, seed=7)
    np.testing.assert_array_equal(alone, together[3])
    x = noise_of(7, 3)[None]
    for now in (1.0, 2 / 3, 1 / 3):
        at = {"pixels": x, "time": np.array([1000 * now], np.float32), "label": labels[3:4]}
        x = x - np.asarray(model(at)[0]) / 3
    assert np.abs(drawn_of(x[0]) - alone).max() <= 1


@pytest.mark.slow
def test_guidance_is_a_line_through_what_is_predicted_with_and_without_a_class():
    run = tiny.make_run(tiny_vision.dit())
    model, params = model_of(run)
    x = np.random.default_rng(0).normal(size=(3, SIDE, SIDE, 1)).astype(np.float32)

    def velocity(label):
        given = {"pixels": x, "time": np.full(3, 400.0, np.float32)}
        return np.asarray(model({**given, "label": np.array(label, np.int32)})[0])

    own, without = velocity([0, 1, 2]), velocity([CLASSES] * 3)
    assert np.abs(own - without).max() > 0.1
    for guidance in (0.0, 1.0, 3.0):
        sampler = Sampler(run, params, 1, "euler", guidance)
        image, noise = run.within(sampler._ends)(params, x, np.arange(3), np.float32(0.4))
        wanted = without + guidance * (own - without)
        np.testing.assert_allclose(noise - image, wanted, rtol=1e-4, atol=1e-4 * np.abs(own).max())


def test_heun_is_of_second_order(monkeypatch):
    """With the velocity x the image is the noise over e."""
    run = tiny.make_run(tiny_vision.dit())

    def ends(self, params, x, label, time):
        return x - time * x, x + (1 - time) * x

    monkeypatch.setattr(Sampler, "_ends", ends)
    errors = {}
    for solver in ("euler", "heun"):
        for steps in (4, 8):
            (image,) = Sampler(run, {}, steps, solver, 1.0)(np.zeros(1, np.int32), 0, seed=1)
            errors[solver, steps] = np.abs(image - drawn_of(noise_of(1, 0) / np.e)).mean()
    assert errors["heun", 4] < 0.3 * errors["euler", 4]
    assert errors["euler", 8] == pytest.approx(errors["euler", 4] / 2, rel=0.2)


@pytest.mark.slow
def test_the_path_of_ddpm_is_trained_and_followed_by_ddim():
    """arXiv:2006.11239 eq. 4 and 12, arXiv:2010.02502 eq. 12 with sigma = 0, in numpy."""
    run = tiny.make_run(tiny_vision.dit(objective={"prediction": "eps", "path": "vp"}))
    rows, (model, params) = tiny_vision.batch(run.cfg), model_of(run)
    kept = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    prepared = run.objective.prepare(rows, jax.random.key(5))
    steps = np.ceil(1000 * np.asarray(prepared["time"], np.float64)).astype(int) - 1
    x, noise = (rows["image"] / 255 - 0.5) / 0.5, np.asarray(prepared["noise"])
    a = kept[steps][:, None, None, None]
    given = {"pixels": np.sqrt(a) * x + np.sqrt(1 - a) * noise, "time": steps.astype(np.float32)}
    made, _ = model({**given, "label": np.asarray(prepared["label"])})
    errors = ((np.asarray(made) - noise) ** 2).mean((1, 2, 3))
    found = run.objective.loss(Models(model), prepared)
    assert float(found.total) == pytest.approx((errors * rows["real"]).sum(), rel=1e-4)
    (drawn,) = Sampler(run, params, 4, "euler", 1.0)(np.zeros(1, np.int32), 0, seed=1)
    x = noise_of(1, 0)[None]
    for step, after in zip((999, 749, 499, 249), (749, 499, 249, None), strict=True):
        at = {"time": np.array([step], np.float32), "label": np.zeros(1, np.int32)}
        made = np.asarray(model({"pixels": x, **at})[0])
        image = (x - np.sqrt(1 - kept[step]) * made) / np.sqrt(kept[step])
        then = 1.0 if after is None else kept[after]
        x = (np.sqrt(then) * image + np.sqrt(1 - then) * made).astype(np.float32)
    assert np.abs(drawn_of(x[0]) - drawn).max() <= 1
    with pytest.raises(ConfigError, match="follows objective.path=line alone"):
        Sampler(run, params, 4, "heun", 1.0)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A file of a few steps on scikit-learn's digits."""
    folder = tmp_path_factory.mktemp("dit")
    return tiny_vision.recipe(
        "dit-digits",
        folder,
        *("model.layers=1", "model.unroll=1", "model.embed=32"),
        *("model.blocks.block.mixer.head_dim=8", "model.blocks.block.mlp.hidden=128"),
    )


@pytest.mark.slow
def test_a_trained_model_draws_the_same_images_whatever_their_number(recipe, maxstack, monkeypatch):
    tiny_vision.trained(recipe, "run.name=whole")
    run, out, grid = (recipe.parent / name for name in ("whole", "drawn", "grid.png"))
    words = f"sample {run} --classes 0-2,7 --steps 2 --seed 3"
    maxstack(f"{words} --count 3 --out {out}")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(sys.modules["maxstack.inference.images"], "AT_ONCE", 1)
    maxstack(f"{words} --count 8 --out {out}")
    after = {path.name: path.read_bytes() for path in sorted(out.iterdir())}
    assert [*after] == [*(f"{i:06}.png" for i in range(8)), "samples.json"]
    assert before.items() <= after.items()
    maxstack(f"{words} --count 8 --out {grid}")
    assert Image.open(grid).size == (4 * 33 - 1, 2 * 33 - 1)
    for wrong, code, said in (
        ("--classes 9-12", 1, "--classes: 12 is not one of the model's classes, 0 to 9"),
        ("--classes a", 1, "give numbers and ranges"),
        ("--guidance nan", 1, "nan is not a number from 0 to 100"),
        (f"--out {out}", 1, "holds images made with classes=[0, 1, 2, 7]"),
        (f"--out {recipe.parent}", 1, "holds other files; give a new folder"),
        (f"--out {recipe / 'in'}", 1, "cannot be created"),
    ):
        assert said in maxstack(f"sample {run} {wrong}", code=code)


@pytest.mark.release
def test_evaluations_draw(recipe):
    """The same noise at every step, the weights' moving average, in the run's folder and
    TensorBoard."""
    settings = "eval.samples={count: 20, steps: 2}"
    words = "run.name=drawing", settings, "run.tensorboard=true", "run.virtual_devices=8"
    tiny_vision.trained(recipe, *words, "mesh.fsdp=4", "mesh.context=2")
    folder = recipe.parent / "drawing"
    drawn = sorted((folder / "samples").iterdir())
    assert [path.name for path in drawn] == [f"{step:08}.png" for step in (3, 6)]
    assert Image.open(drawn[1]).size == (10 * 33 - 1, 2 * 33 - 1)
    assert drawn[0].read_bytes() != drawn[1].read_bytes()
    (events,) = (folder / "tensorboard").iterdir()
    assert events.read_bytes().count(b"\x89PNG") == 2
    out = recipe.parent / "again.png"
    words = ["--count", "20", "--steps", "2", "--seed", str(load(recipe).train.seed)]
    assert cli.main(["sample", str(folder), *words, "--out", str(out)]) == 0
    one, other = (np.asarray(Image.open(path), np.int32) for path in (out, drawn[1]))
    assert np.abs(one - other).max() <= 1


@pytest.mark.release
def test_latents_are_learned_from_and_made(recipe):
    """The recipe of DiT-B/2 on latents, tiny: 4 channels, in .npz files."""
    folder, rng = recipe.parent, np.random.default_rng(0)
    latents = rng.normal(3.0, 2.0, (24, 8, 8, 4)).astype(np.float16)
    np.savez(folder / "latents.npz", latents=latents, label=np.arange(24) % 10)
    cfg = load(
        "recipes/dit-b2-latents.yml",
        [
            *("model.image_size=8", "model.classes=10", "model.layers=1", "model.embed=32"),
            "model.blocks.block.mixer={heads: 4, head_dim: 8}",
            *("model.blocks.block.mlp.hidden=32", "model.dtype=float32", "mesh={data: -1}"),
            f"data.sources=[{{kind: npz, files: [{folder}/latents.npz], holdout: 0.3}}]",
            *("train.steps=3", "train.batch_size=8", "eval.every=3", "checkpoint.every=3"),
            *(f"run.output_dir={folder}", "run.name=latents", "run.tensorboard=false"),
        ],
    )
    (folder / "latents.yml").write_text(dump(cfg))
    assert len(tiny_vision.trained(folder / "latents.yml", "run.name=latents")) >= 3
    out = folder / "made.npz"
    words = ["sample", str(folder / "latents"), "--count", "3", "--steps", "2"]
    assert cli.main([*words, "--out", str(out)]) == 0
    made = np.load(out)
    assert made["latents"].shape == (3, 8, 8, 4) and [*made["label"]] == [0, 1, 2]
    assert cli.main([*words, "--out", str(folder / "made.png")]) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective={kind: classify}"], "classify is for model.kind=encoder"),
        (["model.blocks.block.modulation=null"], "how a time and a class reach a block"),
        (["model.out_channels=1", "model.channels=3"], "must be at least channels=3"),
        (["model.embed=30"], "must be a multiple of 4"),
        (["model.image_size=9"], "is not a multiple of patch=2; use 8"),
        (["objective.path=vp"], "velocity needs path: line"),
        (["eval.samples={prompts: [a]}"], "are for texts; leave them out"),
        (["data.sources=[{kind: npz, files: [a.npz]}]", "data.image.flip=true"], "are latents"),
        (["model.channels=4", "eval.samples={count: 4}"], "latents are not pictures"),
    ],
)
def test_a_mistake_is_named(recipe, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(recipe, overrides)
