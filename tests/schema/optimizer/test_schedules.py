"""Schedules as data, against their closed forms."""

import math

import pydantic
import pytest

from maxstack.optim import learning_rate_at
from maxstack.schema.optimizer import OptimizerConfig, schedule_faults


def values(schedule, steps, *counts, learning_rate=1.0):
    cfg = OptimizerConfig(learning_rate=learning_rate, schedule=schedule)
    assert list(schedule_faults(cfg, steps)) == []
    at = learning_rate_at(cfg, steps)
    return [float(at(count)) for count in counts]


def problem(steps, **optimizer):
    return next(schedule_faults(OptimizerConfig(**optimizer), steps))


def refused(**optimizer):
    with pytest.raises(pydantic.ValidationError) as caught:
        OptimizerConfig(**optimizer)
    context = caught.value.errors()[0]["ctx"]
    return context["key"], context["message"]


def test_warmup_cosine_rises_to_the_peak_and_falls_to_a_share_of_it():
    got = values(
        {"kind": "warmup_cosine", "warmup_steps": "10%", "end_value": "10%"},
        100,
        0,
        5,
        10,
        55,
        100,
        learning_rate=0.02,
    )
    assert got == pytest.approx([0.0, 0.01, 0.02, 0.02 * (0.1 + 0.9 * 0.5), 0.002], rel=1e-5)


@pytest.mark.parametrize(
    "shape, halfway", [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)]
)
def test_wsd_warms_up_holds_and_decays_over_the_last_steps(shape, halfway):
    got = values(
        {"kind": "wsd", "warmup_steps": 10, "decay_steps": "20%", "shape": shape},
        100,
        0,
        5,
        10,
        50,
        80,
        90,
        100,
        learning_rate=2.0,
    )
    assert got == pytest.approx([0.0, 1.0, 2.0, 2.0, 2.0, 2 * halfway, 0.0], abs=1e-6)


def test_inverse_sqrt_falls_as_one_over_the_root_of_the_step():
    got = values({"kind": "inverse_sqrt", "warmup_steps": 4}, 1000, 0, 2, 4, 16, 400)
    assert got == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.1], rel=1e-5)


def test_joined_schedules_start_anew_at_each_boundary_and_fill_the_steps_between():
    joined = {
        "kind": "join",
        "boundaries": ["10%", 60],
        "schedules": [
            {"kind": "linear", "init_value": 0.0, "end_value": "100%"},
            {"kind": "constant"},
            {"kind": "cosine"},
        ],
    }
    assert values(joined, 100, 0, 5, 10, 59, 60, 80, 100, learning_rate=0.1) == pytest.approx(
        [0, 0.05, 0.1, 0.1, 0.1, 0.05, 0.0], abs=1e-7
    )


def test_piecewise_boundaries_may_be_shares_of_the_run():
    got = values(
        {"kind": "piecewise_constant", "boundaries_and_scales": {"50%": 0.1, 80: 0.5}},
        100,
        0,
        51,
        90,
    )
    assert got == pytest.approx([1.0, 0.1, 0.05])


def test_sgdr_cycles_take_the_peak_from_the_learning_rate():
    cycles = [
        {"warmup_steps": 0, "decay_steps": 10},
        {"warmup_steps": 0, "decay_steps": "10%", "peak_value": 0.5},
    ]
    assert values({"kind": "sgdr", "cosine_kwargs": cycles}, 100, 0, 5, 10, 15) == pytest.approx(
        [1.0, 0.5, 0.5, 0.25], abs=1e-6
    )


def test_a_learning_rate_may_be_a_whole_schedule_and_then_nothing_shapes_it():
    cfg = OptimizerConfig(learning_rate={"kind": "constant", "value": 0.25})
    assert cfg.schedule is None
    assert learning_rate_at(cfg, 10)(3) == 0.25


def test_a_schedule_without_a_kind_changes_arguments_of_the_default():
    assert OptimizerConfig(schedule={"warmup_steps": 3}).schedule == {
        "kind": "warmup_cosine",
        "warmup_steps": 3,
        "end_value": "10%",
    }


def test_two_schedules_for_one_learning_rate_are_refused():
    assert (
        refused(learning_rate={"kind": "constant", "value": 1.0}, schedule={"kind": "constant"})[0]
        == "schedule"
    )


def test_the_reported_rate_counts_updates_inside_multisteps():
    chain = [{"kind": "MultiSteps", "every_k_schedule": 4, "inner": [{"kind": "adamw"}]}]
    at = learning_rate_at(
        OptimizerConfig(
            learning_rate=1.0, schedule={"kind": "linear", "end_value": 0.0}, chain=chain
        ),
        40,
    )
    assert [float(at(step)) for step in (0, 3, 4, 20)] == pytest.approx([1.0, 1.0, 0.9, 0.5])


