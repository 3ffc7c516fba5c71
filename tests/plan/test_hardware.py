"""Steps on meshes of TPUs and GPUs that are not here compile, and the compilers copy nothing whole
that is split."""

import pytest
from test_meshes import CASES, config
from topologies import needs

from maxstack.plan.step import compile_step
from maxstack.plan.topology import parse

RELEASE = [pytest.mark.release]
COMPILED = [
    ("v5e:2x4", "context ring", []),
    ("v5e:2x4", "stage rounds", RELEASE),
    ("v5e:2x4", "expert context", RELEASE),
    ("h100:1x8", "data context tensor", RELEASE),
    ("h100:1x8", "stage rounds", []),
]


@pytest.mark.parametrize(
    "name, case",
    [pytest.param(name, case, marks=[needs(name), *marks]) for name, case, marks in COMPILED],
)
def test_a_step_compiles_for_devices_that_are_not_here(name, case, capfd):
    model, mesh = CASES[case]
    step = compile_step(config(model, mesh), parse(name))
    assert step.compiled.memory_analysis().argument_size_in_bytes > 0
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
