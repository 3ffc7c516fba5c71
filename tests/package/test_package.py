"""Packages of models with every kind of layer, opened where maxstack is not."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import alone
import jax
import numpy as np
import parity
import processes
import pytest
from flax import nnx
from golden_packages import write
from packaged import make

from maxstack import cli, sharding
from maxstack.inference.trained_model import config_of, read_weights
from maxstack.package.loader import FORMAT, Package, PackageError, check_calls
from maxstack.run import assemble

SOME, OTHERS = ["gemma3", "qwen3_next"], ["deepseek_v3", "gpt_oss", "llama4"]
ALLOWED = "stablehlo.custom_call @shape_assertion(%0) stablehlo.custom_call @Sharding(%1)"
PARTS = json.dumps({"format": FORMAT, "name": "no more"})


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A small package, made by hand."""
    folder = tmp_path_factory.mktemp("made") / "toy"
    make(folder)
    return folder


def found_alone(*folders):
    """What tests/alone.py finds of packages."""
    words = [sys.executable, "-I", str(alone.__file__), *map(str, folders)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "families",
    [pytest.param(SOME, marks=pytest.mark.slow), pytest.param(OTHERS, marks=pytest.mark.release)],
    ids=["some", "others"],
)
def test_a_process_without_maxstack_computes_the_runs_bits_and_answers(
    families, tmp_path, monkeypatch
):
    """Logits and log-probabilities bit for bit, and transformers' greedy tokens through the paged
    cache: of windows, recurrence, latents, sinks and chunks."""
    folders = [write(tmp_path, family, monkeypatch) for family in families]
    found = found_alone(*folders)
    assert found == {str(folder): {"score": True, "decode": True} for folder in folders}


@pytest.mark.slow
def test_images_are_classified_and_embedded_as_by_the_run(tmp_path):
    golden, out = np.load(parity.GOLDENS / "vit/vision.npz"), tmp_path / "vit"
    assert cli.main(["package", str(parity.GOLDENS / "vit"), "--out", str(out)]) == 0
    cfg, own = config_of(str(parity.GOLDENS / "vit"), [])
    run = assemble(cfg, sharding.make_mesh(cfg.mesh, jax.devices()[:1]), trains=False)
    params = read_weights(str(parity.GOLDENS / "vit"), run, own)
    images = np.random.default_rng(0).integers(0, 256, golden["pixels"].shape).astype(np.uint8)

    def computed(params, images):
        model = nnx.merge(run.graph, nnx.State(params))
        features = model.features(model.trunk({"pixels": run.objective.pixels(images)})[0])
        return features, model.logits(features)

    features, logits = jax.jit(computed)(params, images)
    package = Package(out, jax.devices()[:1])
    np.testing.assert_array_equal(package.signatures["embed"](images=images)["embedding"], features)
    np.testing.assert_array_equal(package.signatures["classify"](images=images)["logits"], logits)
    assert package.manifest["platforms"] == ["cpu", "tpu", "cuda"]


@pytest.mark.slow
def test_a_diffusion_transformer_makes_the_images_of_sample(tmp_path):
    """As float16, in which `sample` keeps latents: a program of all steps is one of its own."""
    model, said = str(parity.GOLDENS / "dit"), ["objective.prediction=eps", "objective.path=vp"]
    out, folder = tmp_path / "dit", tmp_path / "images.npz"
    words = ["--steps", "3", "--guidance", "2"]
    assert cli.main(["package", model, "--out", str(out), *words, *said]) == 0
    classes = ["--classes", "1,3", "--count", "4", "--seed", "5", "--out", str(folder)]
    assert cli.main(["sample", model, *classes, *words, *said]) == 0
    sampled = Package(out, jax.devices()[:1]).signatures["sample"](
        labels=[1, 3, 1, 3], numbers=range(4), seed=5
    )
    wanted = np.load(folder)["latents"].astype(np.float32)
    np.testing.assert_allclose(sampled["images"], wanted, rtol=1e-3, atol=1e-2)


