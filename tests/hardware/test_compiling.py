"""Options of the compiler: collectives of CPU devices in order, in every program of a run; and the
folder of compiled programs."""

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import processes
import pytest
import tiny

from maxstack.errors import ConfigError
from maxstack.hardware import compiling
from maxstack.run import assemble

NO_FLAG = "No such compile option: 'xla_nonsense'"


def meshes():
    return [
        tiny.make_run(tiny.config(mesh={"data": 1, "fsdp": size}), size).mesh for size in (1, 8)
    ]


def test_collectives_run_in_order_on_several_cpu_devices_alone():
    one, several = meshes()
    assert compiling.in_order(one) == {}
    assert compiling.in_order(several) == {compiling.IN_ORDER: False}


def test_flags_of_the_configuration_come_before_those_of_a_mesh():
    cfg = tiny.config(xla={"platform": "cpu", "flags": {compiling.IN_ORDER: True}})
    assert compiling.options_for(cfg, meshes()[1]) == {compiling.IN_ORDER: True}


def test_effort_that_the_environment_names_comes_before_ours(monkeypatch):
    cfg, mesh = tiny.config(), meshes()[0]
    monkeypatch.delenv("XLA_FLAGS")
    assert compiling.options_for(cfg, mesh) == compiling.QUICK
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    assert compiling.options_for(cfg, mesh) == {}


@pytest.mark.parametrize("name", ["init", "start", "step", "eval_step"])
@pytest.mark.slow
def test_every_program_of_a_run_is_compiled_in_order(name, monkeypatch):
    monkeypatch.setattr(compiling, "in_order", lambda mesh: {"xla_nonsense": 1})
    run = assemble(tiny.config(mesh={"data": 1, "fsdp": 8}), meshes()[1])
    batch = run.batches.abstract()
    given = {
        "init": (),
        "start": (run.abstract.params,),
        "step": (run.abstract, batch),
        "eval_step": (run.abstract.params, {**batch, "bytes": batch["mask"]}),
    }
    with pytest.raises(jax.errors.JaxRuntimeError, match=NO_FLAG):
        getattr(run, name).lower(*given[name]).compile()


def test_a_flag_that_xla_no_longer_has_is_left_out_by_name(monkeypatch):
    monkeypatch.setattr(compiling, "IN_ORDER", "xla_nonsense")
    compiling._knows.cache_clear()
    with pytest.warns(UserWarning, match="has no xla_nonsense: several collectives at once on CPU"):
        assert compiling.in_order(meshes()[1]) == {}
    compiling._knows.cache_clear()


def test_weights_are_treated_in_order(monkeypatch):
    monkeypatch.setattr(compiling, "in_order", lambda mesh: {"xla_nonsense": 1})
    run = tiny.make_run(tiny.config(mesh={"data": 1, "fsdp": 8}), 8)
    with pytest.raises(jax.errors.JaxRuntimeError, match=NO_FLAG):
        run.weights._make(lambda x: {"embed": x}, jnp.zeros(run.weights.shapes["embed"].shape))


@pytest.mark.release
def test_another_clone_finds_the_programs_that_one_has_compiled(tmp_path):
    cache, found = tmp_path / "cache", []
    path = processes.write_config(tmp_path, eval={"every": 0}, checkpoint={"every": 0})
    for name in ("one", "another"):
        for part in ("maxstack", "configs"):
            shutil.copytree(Path(__file__).parents[2] / part, tmp_path / name / part)
        words = [f"run.name={name}", f"run.compilation_cache={cache}", "train.steps=1"]
        command = [sys.executable, "-m", "maxstack.train", str(path), *words]
        subprocess.run(command, cwd=tmp_path / name, env=processes.environment(), check=True)
        found.append({file.name for file in cache.glob("jit_traced*")})  # the step
    assert found[0] == found[1] != set()


def test_programs_in_a_folder_that_others_may_write_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache/maxstack/xla"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"xla: belongs to another user, or others may write"):
        compiling.keep_programs("~/.cache/maxstack/xla")


def test_a_run_goes_on_where_programs_cannot_be_kept(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    compiling.keep_programs("~/.cache/maxstack/xla")
    assert "programs are not kept" in caplog.text
