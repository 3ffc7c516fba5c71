"""data.steps from end to end: what is left, what was removed, restarts, and errors."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from json_lines import read_rows, write_texts
from source_files import opened

from maxstack import cli
from maxstack.commands.data import _task_texts
from maxstack.data.engines import Processes
from maxstack.data.feed import Feed
from maxstack.data.filters.removals import read_removed
from maxstack.data.prepare import prepare
from maxstack.errors import ConfigError, DataError, installing
from maxstack.schema.data import DataConfig

WORDS = "the to of and water house tree seven market quick stone river paper light window".split()
QUESTION = "Which animal barks at night in the garden when the moon is full and bright"
STEPS = [
    {"kind": "normalize"},
    {"kind": "length", "unit": "words", "min": 5},
    {"kind": "exact_duplicates"},
    {"kind": "regex", "pattern": "secret"},
    {"kind": "near_duplicates", "threshold": 0.7},
    {"kind": "decontaminate", "files": ["questions.txt"]},
    {"kind": "pii"},
]


def text_of(rng, words=80):
    return " ".join(rng.choice(WORDS) + str(rng.randrange(9)) for _ in range(words))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    a = [text_of(rng) for _ in range(40)]
    b = [text_of(rng) for _ in range(20)]
    write_texts("a.jsonl", a)
    rows = [
        a[3].upper() + "\r\n",  # an exact duplicate, but for case and white space
        a[7] + " and a few more words",  # a near duplicate
        "too short",
        b[0] + " this is secret",
        b[1] + " " + QUESTION.lower() + "!",
        b[2] + " jo@example.org",
        *b[3:],
        b[5] + " word",  # a near duplicate within the source
    ]
    write_texts("b.jsonl", rows)
    Path("questions.txt").write_text(QUESTION + "?\nshort\n")


def config(steps=STEPS, **fields):
    sources = [
        {"kind": "jsonl", "name": "first", "files": ["a.jsonl"]},
        {"kind": "jsonl", "name": "second", "files": ["b.jsonl"]},
    ]
    made = {"sources": sources, "steps": steps, "tokenizer": {"kind": "bytes"}} | fields
    return DataConfig.model_validate_json(json.dumps(made))


def texts(files):
    documents = opened("array_record", files, content="tokens")
    return [bytes(document.ids[1:].astype(np.uint8)).decode() for document in documents]


def all_files(out):
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(out).rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_what_is_left_is_written_and_what_was_removed_is_read_back(capsys):
    prepare(config(), "out")
    a, b = ([row["text"] for row in read_rows(name)] for name in ("a.jsonl", "b.jsonl"))
    assert texts("out/first-train-*") == a
    assert texts("out/second-train-*") == [b[5].replace("jo@example.org", "<email>"), *b[6:-1]]
    rows = [*read_removed("out", None, None, None)]
    got = {(row["step"], row["document"]): row for row in rows}
    assert {*got} == {
        ("exact_duplicates", 0),
        ("near_duplicates", 1),
        ("length", 2),
        ("regex", 3),
        ("decontaminate", 4),
        ("near_duplicates", len(b) - 1),
    }
    assert {row["source"] for row in rows} == {"second"}
    assert got["exact_duplicates", 0]["value"]["where"] == (
        f"a.jsonl: byte {sum(len(json.dumps({'text': text})) + 1 for text in a[:3])}"
    )
    assert got["near_duplicates", 1]["value"]["similarity"] > 0.8
    assert got["decontaminate", 4]["rule"] == "questions.txt" and got["length", 2]["value"] == 2
    assert got["near_duplicates", 1]["text"] == b[1]
    chosen = [*read_removed("out", "near_duplicates", "second", 1)]
    assert [row["document"] for row in chosen] == [1]
    with pytest.raises(ConfigError, match="--source third: .* second"):
        [*read_removed("out", None, "third", None)]
    counts = {step["name"]: step["sources"]["second"] for step in read_manifest()["steps"]}
    left = len(b)
    for name in ("length", "exact_duplicates", "regex", "near_duplicates", "decontaminate", "pii"):
        assert counts[name]["documents_in"] == left
        left -= sum(row["step"] == name for row in rows)
        assert counts[name]["documents_out"] == left
    assert counts["normalize"]["changed"] == 1 and counts["pii"]["changed"] == 1
    lost = sum(len(got["near_duplicates", at]["text"]) for at in (1, len(b) - 1))
    near = counts["near_duplicates"]
    assert near["bytes_in"] - near["bytes_out"] == lost
    assert counts["pii"]["bytes_out"] + sum(map(len, a)) == read_manifest()["totals"]["bytes"]
    page = Path("out/report.html").read_text()
    assert b[1][:400] in page and "&lt;email&gt;" in page and "<script" not in page
    assert " near_duplicates   second         21        2   9.5%" in capsys.readouterr().out


def read_manifest(out="out"):
    return json.loads(Path(out, "manifest.json").read_text())


@pytest.mark.slow
def test_the_result_is_the_same_whatever_the_number_of_workers():
    prepare(config(), "one")
    prepare(config(), "three", Processes(3))
    assert all_files("one") == all_files("three")


PROGRAM = """
import sys, json
from maxstack.data.engines import Processes
from maxstack.data.prepare import prepare
from maxstack.schema.data import DataConfig

