"""Steps on meshes of TPUs and GPUs that are not here compile, and the compilers copy nothing whole
that is split."""

import pytest
from test_meshes import CASES, config
from topologies import needs

from maxstack.plan.step import compile_step
from maxstack.plan.topology import parse

CASES_OF = {
    "v5e:2x4": ("context ring", "stage rounds", "expert context"),
    "h100:1x8": ("data context tensor", "stage rounds"),
}


@pytest.mark.parametrize(
    "name, case",
    [
        pytest.param(name, case, marks=needs(name))
        for name, cases in CASES_OF.items()
        for case in cases
    ],
)
def test_a_step_compiles_for_devices_that_are_not_here(name, case, capfd):
    model, mesh = CASES[case]
    step = compile_step(config(model, mesh), parse(name))
    assert step.compiled.memory_analysis().argument_size_in_bytes > 0
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
