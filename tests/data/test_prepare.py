import gzip
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from json_lines import lines_of_texts, write_texts
from source_files import contents, opened, source_of, texts_of, write_array_records
from tokenizer_files import learn_pieces

from maxstack import cli
from maxstack.data.engines import Processes
from maxstack.data.feed import Feed
from maxstack.data.prepare import prepare
from maxstack.data.sources import open_source
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import ConfigError, DataError
from maxstack.evals.baselines import baselines
from maxstack.load import load
from maxstack.schema.data import BytesTokenizer, DataConfig, SentencePieceTokenizer, SyntheticSource

BYTES = "data.tokenizer={kind: bytes}"
FEW = "data.sources.0.files=[texts/1*.txt]"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for i in range(30):
        Path("texts", f"{i}.txt").write_text(f"text number {i} " * (i + 1))
    write_texts("lines.jsonl", (f"line {i}" for i in range(20)))


def config(**fields):
    sources = [
        source_of("text", "texts/*.txt", name="my texts", holdout=0.3),
        source_of("jsonl", "lines.jsonl"),
    ]
    return DataConfig(**{"sources": sources} | fields)


def tokens(files, **fields):
    return source_of("array_record", files, content="tokens", **fields)


def shards(files, **fields):
    """The documents of shards."""
    return opened("array_record", files, content="tokens", **fields)


def manifest(out="out"):
    return json.loads(Path(out, "manifest.json").read_text())


def lossy():
    """The section of a tokenizer that does not give texts back."""
    path = learn_pieces("sp", ["text number 1 2 3"] * 20, 30)
    return SentencePieceTokenizer(kind="sentencepiece", path=path)


@pytest.mark.slow
def test_the_manifest_counts_and_checksums_every_shard():
    prepare(config(), "out")
    made = manifest()
    assert made["shards"].keys() | {"manifest.json"} == {*os.listdir("out")}
    for name, shard in made["shards"].items():
        documents, data = contents(shards(f"out/{name}")), Path("out", name).read_bytes()
        assert shard["documents"] == len(documents)
        assert shard["tokens"] == sum(len(document.ids) for document in documents)
        assert shard["sha256"] == hashlib.sha256(data).hexdigest() and shard["size"] == len(data)
    texts = [path.read_text() for path in Path("texts").iterdir()]
    size = len("".join(texts)) + sum(len(f"line {i}") for i in range(20))
    assert made["totals"] == {"documents": 50, "tokens": size + 50, "bytes": size}
    assert made["tokenizer"]["fingerprint"] == open_tokenizer(config().tokenizer).fingerprint


def passed(cfg, lanes=2):
    """The batches of one pass over everything."""
    feed, made = Feed(cfg, range(lanes), lanes, evaluation=True, whole=True), []
    while (batch := next(feed))["mask"].any():
        made.append(batch)
    feed.close()
    return made


@pytest.mark.slow
def test_an_evaluation_counts_bytes_of_documents_from_text_and_from_lossy_shards():
    for path in Path("texts").iterdir():
        path.write_text(f"  \u4e2d\u6587 {path.read_text()}   ")
    text = config(sources=[source_of("text", "texts/*.txt")], seq_len=16, tokenizer=lossy())
    prepare(text, "out")
    stored = text.model_copy(update={"sources": (tokens("out/*.array_record"),)})
    size = sum(path.stat().st_size for path in Path("texts").iterdir())
    assert manifest()["totals"]["bytes"] == size
    for cfg, lanes in ((text, 2), (text, 3), (stored, 2)):
        assert sum(batch["bytes"].sum(dtype=np.float64) for batch in passed(cfg, lanes)) == size
    for left, right in zip(passed(text), passed(stored), strict=True):
        assert all(np.array_equal(left[key], right[key]) for key in left)
    says = r"out/.*record 0: tokens of sp.model, which do not give their text back"
    with pytest.raises(DataError, match=says):
        baselines(text, stored)


def test_tokens_that_older_versions_kept_have_no_bytes_but_where_each_token_is_one():
    write_array_records("old.array_record", [b"\2" + np.array([1, 5, 6, 7], "<u2").tobytes()])
    source = tokens("old.array_record", partial=True)
    for tokenizer, expected in ((BytesTokenizer(kind="bytes"), 3), (lossy(), np.nan)):
        batches = passed(config(sources=[source], seq_len=16, tokenizer=tokenizer))
        np.testing.assert_equal(sum(batch["bytes"].sum() for batch in batches), expected)


PROGRAM = """
import sys
from maxstack.schema.data import DataConfig, SyntheticSource
from maxstack.data.prepare import prepare

if __name__ == "__main__":
    cfg = DataConfig(sources=[SyntheticSource(kind="synthetic", documents=int(sys.argv[1]), length=2000)])
    prepare(cfg, "out", shard_size=500)
"""  # noqa: E501


