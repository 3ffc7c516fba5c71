"""Where a run's time went: the arithmetic on rows made by hand, and what people are told."""

import json
import math
import random
import subprocess
import sys

import pytest

from maxstack.report.goodput import CAUSES, FILE, Account, summary, text

DAY = 86400.0


def begin(time, boot="", monotonic=0.0):
    return {"event": "begin", "time": time, "boot": boot, "monotonic": monotonic}


def spent(time, event="spent", steps=None, stepping=0.0, waited=0.0, **seconds):
    done = {"steps": steps, "stepping": stepping, "waited": waited} if steps else {}
    return {"event": event, "time": time, "seconds": seconds} | done


def resume(time, step):
    return {"event": "resume", "time": time, "step": step}


def reckoned(*rows):
    account = Account()
    for row in rows:
        account.read(row)
    return account.goodput()


def written(folder, *rows):
    (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def parts(found):
    """Seconds that are not zero, checked to sum to the wall time."""
    assert {*found.seconds} == {*CAUSES} and min(found.seconds.values()) >= 0
    assert math.isclose(sum(found.seconds.values()), found.wall, abs_tol=1e-6)
    return {
        cause: round(seconds, 6) for cause, seconds in found.seconds.items() if round(seconds, 6)
    }


KILLED = (
    begin(1000),
    resume(1000, 0),
    spent(1010, **{"start-up": 4, "compile": 6}),
    spent(1030, steps=[1, 20], stepping=20, waited=2),
    spent(1031, save=1),
    spent(1041, steps=[21, 30], stepping=10),
)
"""Saved at step 20, killed after 30."""


BEGUN = {"data wait": 2, "start-up": 4, "compile": 6, "save": 1}
"""Its causes but for its steps."""


def test_a_run_in_one_piece_splits_into_its_causes():
    found = reckoned(*KILLED, spent(1050, "end", evaluation=8))
    assert parts(found) == BEGUN | {"useful": 28, "evaluation": 8, "other": 1}
    assert (found.wall, found.share) == (50, 28 / 50)
    assert (found.steps, found.lost_steps, found.restarts) == (30, 0, 0)


def test_steps_after_the_checkpoint_of_a_restart_are_lost_and_the_time_between_is_idle():
    found = reckoned(
        *KILLED,
        begin(1100),
        spent(1105, restore=5),
        resume(1105, 20),
        spent(1130, "end", steps=[21, 45], stepping=25),
    )
    lost = {"useful": 18 + 25, "restore": 5, "lost work": 10, "idle": 59}
    assert parts(found) == BEGUN | lost
    assert (found.wall, found.steps, found.lost_steps, found.restarts) == (130, 45, 10, 1)


def test_a_checkpoint_in_the_middle_of_a_row_keeps_that_part_of_it():
    found = reckoned(*KILLED, begin(1041), resume(1041, 15))
    assert parts(found) == BEGUN | {"useful": 13.5, "data wait": 1.5, "lost work": 15}
    assert (found.steps, found.lost_steps) == (15, 15)


def test_rewound_and_refused_steps_are_lost_in_the_same_process():
    found = reckoned(
        begin(0),
        spent(30, steps=[1, 30], stepping=30),
        resume(30, 20),
        spent(40, steps=[21, 30], stepping=10),
        {"event": "spent", "time": 41, "refused": 1, "refusing": 1.0},
        spent(50, steps=[32, 40], stepping=9),
    )
    assert parts(found) == {"useful": 39, "lost work": 11}
    assert (found.steps, found.lost_steps) == (39, 11)


def test_steps_done_again_without_a_word_count_once():
    found = reckoned(
        begin(0),
        spent(30, steps=[1, 30], stepping=30),
        begin(30),
        spent(45, steps=[16, 30], stepping=15),
    )
    assert parts(found) == {"useful": 30, "lost work": 15}


@pytest.mark.parametrize("skew", [DAY, -DAY])
def test_a_clock_moved_by_a_day_between_processes_of_a_machine_changes_nothing_but_a_remark(skew):
    now = 5 * DAY
    found = reckoned(
        begin(now, "a", 70),
        spent(now + 10, steps=[1, 10], stepping=10),
        spent(now + 20, "end", steps=[11, 20], stepping=10),
        begin(now + 25 + skew, "a", 95),
        spent(now + 30 + skew, "end", steps=[21, 25], stepping=5),
    )
    assert parts(found) == {"useful": 25, "idle": 5} and found.wall == 30
    assert f"by up to {skew:+,.0f} s" in found.remarks[0]


def test_a_clock_that_is_behind_on_another_machine_makes_no_negative_idle_time_and_is_told():
    found = reckoned(
        begin(5 * DAY, "a", 70),
        spent(5 * DAY + 10, steps=[1, 10], stepping=10),
        begin(4 * DAY, "b", 3),
        spent(4 * DAY + 10, steps=[11, 20], stepping=10),
    )
    assert parts(found) == {"useful": 20} and found.wall == 20
    assert "went back between processes (1 times, by 86,410 s or more)" in found.remarks[0]


def test_a_process_that_claims_more_than_it_lived_is_believed_so_that_the_sum_holds():
    assert parts(reckoned(begin(0), spent(5, compile=9), begin(5), spent(6, restore=1))) == {
        "compile": 9,
        "restore": 1,
    }


def test_whatever_the_rows_say_the_causes_add_up_and_none_is_negative():
    dice = random.Random(0)
    for _ in range(300):
        account, time = Account(), 1e9
        for _ in range(dice.randrange(1, 60)):
            time += dice.choice((1, 1, 1, 1, -DAY)) * dice.random() * 100
            first, seconds = dice.randrange(1, 30), dice.random() * 40
            account.read(
                dice.choice(
                    (
                        begin(time, dice.choice("ab "), dice.random() * 1e4),
                        resume(time, dice.randrange(40)),
                        spent(time, save=dice.random() * 9),
                        spent(
                            time,
                            steps=[first, first + dice.randrange(9)],
                            stepping=seconds,
                            waited=seconds * dice.random(),
                        ),
                        {"event": "spent", "time": time, "refused": 1, "refusing": seconds},
                    )
                )
            )
            parts(account.goodput())


@pytest.mark.parametrize("tail", [b'{"event": "spent", "ti', b"\xff\xfe\x00"])
def test_a_last_line_that_a_kill_cut_short_is_passed_over(tmp_path, tail):
    whole = summary(written(tmp_path, *KILLED))
    with (tmp_path / FILE).open("ab") as file:
        file.write(tail)
    assert summary(tmp_path) == whole


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        '{"event": "spent", "time": NaN}',
        '{"event": "spent", "time": 1, "seconds": {"x": 1}}',
        '{"event": "spent", "time": 1, "steps": [3, 2]}',
    ],
)
def test_a_damaged_line_within_is_passed_over_and_told(tmp_path, line):
    whole = summary(written(tmp_path, *KILLED))
    rows = (tmp_path / FILE).read_text().splitlines()
    (tmp_path / FILE).write_text("\n".join([*rows[:2], line, *rows[2:]]) + "\n")
    found = summary(tmp_path)
    assert (
        found.seconds == whole.seconds
        and "damaged lines of goodput.jsonl, skipped: 1" in found.remarks[0]
    )


