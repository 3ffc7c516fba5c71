"""Consequences of refused updates: nothing, a rewind, or the end of the run."""

import json

import pydantic
import pytest

from maxstack.errors import ConfigError
from maxstack.faults.policy import ACCEPTED, NOT_FINITE, SPIKE, Policy, Rewind
from maxstack.schema.faults import FaultsConfig

NAN = float("nan")


def faults(max_skips=10, **spike):
    return FaultsConfig.model_validate({"max_skips": max_skips, "spike": spike or None})


def read(policy, kinds, begin=1, refused=0, loss=NAN, norm=NAN):
    """The decisions about steps of these kinds, from step `begin` on."""
    found = []
    for step, kind in enumerate(kinds, begin):
        refused = 0 if kind == ACCEPTED else refused + 1
        found.append(
            policy.read(
                {
                    "step": step,
                    "skipped": float(kind),
                    "refused": float(refused),
                    "loss": loss,
                    "grad_norm": norm,
                }
            )
        )
    return found


def test_one_refused_update_more_than_max_skips_ends_the_run():
    policy = Policy(faults(max_skips=3))
    assert read(policy, [0, 1, 1, 1, 0, 1, 2, 1, 0]) == [None] * 9
    with pytest.raises(
        ConfigError,
        match=r"step 14: loss 2.5, gradient norm nan: .* not finite; .* 4 updates in a row "
        r".*max_skips=3; lower optimizer",
    ):
        read(policy, [NOT_FINITE] * 5, begin=11, loss=2.5)


def test_spikes_in_a_row_rewind_and_skip_their_batches():
    policy = Policy(faults(rewind_after=3, before=5))
    assert read(policy, [0, 2, 2, 0, 2, 1, 2, 2], begin=20) == [None] * 7 + [Rewind(19, 27)]
    assert policy.skipped == [[19, 27]] and policy.rewinds == 1
    assert [step for step in range(1, 40) if policy.skips(step)] == list(range(19, 28))


def test_a_rewind_never_reaches_below_the_first_batch():
    assert read(Policy(faults(rewind_after=1, before=100)), [0, 2]) == [None, Rewind(1, 2)]


def test_a_further_rewind_keeps_what_earlier_ones_pass_over():
    policy = Policy(faults(rewind_after=1, before=3))
    for spike in (50, 20, 54):
        read(policy, [SPIKE], begin=spike)
    assert [step for step in range(1, 80) if policy.skips(step)] == [
        *range(17, 21),
        *range(47, 55),
    ]


def test_more_rewinds_than_allowed_end_the_run():
    policy = Policy(faults(rewind_after=2, max_rewinds=1))
    read(policy, [2, 2, 0])
    with pytest.raises(
        ConfigError,
        match=r"step 9: 2 spikes .* 1 rewinds in this run before, and faults.spike.max_rewinds=1",
    ):
        read(policy, [2, 2], begin=8)


def test_a_restored_policy_decides_as_an_uninterrupted_one():
    kinds, cfg = [0, 2, 2, 0, 2, 1, 2, 2, 0, 0], faults(rewind_after=2, before=1)
    whole = Policy(cfg)
    expected = read(whole, kinds)
    for cut in range(1, len(kinds)):
        policy = Policy(cfg)
        before = read(policy, kinds[:cut])
        policy = Policy(cfg, json.loads(json.dumps(policy.to_json())))
        in_a_row = next((i for i, kind in enumerate(reversed(kinds[:cut])) if not kind), cut)
        assert before + read(policy, kinds[cut:], begin=cut + 1, refused=in_a_row) == expected
        assert policy.to_json() == whole.to_json()


def test_rewind_after_above_max_skips_is_refused():
    with pytest.raises(
        pydantic.ValidationError, match=r"11 spikes in a row are never reached.*use 10 or less"
    ):
        faults(rewind_after=11)