def test_after_a_kill_finished_shards_are_kept_and_the_rest_is_made():
    Path("program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", "8000"]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def times():
        """When the shards that are finished were written."""
        names = [path.stem for path in Path("out").glob(".finished/synthetic-*.json")]
        return {name: Path("out", name).stat().st_mtime_ns for name in names}

    while len(times()) < 2:
        assert first.poll() is None
        time.sleep(0.005)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert not Path("out/manifest.json").exists()
    kept = times()
    subprocess.run(command, check=True, capture_output=True)
    whole = manifest()
    assert whole["totals"]["documents"] == 8000 and len(whole["shards"]) == 16 > len(kept) >= 2
    assert {name: Path("out", name).stat().st_mtime_ns for name in kept} == kept
    assert {*os.listdir("out")} == {"manifest.json", *whole["shards"]}
    made = shards("out/*.array_record")
    plain = open_source(SyntheticSource(kind="synthetic", documents=8000, length=2000))
    assert all(np.array_equal(made[i].ids, plain[i]) for i in range(0, 8000, 97))


@pytest.mark.slow
def test_a_shard_that_finds_no_room_is_an_error_that_names_it_and_leaves_no_piece():
    Path("program.py").write_text(
        "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n" + PROGRAM
    )
    done = subprocess.run([sys.executable, "program.py", "600"], capture_output=True, text=True)
    says = "out/synthetic-0-train-00000-of-00002.array_record cannot be written"
    assert done.returncode == 1 and says in done.stderr
    assert [*Path("out").rglob("*.unfinished")] == [*Path("out").glob(".finished/*.json")] == []


@pytest.mark.slow
def test_a_finished_folder_is_left_alone_and_says_so(capsys):
    times = []
    for workers in (1, 3):
        prepare(config(), "out", Processes(workers))
        times.append({path: path.stat().st_mtime_ns for path in Path("out").iterdir()})
    assert "already complete" in capsys.readouterr().out and times[0] == times[1]


def test_a_path_where_no_folder_can_be_is_refused_before_anything_is_read():
    for out in ("lines.jsonl", "lines.jsonl/below"):
        with pytest.raises(ConfigError, match=rf"--out {out}: .*lines.jsonl is no folder"):
            prepare(config(tokenizer={"kind": "sentencepiece", "path": "missing"}), out)


@pytest.mark.slow
def test_preparing_asks_for_no_rules_between_sections(capsys):
    words = ["data.sources.0.holdout=0", "eval.every=10"]
    command = ["data", "prepare", "quickstart", "--out", "made", "--workers", "1"]
    assert cli.main([*command, *words, FEW]) == 0
    told = capsys.readouterr().out
    assert "train on them: 'data.sources=" in told and "eval on them" not in told


def test_what_prepare_prints_gives_the_rows_that_the_texts_would(capsys):
    sources = [
        {"kind": "text", "name": "my texts", "files": ["texts/*.txt"], "holdout": 0.3},
        {"kind": "jsonl", "files": ["lines.jsonl"], "weight": [[1, 0.2], [9, 0.9]], "epochs": 3},
    ]
    words = [
        f"data.sources={json.dumps(sources)}",
        "data.seq_len=64",
        "data.mixture.by=tokens",
        BYTES,
    ]
    texts = load("quickstart", words)
    prepare(texts.data, "out", shard_size=5)
    lines = dict(line.split(" on them: ") for line in capsys.readouterr().out.splitlines()[1:])
    stored = load("quickstart", [*words, *shlex.split(lines["train"]), *shlex.split(lines["eval"])])
    one, other = (Feed(cfg.data, range(4), 4) for cfg in (texts, stored))
    for _ in range(12):
        left, right = next(one), next(other)
        assert [*map(np.array_equal, left.values(), right.values())] == [True] * len(left)
    held = (
        Feed(texts.data, [0], 1, evaluation=True),
        Feed(stored.eval.data, [0], 1, whole=True, evaluation=True),
    )
    left, right = (next(feed)["tokens"] for feed in held)
    assert np.array_equal(left, right)
    for feed in (one, other, *held):
        feed.close()


def test_a_folder_with_shards_of_other_data_is_refused():
    prepare(config(), "out")

    def refused(cfg, **options):
        with pytest.raises(ConfigError, match="out: holds shards of other data"):
            prepare(cfg, "out", **options)

    refused(config(tokenizer=BytesTokenizer(kind="bytes", eos=True)))
    refused(config(), shard_size=3)
    Path("texts/3.txt").write_text("changed")
    refused(config())


