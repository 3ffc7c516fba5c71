"""`maxstack plan --tokens`: days, chip-hours and money from a bound on speed; what is refused."""

import dataclasses
import json

import pytest
import tiny
from plans import plan

from maxstack.commands import plan as command
from maxstack.errors import ConfigError
from maxstack.plan import cost, report

DAY = 86400


@pytest.mark.parametrize(
    ("chip", "mfu", "price", "costs"),
    [
        ("TPU v5 lite", None, None, [(2 * DAY, 1.0, 96.0, None)]),
        ("TPU7x", None, None, [(2 * DAY, 1.0, 48.0, None)]),  # of two devices each
        ("TPU v5 lite", 0.25, 2.5, [(2 * DAY, 1.0, 96.0, 240.0), (2 * DAY, 2.0, 192.0, 480.0)]),
    ],
)
def test_days_chip_hours_and_price_follow_from_the_bound_or_an_mfu(chip, mfu, price, costs):
    made = plan(chip=chip)
    assert made.mfu() == 0.5
    found = cost.costs(made, cost.CostRequest(2000 * DAY, mfu, price))
    assert [*found] == ["bound", "mfu"][: len(costs)]
    assert [dataclasses.astuple(each) for each in found.values()] == costs


def test_a_part_of_a_step_is_a_whole_step():
    assert cost.costs(plan(), cost.CostRequest(1001, None, None))["bound"].steps == 2


def test_the_screen_says_bound_mfu_and_price_before_its_verdict():
    wanted = cost.CostRequest(2000 * DAY, 0.25, 2.5)
    said = report.text(plan(), [*cost.lines(plan(), wanted)]).splitlines()
    assert said[-5:-2] == [
        "172,800,000 tokens are 172,800 steps",
        "at the speed bound, which real runs do not reach: at least 1 days, 96 chip-hours, "
        "240 in the currency of --price",
        "at an MFU of 25.0% causal: 2 days, 192 chip-hours, 480 in the currency of --price",
    ]


def test_an_mfu_above_the_bound_is_told_to_be_impossible():
    wanted = cost.CostRequest(1000, 0.6, None)
    *_, last = cost.lines(plan(), wanted)
    assert last == "at an MFU of 60.0% causal: impossible, the bound is 50.0%"
    assert cost.json(plan(), wanted)["cost"].keys() == {"tokens", "mfu", "price", "bound"}


def test_a_step_that_does_not_fit_has_no_days():
    (line,) = cost.lines(plan(roofline=None), cost.CostRequest(1000, None, None))
    assert "there is no speed bound" in line


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("15T", 15 * 10**12), ("1.5B", 1_500_000_000), ("7", 7)],
)
def test_suffixes_count(text, tokens):
    assert cost.request(command.main.parse(["run.yml", "--tokens", text])).tokens == tokens


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--tokens 15Q", "--tokens 15Q: is not a number of tokens"),
        ("--tokens 1T --mfu 40", "--mfu 40: must be a share of the peak between 0 and 1"),
        ("--tokens 1T --mfu nan", "--mfu nan: must be"),
        ("--tokens 1T --price free", "--price free: must be the price"),
        ("--tokens 1T --price 1e999", "--price 1e999: must be"),
        ("--mfu 0.4", r"--mfu 0\.4: needs --tokens"),
    ],
)
def test_nonsense_is_refused_by_name(words, says):
    with pytest.raises(ConfigError, match=says):
        cost.request(command.main.parse(["run.yml", *words.split()]))


def test_a_device_without_figures_is_refused_before_anything_is_compiled(
    tmp_path, maxstack, monkeypatch
):
    monkeypatch.setattr("maxstack.plan.step.compile_step", None)
    path = tiny.write(tmp_path, tiny.config())
    assert "this device has no figures in " in maxstack(f"plan {path} --tokens 1T", code=1)


def test_the_command_prints_and_writes_the_cost(tmp_path, maxstack, monkeypatch):
    monkeypatch.setattr(command, "_chosen", lambda args, cfg, where: (cfg, plan()))
    path, target = tiny.write(tmp_path, tiny.config()), tmp_path / "plan.json"
    printed = maxstack(f"plan {path} --topology v5e:2x2 --tokens 2K --price 3 --json {target}")
    assert "2,000 tokens are 2 steps" in printed
    assert json.loads(target.read_text())["cost"]["bound"]["steps"] == 2