def test_a_process_that_ended_before_it_had_a_step_to_do_is_no_restart():
    found = reckoned(*KILLED, begin(1041), spent(1043, "end", **{"start-up": 2}))
    assert found.restarts == found.lost_steps == 0 and parts(found)["start-up"] == 6


def test_people_are_shown_a_sentence_and_a_bar_for_each_cause():
    head, *rest = text(
        reckoned(*KILLED, begin(1041 + 9), resume(1050, 30), spent(1050, "end"))
    ).splitlines()
    assert head.startswith("goodput 56.0% of 0:00:50 since ") and head.endswith(
        ": 30 steps that count, 0 lost, 1 restart"
    )
    assert [line.split()[0] for line in rest] == [cause.split()[0] for cause in CAUSES]
    assert rest[0].split() == ["useful", "28.0", "s", "56.0%", "#" * 22]


def test_the_command_reads_several_runs_by_folder_or_by_name_and_writes_every_figure(
    tmp_path, monkeypatch, maxstack
):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a", "b"):
        (tmp_path / name).mkdir(parents=True)
        written(tmp_path / name, *KILLED)
    out = maxstack("goodput a b --json out.json")
    assert out.count("goodput 68.3%") == 2 and out.startswith("a: ") and "\nb: " in out
    found = json.loads((tmp_path / "out.json").read_text())
    assert [*found] == ["a", "b"]
    assert found["a"]["seconds"]["useful"] == 28 and found["a"]["goodput"] == 28 / 41


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("none", "none: no such folder"),
        (".", "not a run's folder; the runs in it are a"),
        ("empty", "empty: is not a run's folder; give one"),
        ("new", "new: no goodput.jsonl yet"),
        ("begun", "begun: no goodput.jsonl yet"),
        ("bad", "bad/goodput.jsonl: no line of it can be read"),
        ("a --json x/y", "the folder x does not exist"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, maxstack, arguments, told):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "empty", "new", "begun", "bad"):
        (tmp_path / name).mkdir()
    written(tmp_path / "a", *KILLED)
    (tmp_path / "new" / "config.yml").touch()
    (tmp_path / "begun" / FILE).write_text('{"event": "beg')
    (tmp_path / "bad" / FILE).write_text("torn\n")
    error = maxstack(f"goodput {arguments}", code=1)
    assert told in error and error.startswith("error: ") and error.count("\n") == 1


def test_the_command_does_without_jax(tmp_path):
    code = (
        "import sys; from maxstack import cli; assert not cli.main(['goodput', sys.argv[1]]) "
        "and not {'jax', 'numpy'} & {*sys.modules}"
    )
    folder = str(written(tmp_path, *KILLED))
    subprocess.run([sys.executable, "-c", code, folder], check=True)