def test_the_reported_rate_is_that_of_the_item_when_none_uses_the_shared_one():
    assert (
        learning_rate_at(
            OptimizerConfig(schedule=None, chain=[{"kind": "sgd", "learning_rate": 0.5}]), 10
        )(0)
        == 0.5
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_shares_fit_into_the_shortest_runs(steps):
    assert all(
        math.isfinite(value)
        for value in values(
            {"kind": "warmup_cosine", "warmup_steps": "2%", "end_value": "10%"},
            steps,
            *range(steps),
        )
    )
    assert all(
        math.isfinite(value)
        for value in values(
            {"kind": "wsd", "warmup_steps": "2%", "decay_steps": "98%"}, steps, *range(steps)
        )
    )


@pytest.mark.parametrize(
    "schedule, key",
    [
        ({"kind": "warmup_cosine", "warmup_steps": 200}, "schedule.warmup_steps"),
        ({"kind": "warmup_cosine", "warmup_steps": 50, "decay_steps": 50}, "schedule.warmup_steps"),
        ({"kind": "warmup_constant", "warmup_steps": 0}, "schedule.warmup_steps"),
        ({"kind": "inverse_sqrt", "warmup_steps": 101}, "schedule.warmup_steps"),
        ({"kind": "cosine", "decay_steps": 0}, "schedule.decay_steps"),
        ({"kind": "wsd", "warmup_steps": 50, "decay_steps": "60%"}, "schedule.decay_steps"),
        (
            {
                "kind": "join",
                "schedules": [{"kind": "constant"}, {"kind": "cosine"}],
                "boundaries": [150],
            },
            "schedule.boundaries",
        ),
        (
            {"kind": "join", "schedules": [{"kind": "constant"}] * 3, "boundaries": [20, 10]},
            "schedule.boundaries",
        ),
        (
            {
                "kind": "join",
                "schedules": [
                    {"kind": "constant"},
                    {"kind": "wsd", "warmup_steps": 60, "decay_steps": 5},
                ],
                "boundaries": [50],
            },
            "schedule.schedules.1.warmup_steps",
        ),
        (
            {"kind": "piecewise_constant", "boundaries_and_scales": {200: 0.1}},
            "schedule.boundaries_and_scales",
        ),
    ],
)
def test_steps_that_contradict_each_other_or_the_run_are_refused(schedule, key):
    got, message = problem(100, schedule=schedule)
    assert got == key and any(digit in message for digit in "0123456789")


def test_a_schedule_inside_multisteps_is_checked_against_the_updates_that_it_sees():
    inner = [
        {
            "kind": "adamw",
            "learning_rate": {"kind": "warmup_cosine", "peak_value": 1.0, "warmup_steps": 30},
        }
    ]
    chain = [{"kind": "MultiSteps", "every_k_schedule": 4, "inner": inner}]
    assert (
        problem(100, chain=chain, schedule=None)[0] == "chain.0.inner.0.learning_rate.warmup_steps"
    )


@pytest.mark.parametrize(
    "schedule, key, words",
    [
        (
            {"kind": "warmup_cosin", "warmup_steps": 1},
            "schedule.kind",
            "did you mean warmup_cosine",
        ),
        ({"kind": "adamw"}, "schedule.kind", "no schedule 'adamw'"),
        ({"kind": "warmup_cosine", "warmup": 1}, "schedule.warmup", "warmup_steps"),
        ({"kind": "warmup_cosine"}, "schedule", "needs warmup_steps"),
        (
            {"kind": "warmup_cosine", "warmup_steps": "2"},
            "schedule.warmup_steps",
            "a share of train.steps",
        ),
        (
            {"kind": "warmup_cosine", "warmup_steps": "120%"},
            "schedule.warmup_steps",
            "a share of train.steps",
        ),
        (
            {"kind": "wsd", "warmup_steps": 1, "decay_steps": 1, "shape": "sqroot"},
            "schedule.shape",
            "did you mean sqrt",
        ),
        (
            {
                "kind": "join",
                "boundaries": [1],
                "schedules": [{"kind": "constant"}, {"kind": "cosin"}],
            },
            "schedule.schedules.1.kind",
            "did you mean cosine",
        ),
        (3, "schedule", "kind"),
    ],
)
def test_a_mistaken_schedule_is_explained(schedule, key, words):
    got, message = refused(schedule=schedule)
    assert got == key and words in message


def test_a_share_of_a_learning_rate_needs_a_learning_rate():
    key, message = refused(
        learning_rate={
            "kind": "join",
            "boundaries": [5],
            "schedules": [
                {"kind": "linear", "init_value": 0.0, "end_value": "100%"},
                {"kind": "constant", "value": 1.0},
            ],
        }
    )
    assert key == "learning_rate.schedules.0.end_value" and "share of a learning rate" in message
