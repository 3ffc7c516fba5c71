"""Files of JSON lines that hold what is not finite, as other programs and as maxstack read them."""

import json
import math

import pytest

from maxstack import command, strict_json
from maxstack.errors import DataError
from maxstack.profile import analysis
from maxstack.report import append, history
from maxstack.report.metrics import Writer

ROW = {"step": 3, "loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "skipped": 1}


def strictly(text):
    """What a parser reads that knows JSON alone."""

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def same(row, other):
    """Equal, where NaN is equal to NaN."""
    return repr(sorted(row.items())) == repr(sorted(other.items()))


def test_metrics_hold_null_and_say_why(tmp_path):
    Writer(tmp_path, first=True).write(ROW)
    assert strictly((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 3,
        "loss": None,
        "grad_norm": None,
        "low": None,
        "skipped": 1,
        "not_finite": {"loss": "nan", "grad_norm": "inf", "low": "-inf"},
    }


@pytest.mark.parametrize("written", [json.dumps, strict_json.write])
def test_readers_give_back_the_floats_of_old_and_new_files(tmp_path, written):
    path = tmp_path / "metrics.jsonl"
    path.write_text(written(ROW) + "\n" + written(ROW | {"step": 4}) + "\n")
    assert same(next(append.newest(path)), ROW | {"step": 4})
    assert same(history.last_rows(tmp_path)[0], ROW)
    assert same(next(analysis._metrics(path)), ROW)
    lines = path.read_bytes().splitlines(keepends=True)
    for row in (history._row(lines[0]), history._parsed(lines)[0]):
        assert same(row, ROW)


def test_trackers_get_what_is_not_finite_as_it_is(tmp_path):
    class Kept:
        cut_short, got = False, []

        def add(self, *call):
            self.got.append(call)

    Writer(tmp_path, True, Kept()).write(ROW)
    ((_, step, values),) = Kept.got
    assert step == 3 and math.isnan(values["train/loss"]) and values["train/grad_norm"] == math.inf


def test_files_of_figures_say_it_in_the_object_that_holds_it(tmp_path):
    path = tmp_path / "figures.json"
    command.write_json(
        str(path), {"tasks": {"cloze": {"acc": math.nan, "n": 2}}, "all": [math.inf]}
    )
    assert strictly(path.read_text()) == {
        "tasks": {"cloze": {"acc": None, "n": 2, "not_finite": {"acc": "nan"}}},
        "all": [None],
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 101 + "]" * 101, "nested deeper than 100 lists and objects"),
        ("[" * 200_000, "nested deeper"),
        ("9" * 101, "number 999.* has more than 100 digits"),
        ("1e999", "number 1e999 is larger than any float"),
        ("[" + "[]," * 2_000_000 + "0]", "holds more than 2,000,000 lists and objects"),
        ('{"a": 1, "b": {"c": 2, "c": 3}}', "key 'c' is given twice"),
        (r'{"a": "\ud83d"}', "holds half of a surrogate pair"),
        ("NaN", "NaN is not JSON"),
        ('"a"'.encode("utf-16"), "not JSON"),
        ("", "not JSON"),
    ],
)
def test_json_of_others_is_refused_beyond_its_bounds(text, says):
    with pytest.raises(DataError, match=f"^it: {says}"):
        strict_json.parse(text, "it")


def test_json_within_the_bounds_is_read_as_json_reads_it():
    for value in (10**99, -(10**98), 1e308, "\U0001f600", None, {"": [[]]}, [True, 0.1]):
        assert strict_json.parse(json.dumps(value)) == value
    deepest = json.loads("[" * 100 + "]" * 100)
    assert strict_json.parse(json.dumps(deepest)) == deepest
    assert strict_json.parse(b"\xef\xbb\xbf[1]") == [1]


def test_records_may_have_what_json_has_not_but_no_depth():
    read = strict_json.parse(r'{"a": NaN, "a": Infinity, "b": "\ud83d"}', strict=False)
    assert read == {"a": math.inf, "b": "\ud83d"}
    with pytest.raises(DataError, match="nested deeper"):
        strict_json.parse("[" * 101 + "]" * 101, strict=False)


def test_a_line_of_rows_is_bounded(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b" " * ((1 << 20) + 1))
    with pytest.raises(DataError, match="metrics.jsonl: holds a line of more than 1,048,576 bytes"):
        history.History(tmp_path).update()


@pytest.mark.parametrize("row", [{"loss": []}, {"loss": "0"}, {"loss": 3}, {"other": "nan"}, []])
def test_what_is_not_finite_is_named_by_its_words_alone(row):
    text = json.dumps({"loss": None, "not_finite": row})
    assert strict_json.read(text)["loss"] is None
