"""Steps on meshes of TPUs and GPUs that are not here compile, and the compilers copy nothing whole that is split."""

import pytest
from test_meshes import CASES, config
from test_topology import needs

from maxstack.plan.step import compile_step
from maxstack.plan.topology import parse

MESHES = ("context ring", "context ulysses", "expert fsdp", "stage rounds", "hsdp, all in host memory", "data context tensor")


@pytest.mark.parametrize("case", MESHES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in ("v5e:2x4", "h100:1x8")])
def test_a_step_compiles_for_devices_that_are_not_here(name, case, capfd):
    model, mesh = CASES[case]
    step = compile_step(config(model, mesh), parse(name if case != "context ulysses" else name.replace("2x4", "2x2").replace("1x8", "1x4")))
    assert step.compiled.memory_analysis().argument_size_in_bytes > 0
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