def test_damage_is_refused_by_the_name_of_the_file(package, tmp_path):
    """Bits that changed, files that are cut, longer, missing or exchanged, paths that lead out."""
    first, second = sorted(path.name for path in (package / "programs").iterdir())[:2]

    def changed(name, change):
        folder = tmp_path / name
        shutil.copytree(package, folder)
        change(folder)
        return folder

    def flipped(folder):
        data = bytearray((folder / "programs" / first).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / "programs" / first).write_bytes(data)

    def exchanged(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        files = manifest["files"]
        a, b = f"programs/{first}", f"programs/{second}"
        files[a], files[b] = files[b], files[a]
        (folder / "manifest.json").write_text(json.dumps(manifest))

    def leading(path):
        def change(folder):
            manifest = json.loads((folder / "manifest.json").read_text())
            manifest["files"][path] = {"bytes": 0, "sha256": "0" * 64}
            (folder / "manifest.json").write_text(json.dumps(manifest))

        return change

    def unlisted(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["files"][weights]
        (folder / "manifest.json").write_text(json.dumps(manifest))

    def linked(folder):
        (folder / "programs" / first).rename(tmp_path / "elsewhere.bin")
        (folder / "programs" / first).symlink_to(tmp_path / "elsewhere.bin")

    weights = "weights/1.safetensors"
    cases = {
        "flipped": (flipped, f"{first}: is damaged"),
        "cut": (lambda f: os.truncate(f / weights, 100), f"{weights}: is 100 bytes"),
        "longer": (lambda f: (f / weights).open("ab").write(b"x"), f"{weights}: is .* manifest"),
        "missing": (lambda f: (f / weights).unlink(), f"{weights}: is missing"),
        "exchanged": (exchanged, "programs/.*: is "),
        "above": (leading("../secret"), "is no path inside"),
        "absolute": (leading("/etc/passwd"), "is no path inside"),
        "backslash": (leading("..\\secret"), "is no path inside"),
        "linked": (linked, "is a symbolic link"),
        "json": (lambda f: (f / "manifest.json").write_text("{"), "manifest.json: cannot be read"),
        "format": (lambda f: (f / "manifest.json").write_text('{"format": "x/9"}'), "format x/9"),
        "none": (lambda f: (f / "manifest.json").unlink(), "is no package"),
        "unlisted": (unlisted, "is not in manifest.json"),
        "without": (lambda f: (f / "manifest.json").write_text(PARTS), "has .*signatures"),
        "deep": (lambda f: (f / "manifest.json").write_text("[" * 200_000), "cannot be read"),
        "huge": (lambda f: os.truncate(f / "manifest.json", 65 << 20), "is larger than"),
    }
    for name, (change, message) in cases.items():
        folder = changed(name, change)
        with pytest.raises(PackageError, match=message):
            Package(folder, jax.devices()[:1])
        assert cli.main(["package", "verify", str(folder)]) == 1


def test_a_program_that_calls_its_host_is_refused_before_it_is_compiled(package, tmp_path):
    """A function of a library that is loaded there."""
    folder = shutil.copytree(package, tmp_path / "calling")
    file = next(iter((folder / "programs").iterdir()))

    def calls(x):
        return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((), np.float32))(x)

    target = "lapack_evil_ffi"
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target)]
    program = jax.export.export(jax.jit(calls), disabled_checks=allowed)(np.float32(1)).serialize()
    file.write_bytes(program)
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256(program).hexdigest()
    stated = {"bytes": len(program), "sha256": digest}
    manifest["files"][f"programs/{file.name}"] |= stated
    (folder / "manifest.json").write_text(json.dumps(manifest))
    opened = Package(folder, jax.devices()[:1])
    with pytest.raises(PackageError, match=f"{file.name}: calls {target} of its host"):
        for signature in opened.signatures.values():
            signature.loaded(f"programs/{file.name}")
    assert cli.main(["package", "verify", str(folder)]) == 1


@pytest.mark.parametrize(
    "text",
    [
        'stablehlo.custom_call @"odd name"(%0)',
        '"stablehlo.custom_call"(%0) <{call_target_name = "evil"}>',
        "stablehlo.custom_call @Sharding(%0) stablehlo.custom_call @Shardings(%1)",
    ],
)
def test_a_call_is_allowed_by_its_whole_name_alone(text):
    with pytest.raises(PackageError, match="of its host"):
        check_calls("x", b"custom_call_v1", SimpleNamespace(mlir_module=lambda: text))
    check_calls("x", b"custom_call_v1", SimpleNamespace(mlir_module=lambda: ALLOWED))