def test_bad_records_that_the_quarantine_allows_leave_the_others_where_they_are(capsys):
    lines = ['{"text": "good"}', '{"text": 3}', '{"text": "fine"}', "no JSON", '{"text": "last"}']
    Path("lines.jsonl").write_text("\n".join(lines))
    source = source_of("jsonl", "lines.jsonl")
    cfg = config(sources=[source], quarantine=2, seq_len=8)
    prepare(cfg, "out", shard_size=2)
    told = capsys.readouterr().out
    assert all(f"passed over: lines.jsonl: line {number}" in told for number in (2, 4))
    stored = config(sources=[tokens("out/*-train-*")], seq_len=8, quarantine=0)
    one, other = (Feed(each, range(2), 2) for each in (cfg, stored))
    for _ in range(6):
        assert np.array_equal(next(one)["tokens"], next(other)["tokens"])
    one.close()
    other.close()
    with pytest.raises(DataError, match="line 4"):
        prepare(config(sources=[source], quarantine=1, seq_len=8), "other", shard_size=2)


def test_copies_of_held_out_documents_are_counted_and_can_be_kept_together(capsys, monkeypatch):
    monkeypatch.setenv("MAXSTACK_CACHE", "cache")
    lines = lines_of_texts(f"line {i % 20}" for i in range(60))
    Path("lines.jsonl").write_text(lines)

    def splits(path="lines.jsonl", **by):
        documents = (opened("jsonl", path, holdout=0.3, split=s, **by) for s in ("train", "eval"))
        return [*map(texts_of, documents)]

    def prepared(out, **by):
        prepare(config(sources=[source_of("jsonl", "lines.jsonl", holdout=0.3, **by)]), out)

    train, held = splits()
    copies = sum(text in train for text in held)
    prepared("out")
    told = capsys.readouterr().out
    assert copies and f"{copies} held-out documents stand among those to train on" in told
    assert "hashes" not in Path("out/manifest.json").read_text()
    train, held = splits(holdout_by="content")
    assert train and held and not {*train} & {*held}
    prepared("apart", holdout_by="content")
    assert "held-out documents" not in capsys.readouterr().out
    Path("other.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert splits("other.jsonl.gz", holdout_by="content") == [train, held]
    # An edit that keeps the size is another split.
    Path("lines.jsonl").write_text(lines.replace("line 1", "LINE 1"))
    os.utime("lines.jsonl", ns=(1, 1))
    train, held = splits(holdout_by="content")
    assert any("LINE" in text for text in train) and not {*train} & {*held}


@pytest.mark.slow
def test_shards_of_another_tokenizer_are_refused_by_name():
    prepare(config(), "out")
    bytes_and_eos = BytesTokenizer(kind="bytes", eos=True)
    with pytest.raises(DataError) as caught:
        Feed(config(sources=[tokens("out/*-train-*")], tokenizer=bytes_and_eos), range(2), 2)
    for tokenizer in (config().tokenizer, bytes_and_eos):
        assert open_tokenizer(tokenizer).fingerprint in str(caught.value)


def test_a_shard_cut_short_or_not_in_the_manifest_is_refused():
    prepare(config(), "out")
    shard = next(Path("out").glob("jsonl-1-train-00000*"))
    Path("out/stray.array_record").write_bytes(shard.read_bytes())
    with pytest.raises(DataError, match="stray.array_record: not listed"):
        shards("out/stray*")
    with open(shard, "ab") as file:
        file.write(b"x" * 65536)
    with pytest.raises(DataError, match=f"{shard.name}: .* bytes, but manifest.json says"):
        shards("out/jsonl*")


def test_shards_that_a_stopped_prepare_did_not_write_are_named():
    prepare(config(), "out")
    files = sorted(Path("out").glob("my_texts-train-*"))
    for path in files[6:]:
        path.unlink()
    Path("out/manifest.json").unlink()
    with pytest.raises(DataError, match=rf"^{files[6]}, .* and {len(files) - 9} more: no such"):
        shards("out/*-train-*")
    assert len(shards("out/*-train-*", partial=True)) > 6


def test_all_shards_of_a_source_that_the_manifest_lists_and_files_match_must_be_there():
    prepare(config(), "out", shard_size=100)
    lost = Path("out/jsonl-1-train-00000-of-00001.array_record")
    lost.unlink()
    says = f"^{lost}: no such file, although out/manifest.json names it"
    with pytest.raises(DataError, match=says):
        shards("out/*-train-*")
    assert len(shards("out/my_texts-train-*"))


def test_shards_without_a_manifest_are_read_where_that_is_asked_for():
    prepare(config(), "out")
    Path("out/manifest.json").unlink()
    with pytest.raises(DataError, match=r"^out/manifest.json: no such file, .*partial: true"):
        shards("out/*-train-*")
    assert len(shards("out/jsonl-*", partial=True)) == 20


def test_a_manifest_of_something_else_is_an_error():
    prepare(config(), "out")
    Path("out/manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(DataError, match="out/manifest.json: not a manifest"):
        shards("out/*.array_record")
