"""A folder becomes a run, is trained on a mesh, and becomes a folder again: the same model all the
way."""

import numpy as np
import parity
import processes
import pytest

from maxstack import cli

FOLDER = parity.GOLDENS / "qwen3_moe"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run of an imported folder after five steps on 8 virtual devices under fsdp x tensor."""
    folder = tmp_path_factory.mktemp("convert")
    assert cli.main(["import", str(FOLDER), "--out", str(folder / "run")]) == 0
    output = processes.train(
        folder / "run" / "config.yml",
        "train.steps=5",
        "train.batch_size=8",
        "data.seq_len=16",
        "model.dtype=float32",
        "run.virtual_devices=8",
        "mesh.fsdp=2",
        "mesh.tensor=2",
        "run.tensorboard=false",
        "run.compilation_cache=null",
    )
    return folder, output


@pytest.mark.slow
def test_a_run_of_an_imported_folder_starts_from_its_weights(trained):
    folder, output = trained
    assert f"starting from the weights in {folder / 'run' / 'checkpoints' / '0'}" in output
    assert not any(name in output for name in ("resumed", "nothing left"))


@pytest.mark.slow
def test_the_export_scores_as_the_run_does_and_not_as_the_folder_did(trained):
    folder, _ = trained
    assert cli.main(["export", str(folder / "run"), "--out", str(folder / "out")]) == 0
    golden = np.load(FOLDER / "golden.npz")
    np.savez(folder / "tokens.npz", tokens=golden["tokens"], lengths=golden["lengths"])
    found = {}
    for name, model in (
        ("run", folder / "run"),
        ("step", folder / "run" / "checkpoints" / "5"),
        ("export", folder / "out"),
        ("folder", FOLDER),
    ):
        out = f"{folder}/{name}.npz"
        command = ["score", str(model), "model.dtype=float32", "--out", out]
        assert cli.main([*command, "--tokens", f"{folder}/tokens.npz"]) == 0
        found[name] = np.load(out)["logprobs"]
    np.testing.assert_array_equal(found["run"], found["export"])
    np.testing.assert_array_equal(found["run"], found["step"])
    assert np.abs(found["run"] - found["folder"]).max() > 1e-3
