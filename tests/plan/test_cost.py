"""`maxstack plan --tokens`: days, chip-hours and money from a bound on speed; what is refused."""

import json

import pytest
import tiny

from maxstack import cli
from maxstack.config import dump
from maxstack.errors import ConfigError
from maxstack.models.flops import Count
from maxstack.plan import cost, report
from maxstack.plan.roofline import Roofline

DAY, PEAK = 86400, 1000.0


def plan(**changes):
    """A step of 1,000 tokens in at least 0.5 s on 4 devices, with half of their peak."""
    return report.Plan(
        **{
            "config": "run",
            "topology": "v5e:2x2",
            "chip": "TPU v5 lite",
            "devices": 4,
            "mesh": {},
            "batch_size": 10,
            "seq_len": 100,
            "parameters": 1,
            "memory": {"code": 1},
            "needed": 1,
            "usable": 2,
            "buffers": (),
            "flops": {"all": Count(0.5 * 0.5 * PEAK * 4, 2.0 * PEAK)},
            "products": {},
            "flows": (),
            "roofline": Roofline(0.5, 0.0, 0.0, {}),
            "peak": PEAK,
            "bubble": 0.0,
            "seconds": {},
        }
        | changes
    )


def test_days_and_chip_hours_follow_from_the_bound():
    found = cost.costs(plan(), cost.CostRequest(2000 * DAY, None, None))
    assert found == {"bound": cost.Cost(2 * DAY, 1.0, 96.0, None)}


def test_a_part_of_a_step_is_a_whole_step():
    assert cost.costs(plan(), cost.CostRequest(1001, None, None))["bound"].steps == 2


def test_an_mfu_lengthens_the_run_by_the_bounds_own_mfu_over_it():
    found = cost.costs(plan(), cost.CostRequest(2000 * DAY, 0.25, 2.5))
    assert (
        plan().mfu() == 0.5
        and found["mfu"] == cost.Cost(2 * DAY, 2.0, 192.0, 480.0)
        and found["bound"].price == 240.0
    )


def test_chips_of_two_devices_are_paid_once():
    assert (
        cost.costs(plan(chip="TPU7x"), cost.CostRequest(2000 * DAY, None, None))["bound"].chip_hours
        == 48.0
    )


def test_the_screen_says_bound_mfu_and_price_before_its_verdict():
    said = report.text(
        plan(), [*cost.lines(plan(), cost.CostRequest(2000 * DAY, 0.25, 2.5))]
    ).splitlines()
    assert said[-5:-2] == [
        "172,800,000 tokens are 172,800 steps",
        "at the speed bound, which real runs do not reach: at least 1 days, 96 chip-hours, "
        "240 in the currency of --price",
        "at an MFU of 25.0% causal: 2 days, 192 chip-hours, 480 in the currency of --price",
    ]


def test_an_mfu_above_the_bound_is_told_to_be_impossible():
    wanted = cost.CostRequest(1000, 0.6, None)
    assert [*cost.lines(plan(), wanted)][
        -1
    ] == "at an MFU of 60.0% causal: impossible, the bound is 50.0%"
    assert cost.json(plan(), wanted)["cost"].keys() == {"tokens", "mfu", "price", "bound"}


def test_a_step_that_does_not_fit_has_no_days():
    assert (
        "there is no speed bound"
        in [*cost.lines(plan(roofline=None), cost.CostRequest(1000, None, None))][0]
    )


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("15T", 15 * 10**12), ("1.5B", 1_500_000_000), ("7", 7)],
)
def test_suffixes_count(text, tokens):
    assert cost.request(_arguments("--tokens", text)).tokens == tokens


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tokens", "15Q"], "--tokens 15Q: is not a number of tokens"),
        (
            ["--tokens", "1T", "--mfu", "40"],
            "--mfu 40: must be a share of the peak between 0 and 1",
        ),
        (["--tokens", "1T", "--mfu", "nan"], "--mfu nan: must be"),
        (["--tokens", "1T", "--price", "free"], "--price free: must be the price"),
        (["--tokens", "1T", "--price", "1e999"], "--price 1e999: must be"),
        (["--mfu", "0.4"], "--mfu 0.4: needs --tokens"),
    ],
)
def test_nonsense_is_refused_by_name(words, says):
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        cost.request(_arguments(*words))


def test_a_device_without_figures_is_refused_before_anything_is_compiled(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("maxstack.plan.step.compile_step", None)
    (tmp_path / "run.yml").write_text(dump(tiny.config()))
    assert cli.main(f"plan {tmp_path / 'run.yml'} --tokens 1T".split()) == 1
    assert "this device has no figures in " in capsys.readouterr().err


def test_the_command_prints_and_writes_the_cost(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("maxstack.commands.plan._chosen", lambda args, cfg, where: (cfg, plan()))
    (tmp_path / "run.yml").write_text(dump(tiny.config()))
    target = tmp_path / "plan.json"
    assert (
        cli.main(
            (
                f"plan {tmp_path / 'run.yml'} --topology v5e:2x2 --tokens 2K --price 3 --json "
                f"{target}"
            ).split()
        )
        == 0
    )
    assert (
        "2,000 tokens are 2 steps" in capsys.readouterr().out
        and json.loads(target.read_text())["cost"]["bound"]["steps"] == 2
    )


def _arguments(*words):
    from maxstack.commands import plan as plan_cli

    return plan_cli.main.parse(["run.yml", *words])
