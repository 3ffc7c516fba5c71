"""A compiled step in a file: the same numbers, and a refusal where it is of something else."""

import jax
import numpy as np
import pytest
import tiny

from maxstack.commands import plan
from maxstack.errors import ConfigError
from maxstack.hardware import compiling
from maxstack.plan import executable, step, topology, work
from maxstack.plan.program import parse

CONFIG = {"model": tiny.model(layers=1, pattern=["local"]), "mesh": {"data": 2, "fsdp": 4}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run, its compiled step, and the file."""
    run = tiny.make_run(tiny.config(**CONFIG), 8)
    compiled = tiny.compiled(run)
    path = tmp_path_factory.mktemp("steps") / "step"
    assert executable.save(run, compiled, str(path)) == path.stat().st_size
    return run, compiled, path


@pytest.mark.slow
def test_a_loaded_step_gives_what_the_compiled_one_gave(saved):
    run, compiled, path = saved
    (state, ours), (_, theirs) = (
        step(run.init(), tiny.place(run)) for step in (executable.load(run, str(path)), compiled)
    )
    assert jax.tree.map(float, ours) == jax.tree.map(float, theirs)
    assert int(state.step) == 1 and np.isfinite(float(ours["loss"]))


def test_a_loaded_step_keeps_the_names_and_lines_that_a_profile_needs(saved):
    run, compiled, path = saved
    loaded = executable.load(run, str(path))
    program = parse(loaded.as_text())
    products = [row.op_name for row in work.operations(program) if row.flops]
    assert products and all("model." in name or "optimizer" in name for name in products)
    assert {*program.frames} and "buffer_assignment" in "".join(dir(loaded.memory_analysis()))


@pytest.mark.slow
def test_a_step_that_a_run_before_compiled_is_compiled_again_to_be_saved(tmp_path):
    """What is read from the folder of programs and saved again has lost its functions."""
    compiling.keep_programs(str(tmp_path / "programs"))
    cfg, here = tiny.config(**CONFIG, train={"steps": 7}), topology.parse("here")
    step.compile_step(cfg, here)
    assert any((tmp_path / "programs").iterdir())
    plan._save(cfg, here, str(tmp_path / "step"))
    run = tiny.make_run(cfg, 8)
    loaded = executable.load(run, str(tmp_path / "step"))
    assert int(loaded(run.init(), tiny.place(run))[0].step) == 1


def test_a_step_of_another_configuration_is_refused_with_what_differs(saved):
    _, _, path = saved
    other = tiny.make_run(tiny.config(**CONFIG, train={"batch_size": 16}), 8)
    with pytest.raises(
        ConfigError, match=r"compiled for batch \{'tokens': \[8, 48\].*write it again"
    ):
        executable.load(other, str(path))


@pytest.mark.slow
def test_a_step_of_other_adapters_or_of_dropout_by_another_seed_is_refused(tmp_path):
    def made(alpha, seed):
        lora = {"alpha": alpha, "dropout": 0.1}
        return tiny.make_run(tiny.config(model=CONFIG["model"], lora=lora, train={"seed": seed}))

    run, path = made(16.0, 0), str(tmp_path / "step")
    executable.save(run, compiling.compiled(run.lower(), run.mesh), path)
    with pytest.raises(ConfigError, match="compiled for configuration"):
        executable.load(made(8.0, 0), path)
    with pytest.raises(ConfigError, match="compiled for seed 0, not 1; write it again"):
        executable.load(made(16.0, 1), path)


def test_what_is_no_step_is_refused(saved, tmp_path):
    run, _, path = saved
    (tmp_path / "text").write_text("no step")
    with pytest.raises(ConfigError, match="is not a compiled step"):
        executable.load(run, str(tmp_path / "text"))
    with pytest.raises(ConfigError, match="cannot read"):
        executable.load(run, str(tmp_path / "missing"))