if __name__ == "__main__":
    cfg = DataConfig.model_validate_json(open("data.json").read())
    prepare(cfg, sys.argv[1], Processes(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", ["passes/0-*", "passes/1-*", "passes/2-*", "result.npz"])
@pytest.mark.release
def test_a_killed_preparation_goes_on_where_it_stopped(after):
    write_texts("a.jsonl", [text_of(random.Random(n), 200) for n in range(1000)])
    Path("program.py").write_text(PROGRAM)
    Path("data.json").write_text(config().model_dump_json())
    command = [sys.executable, "program.py", "out"]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not [*Path("out").glob(f".steps/*/{after}")]:
        assert first.poll() is None
        time.sleep(0.002)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert not Path("out/manifest.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in Path("out").glob(f".steps/*/{after}")}
    subprocess.run(command, check=True, capture_output=True)
    prepare(config(), "whole", Processes(2))
    assert all_files("out") == all_files("whole")
    if after == "result.npz":
        assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.slow
def test_other_steps_are_other_data():
    prepare(config(STEPS[:2]), "out")
    for steps in ([], STEPS[:1]):
        with pytest.raises(ConfigError, match="out: holds shards of other data"):
            prepare(config(steps), "out")
    prepare(config([]), "plain")
    with pytest.raises(ConfigError, match="plain: holds shards of other data"):
        prepare(config(STEPS[:1]), "plain")


def test_training_on_sources_with_steps_is_refused():
    with pytest.raises(ConfigError, match="are applied by `maxstack data prepare`; train on what"):
        Feed(config(), range(2), 2)


def test_a_source_of_which_nothing_is_left_is_an_error():
    with pytest.raises(
        DataError, match=r"source first \(train\): data.steps removed all of its 40"
    ):
        prepare(config([{"kind": "length", "min": 10_000}]), "out")
    assert len([*read_removed("out", "length", "first", None)]) == 40


@pytest.mark.parametrize(
    "step, key",
    [
        ({"kind": "c4", "bad_words": "nothere.txt"}, "c4.bad_words"),
        ({"kind": "decontaminate", "files": ["nothere.txt"]}, "decontaminate.files"),
    ],
)
def test_a_file_that_a_step_names_must_be_there(step, key):
    with pytest.raises(ConfigError, match=f"{key}: nothere.txt: No such file"):
        prepare(config([step]), "out")


@pytest.mark.slow
def test_tasks_are_looked_for_by_their_names():
    from maxstack.evals.task_files import texts_of

    question = texts_of("cloze")[0]
    rng = random.Random(1)
    write_texts("b.jsonl", [text_of(rng), f"{text_of(rng)} {question} {text_of(rng)}"])
    cfg = config([{"kind": "decontaminate", "tasks": ["cloze"], "ngram": 4}])
    prepare(cfg, "out", task_texts=_task_texts(cfg))
    (row,) = read_removed("out", None, None, None)
    assert (row["rule"], row["document"]) == ("cloze", 1)


@pytest.mark.parametrize(
    "step, message",
    [
        ("{kind: regex, pattern: '('}", "data.steps.0.pattern"),
        (
            "{kind: regex, pattern: a, action: replace, replacement: '\\1'}",
            r"data.steps.0.replacement: '\\1' does not fit the pattern: invalid group",
        ),
        ("{kind: language, languages: [xx]}", "data.steps.0.languages: 'xx' is not known"),
        ("{kind: near_duplicates, threshold: 1.5}", "data.steps.0.threshold"),
        ("{kind: length, min: 5, max: 3}", "data.steps.0.max: is below min=5"),
        ("{kind: decontaminate, tasks: [nothere]}", "data.steps.0.tasks.0"),
        ("{kind: decontaminate}", "data.steps.0.tasks: names nothing to look for"),
        ("{kind: length}", "data.steps.0: removes nothing without a min or a max"),
        ("{kind: length, min: 1, name: a}, {kind: pii, name: a}", "data.steps.1.name: two steps"),
        ("{kind: gopher}", "data.steps.0"),
    ],
)
def test_a_wrong_key_is_named_when_the_configuration_is_read(step, message, capsys):
    Path("bad.yml").write_text(f"extends: quickstart\ndata: {{steps: [{step}]}}")
    assert cli.main(["data", "prepare", "bad.yml", "--out", "out"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "step, package, said",
    [
        ({"kind": "language", "languages": ["en"]}, "py3langid.langid", "py3langid"),
        ({"kind": "normalize", "ftfy": True}, "ftfy", "ftfy"),
        ({"kind": "pii"}, "phonenumbers", "phonenumberslite"),
        ({"kind": "near_duplicates"}, "rensa", "rensa"),
    ],
)
def test_a_package_that_is_not_installed_is_named_before_the_first_pass(
    step, package, said, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{said} .*{re.escape(installing('clean'))}"):
        prepare(config([step]), "out")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "source, message",
    [
        ("{kind: synthetic}", "holds no plain text, which data.steps need"),
        ("{kind: text, files: [a.jsonl], encoding_errors: keep}", "is keep, but data.steps"),
    ],
)
@pytest.mark.slow
def test_steps_need_plain_text(source, message):
    with pytest.raises(ValueError, match=message):
        config([{"kind": "pii"}], sources=[yaml.safe_load(source)])