def test_a_package_is_verified_and_says_when_its_time_is_over(package, tmp_path, capsys):
    assert cli.main(["package", "verify", str(package)]) == 0
    assert "files are intact; classify" in capsys.readouterr().out
    old = shutil.copytree(package, tmp_path / "old")
    manifest = json.loads((old / "manifest.json").read_text())
    manifest["good_until"] = "2020-01-01"
    (old / "manifest.json").write_text(json.dumps(manifest))
    with pytest.warns(UserWarning, match="good until 2020-01-01.*`maxstack package`"):
        Package(old, jax.devices()[:1])
    manifest["platforms"] = ["tpu"]
    (old / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PackageError, match="made for 1 of tpu; there are 1 of cpu"):
        Package(old, jax.devices()[:1])


@pytest.mark.slow
def test_a_package_of_two_devices_answers_as_one_of_one(tmp_path, monkeypatch):
    """Logits to 1e-5 of their deviation, transformers' greedy tokens; and in int8 it is written."""
    family, golden = "llama", np.load(parity.GOLDENS / "llama/greedy.npz")
    one = write(tmp_path / "one", family, monkeypatch, ["--signature", "score"])
    two = write(tmp_path / "two", family, monkeypatch, ["--devices", "2"])
    low = ["--signature", "score", "quantization=int8"]
    int8 = write(tmp_path / "int8", family, monkeypatch, low)
    kept = np.load(tmp_path / "one/llama.score.npz")
    given = {"tokens": kept["tokens"], "lengths": kept["lengths"]}
    logits = [
        Package(folder, jax.devices()[:devices]).signatures["score"](**given)["logits"]
        for folder, devices in ((one, 1), (two, 2), (int8, 1))
    ]
    deviation = kept["logits"].std()
    assert np.abs(logits[1] - logits[0]).max() < 1e-5 * deviation
    assert 1e-4 * deviation < np.abs(logits[2] - logits[0]).max() < 0.2 * deviation
    prompts = [row[:size] for row, size in zip(golden["prompts"], golden["lengths"], strict=True)]
    package = Package(two, jax.devices()[:2])
    made = alone.answers(package, prompts, golden["tokens"].shape[1], **alone.GREEDY)
    assert made == golden["tokens"].tolist()
    with pytest.raises(PackageError, match="made for 2 of cpu"):
        Package(two, jax.devices()[:1])


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("v5e:1x1", marks=pytest.mark.compiler("v5e:1x1")),
        pytest.param("h100:1x1", marks=[pytest.mark.compiler("h100:1x1"), pytest.mark.release]),
    ],
)
def test_programs_compile_for_hardware_that_is_not_here(topology, tmp_path, monkeypatch, capsys):
    out = write(tmp_path, "gpt_oss", monkeypatch, ["--platforms", "tpu,cuda"])
    assert cli.main(["package", "verify", str(out), "--topology", topology]) == 0
    said = capsys.readouterr().out
    assert all(f"programs/{name}." in said for name in ("score", "prefill", "logits", "decode"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--signature", "scores"], "no such signature of this model.*did you mean score"),
        (["--lengths", "9999"], "the model reads .* tokens at most"),
        (["--devices", "9"], "there are 8 here; run.virtual_devices=9"),
        (["--name", "a/b"], "--name a/b: is part of URLs"),
    ],
)
def test_mistakes_are_told(words, message, tmp_path, capsys):
    model, out = str(parity.GOLDENS / "llama"), str(tmp_path / "out")
    assert cli.main(["package", model, "--out", out, *words]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not Path(out).exists()


@pytest.mark.slow
def test_devices_of_a_cpu_are_made_where_asked(tmp_path):
    model, out = str(parity.GOLDENS / "llama"), str(tmp_path / "out")
    words = ["package", model, "--out", out, "--devices", "2", "run.virtual_devices=2"]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    few = ["--signature", "embed", "--lengths", "16", "--platforms", "cpu"]
    processes.run([sys.executable, "-m", "maxstack.cli", *words, *few], environment)
    assert json.loads((tmp_path / "out/manifest.json").read_text())["devices"] == 2
    assert cli.main(["package", out, "--out", f"{out}2"]) == 1
