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
import sentencepiece
from array_record.python.array_record_module import ArrayRecordWriter

from maxstack import cli
from maxstack.data.engines import Processes
from maxstack.data.feed import Feed
from maxstack.data.prepare import prepare
from maxstack.data.sources import open_source
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import ConfigError, DataError
from maxstack.evals.baselines import baselines
from maxstack.load import load
from maxstack.schema.data import (
    ArrayRecordSource,
    BytesTokenizer,
    DataConfig,
    JsonlSource,
    SentencePieceTokenizer,
    SyntheticSource,
    TextSource,
)

BYTES = "data.tokenizer={kind: bytes}"
FEW = "data.sources.0.files=[texts/1*.txt]"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for i in range(30):
        Path("texts", f"{i}.txt").write_text(f"text number {i} " * (i + 1))
    Path("lines.jsonl").write_text(
        "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(20))
    )
    return tmp_path


def config(**fields):
    sources = [
        TextSource(kind="text", name="my texts", files=["texts/*.txt"], holdout=0.3),
        JsonlSource(kind="jsonl", files=["lines.jsonl"]),
    ]
    return DataConfig(**{"sources": sources} | fields)


def tokens(files, **fields):
    return ArrayRecordSource(kind="array_record", files=[files], content="tokens", **fields)


def all_of(documents):
    return [documents[i] for i in range(len(documents))]


@pytest.mark.slow
def test_the_manifest_counts_and_checksums_every_shard():
    prepare(config(), "out")
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert (
        set(manifest["shards"])
        == {path.name for path in Path("out").glob("*.array_record")}
        == set(os.listdir("out")) - {"manifest.json"}
    )
    for name, shard in manifest["shards"].items():
        documents = all_of(open_source(tokens(f"out/{name}")))
        assert shard["documents"] == len(documents) and shard["tokens"] == sum(
            len(document.ids) for document in documents
        )
        assert shard["sha256"] == hashlib.sha256(
            Path("out", name).read_bytes()
        ).hexdigest() and shard["size"] == os.path.getsize(f"out/{name}")
    size = sum(path.stat().st_size for path in Path("texts").iterdir()) + sum(
        len(f"line {i}") for i in range(20)
    )
    assert manifest["totals"] == {"documents": 50, "tokens": size + 50, "bytes": size}
    assert manifest["tokenizer"]["fingerprint"] == open_tokenizer(config().tokenizer).fingerprint


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
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["text number 1 2 3"] * 20),
        model_prefix="sp",
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = SentencePieceTokenizer(kind="sentencepiece", path="sp.model")
    text = DataConfig(
        sources=[TextSource(kind="text", files=["texts/*.txt"])], seq_len=16, tokenizer=tokenizer
    )
    prepare(text, "out")
    shards = text.model_copy(update={"sources": (tokens("out/*.array_record"),)})
    size = sum(path.stat().st_size for path in Path("texts").iterdir())
    assert json.loads(Path("out/manifest.json").read_text())["totals"]["bytes"] == size
    for cfg, lanes in ((text, 2), (text, 3), (shards, 2)):
        assert sum(batch["bytes"].sum(dtype=np.float64) for batch in passed(cfg, lanes)) == size
    for left, right in zip(passed(text), passed(shards), strict=True):
        assert all(np.array_equal(left[key], right[key]) for key in left)
    with pytest.raises(
        DataError, match=r"out/.*record 0: tokens of sp.model, which do not give their text back"
    ):
        baselines(text, shards)


def test_tokens_that_older_versions_kept_have_no_bytes_but_where_each_token_is_one(tmp_path):
    writer = ArrayRecordWriter("old.array_record", "group_size:1")
    writer.write(b"\2" + np.array([1, 5, 6, 7], "<u2").tobytes())
    writer.close()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["text number 1 2 3"] * 20),
        model_prefix="sp",
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    lossy = SentencePieceTokenizer(kind="sentencepiece", path="sp.model")
    for tokenizer, expected in ((BytesTokenizer(kind="bytes"), 3), (lossy, np.nan)):
        batches = passed(
            DataConfig(
                sources=[tokens("old.array_record", partial=True)], seq_len=16, tokenizer=tokenizer
            )
        )
        np.testing.assert_equal(sum(batch["bytes"].sum() for batch in batches), expected)


PROGRAM = """
import sys
from maxstack.schema.data import DataConfig, SyntheticSource
from maxstack.data.prepare import prepare

if __name__ == "__main__":
    cfg = DataConfig(sources=[SyntheticSource(kind="synthetic", documents=int(sys.argv[1]), length=2000)])
    prepare(cfg, "out", shard_size=500)
"""  # noqa: E501


