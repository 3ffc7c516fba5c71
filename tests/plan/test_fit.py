"""Refusal, before anything is compiled, of a run that cannot fit."""

import pytest
import tiny

from maxstack.errors import ConfigError
from maxstack.plan import fit


def test_a_state_larger_than_the_machine_is_refused_with_the_numbers():
    run = tiny.make_run(tiny.config(model=tiny.model(vocab=4_000_000, embed=16384)))
    with pytest.raises(
        ConfigError,
        match=r"at least [\d,.]+ GiB on each of 1 devices \(parameters \d+.*gradients \d+.*but "
        r"cpu has .*mesh.fsdp",
    ):
        fit.check_memory(run)


def test_what_fits_passes_and_is_counted_by_shards():
    run = tiny.make_run(tiny.config(mesh={"data": 1, "fsdp": 8}), 8)
    fit.check_memory(run)
    assert fit.least(run)["parameters"] < fit.least(tiny.make_run(tiny.config()))["parameters"] / 4