def test_after_a_kill_finished_shards_are_kept_and_the_rest_is_made(folder):
    Path("program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "program.py", "8000"]
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    while len(list(Path("out").glob(".finished/synthetic-*.json"))) < 2:
        assert first.poll() is None
        time.sleep(0.005)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert not Path("out/manifest.json").exists()
    kept = {
        path.name.removesuffix(".json"): Path("out", path.name.removesuffix(".json"))
        .stat()
        .st_mtime_ns
        for path in Path("out").glob(".finished/synthetic-*.json")
    }
    subprocess.run(command, env=environment, check=True, capture_output=True)
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert (
        manifest["totals"]["documents"] == 8000 and len(manifest["shards"]) == 16 > len(kept) >= 2
    )
    assert {name: Path("out", name).stat().st_mtime_ns for name in kept} == kept
    assert set(os.listdir("out")) == {"manifest.json", *manifest["shards"]}
    made, plain = (
        open_source(tokens("out/*.array_record")),
        open_source(SyntheticSource(kind="synthetic", documents=8000, length=2000)),
    )
    assert all(np.array_equal(made[i].ids, plain[i]) for i in range(0, 8000, 97))


@pytest.mark.slow
def test_a_shard_that_finds_no_room_is_an_error_that_names_it_and_leaves_no_piece():
    Path("program.py").write_text(
        "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n" + PROGRAM
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "program.py", "600"], env=environment, capture_output=True, text=True
    )
    assert (
        done.returncode == 1
        and "out/synthetic-0-train-00000-of-00002.array_record cannot be written" in done.stderr
    )
    assert [*Path("out").rglob("*.unfinished")] == [*Path("out").glob(".finished/*.json")] == []


@pytest.mark.slow
def test_a_finished_folder_is_left_alone_and_says_so(capsys):
    prepare(config(), "out")
    before = {path: path.stat().st_mtime_ns for path in Path("out").iterdir()}
    prepare(config(), "out", Processes(3))
    assert "already complete" in capsys.readouterr().out and before == {
        path: path.stat().st_mtime_ns for path in Path("out").iterdir()
    }


def test_a_path_where_no_folder_can_be_is_refused_before_anything_is_read():
    for out in ("lines.jsonl", "lines.jsonl/below"):
        with pytest.raises(ConfigError, match=rf"--out {out}: .*lines.jsonl is no folder"):
            prepare(config(tokenizer={"kind": "sentencepiece", "path": "missing"}), out)


@pytest.mark.slow
def test_preparing_asks_for_no_rules_between_sections(capsys):
    words = ["data.sources.0.holdout=0", "eval.every=10"]
    assert (
        cli.main(["data", "prepare", "quickstart", "--out", "made", "--workers", "1", *words, FEW])
        == 0
    )
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
    shards = load("quickstart", [*words, *shlex.split(lines["train"]), *shlex.split(lines["eval"])])
    one, other = (Feed(cfg.data, range(4), 4) for cfg in (texts, shards))
    for _ in range(12):
        left, right = next(one), next(other)
        assert [*map(np.array_equal, left.values(), right.values())] == [True] * len(left)
    held = (
        Feed(texts.data, [0], 1, evaluation=True),
        Feed(shards.eval.data, [0], 1, whole=True, evaluation=True),
    )
    left, right = (next(feed)["tokens"] for feed in held)
    assert np.array_equal(left, right)
    for feed in (one, other, *held):
        feed.close()


@pytest.mark.parametrize("change", ["tokenizer", "shard size", "documents"])
def test_a_folder_with_shards_of_other_data_is_refused(change):
    prepare(config(), "out")
    if change == "documents":
        Path("texts/3.txt").write_text("changed")
    cfg = (
        config(tokenizer=BytesTokenizer(kind="bytes", eos=True))
        if change == "tokenizer"
        else config()
    )
    with pytest.raises(ConfigError, match="out: holds shards of other data"):
        prepare(cfg, "out", shard_size=3 if change == "shard size" else None)


def test_bad_records_that_the_quarantine_allows_leave_the_others_where_they_are(capsys):
    lines = ['{"text": "good"}', '{"text": 3}', '{"text": "fine"}', "no JSON", '{"text": "last"}']
    Path("lines.jsonl").write_text("\n".join(lines))
    source = JsonlSource(kind="jsonl", files=["lines.jsonl"])
    cfg = config(sources=[source], quarantine=2, seq_len=8)
    prepare(cfg, "out", shard_size=2)
    told = capsys.readouterr().out
    assert all(f"passed over: lines.jsonl: line {number}" in told for number in (2, 4))
    shards = config(sources=[tokens("out/*-train-*")], seq_len=8, quarantine=0)
    one, other = (Feed(each, range(2), 2) for each in (cfg, shards))
    for _ in range(6):
        assert np.array_equal(next(one)["tokens"], next(other)["tokens"])
    one.close()
    other.close()
    with pytest.raises(DataError, match="line 4"):
        prepare(config(sources=[source], quarantine=1, seq_len=8), "other", shard_size=2)


def test_copies_of_held_out_documents_are_counted_and_can_be_kept_together(capsys, monkeypatch):
    monkeypatch.setenv("MAXSTACK_CACHE", "cache")
    lines = [json.dumps({"text": f"line {i % 20}"}) + "\n" for i in range(60)]
    Path("lines.jsonl").write_text("".join(lines))

    def splits(path="lines.jsonl", **by):
        source = JsonlSource(kind="jsonl", files=[path], holdout=0.3, **by)
        return source, [
            [*map(bytes, all_of(open_source(source, split=s)))] for s in ("train", "eval")
        ]

    source, (train, held) = splits()
    copies = sum(text in train for text in held)
    prepare(config(sources=[source]), "out")
    told = capsys.readouterr().out
    assert copies and f"{copies} held-out documents stand among those to train on" in told
    assert "hashes" not in Path("out/manifest.json").read_text()
    source, (train, held) = splits(holdout_by="content")
    assert train and held and not {*train} & {*held}
    prepare(config(sources=[source]), "apart")
    assert "held-out documents" not in capsys.readouterr().out
    Path("other.jsonl.gz").write_bytes(gzip.compress(Path("lines.jsonl").read_bytes()))
    assert splits("other.jsonl.gz", holdout_by="content")[1] == [train, held]
    # An edit that keeps the size is another split.
    Path("lines.jsonl").write_text("".join(lines).replace("line 1", "LINE 1"))
    os.utime("lines.jsonl", ns=(1, 1))
    train, held = splits(holdout_by="content")[1]
    assert any(b"LINE" in text for text in train) and not {*train} & {*held}


@pytest.mark.slow
def test_shards_of_another_tokenizer_are_refused_by_name():
    prepare(config(), "out")
    other = DataConfig(
        sources=[tokens("out/*-train-*")], tokenizer=BytesTokenizer(kind="bytes", eos=True)
    )
    with pytest.raises(DataError) as caught:
        Feed(other, range(2), 2)
    assert all(
        open_tokenizer(cfg.tokenizer).fingerprint in str(caught.value) for cfg in (config(), other)
    )


def test_a_shard_cut_short_or_not_in_the_manifest_is_refused():
    prepare(config(), "out")
    shard = next(Path("out").glob("jsonl-1-train-00000*"))
    Path("out/stray.array_record").write_bytes(shard.read_bytes())
    with pytest.raises(DataError, match="stray.array_record: not listed"):
        open_source(tokens("out/stray*"))
    with open(shard, "ab") as file:
        file.write(b"x" * 65536)
    with pytest.raises(DataError, match=f"{shard.name}: .* bytes, but manifest.json says"):
        open_source(tokens("out/jsonl*"))


def test_shards_that_a_stopped_prepare_did_not_write_are_named():
    prepare(config(), "out")
    shards = sorted(Path("out").glob("my_texts-train-*"))
    for path in shards[6:]:
        path.unlink()
    Path("out/manifest.json").unlink()
    with pytest.raises(DataError, match=rf"^{shards[6]}, .* and {len(shards) - 9} more: no such"):
        open_source(tokens("out/*-train-*"))
    assert len(open_source(tokens("out/*-train-*", partial=True))) > 6


def test_all_shards_of_a_source_that_the_manifest_lists_and_files_match_must_be_there():
    prepare(config(), "out", shard_size=100)
    lost = Path("out/jsonl-1-train-00000-of-00001.array_record")
    lost.unlink()
    with pytest.raises(
        DataError, match=f"^{lost}: no such file, although out/manifest.json names it"
    ):
        open_source(tokens("out/*-train-*"))
    assert len(open_source(tokens("out/my_texts-train-*")))


def test_shards_without_a_manifest_are_read_where_that_is_asked_for():
    prepare(config(), "out")
    Path("out/manifest.json").unlink()
    with pytest.raises(DataError, match=r"^out/manifest.json: no such file, .*partial: true"):
        open_source(tokens("out/*-train-*"))
    assert len(open_source(tokens("out/jsonl-*", partial=True))) == 20


def test_a_manifest_of_something_else_is_an_error():
    prepare(config(), "out")
    Path("out/manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(DataError, match="out/manifest.json: not a manifest"):
        open_source(tokens("out/*.array_record"))
