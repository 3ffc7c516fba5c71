import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from json_lines import write_rows, write_texts
from processes import children
from source_files import source_of

from maxstack.data import feed as feed_module
from maxstack.data.feed import Feed
from maxstack.data.sources import Synthetic
from maxstack.errors import ConfigError, DataError
from maxstack.schema.data import DataConfig, SyntheticSource

BATCH = 8


@pytest.fixture(autouse=True, scope="module")
def corpus(tmp_path_factory):
    """Forty text files and a hundred JSON lines."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("corpus")
        patch.chdir(folder)
        (folder / "texts").mkdir()
        for i in range(40):
            (folder / "texts" / f"{i}.txt").write_text(f"file {i} " * (1 + i * i % 37))
        write_texts("lines.jsonl", (f"line {i} " * (1 + i % 5) for i in range(100)))
        yield folder


def config(**fields):
    sources = [
        source_of("text", "texts/*.txt", weight=2.0, holdout=0.2),
        source_of("jsonl", "lines.jsonl"),
        SyntheticSource(kind="synthetic", length=50, ragged=True, weight=0.5),
    ]
    return DataConfig(**{"sources": sources, "seq_len": 32} | fields)


def batches(feed, count):
    return [next(feed) for _ in range(count)]


def the_same(left, right, rows=slice(None)):
    return len(left) == len(right) and all(
        (a[key][rows] == b[key]).all() and a[key].dtype == b[key].dtype
        for a, b in zip(left, right, strict=True)
        for key in a | b
    )


@pytest.fixture
def feeds():
    """Makes feeds and closes them."""
    made = []

    def make(*args, **kwargs):
        made.append(Feed(*args, **kwargs))
        return made[-1]

    yield make
    for feed in made:
        feed.close()


def test_a_batch_has_the_keys_shapes_and_types_of_the_contract(feeds):
    batch = next(feeds(config(), range(BATCH), BATCH))
    assert {key: (array.shape, array.dtype.name) for key, array in batch.items()} == {
        "tokens": ((8, 32), "int32"),
        "targets": ((8, 32), "int32"),
        "positions": ((8, 32), "int32"),
        "segments": ((8, 32), "int32"),
        "mask": ((8, 32), "float32"),
    }


@pytest.mark.slow
def test_workers_beyond_the_lanes_of_an_odd_split_change_nothing(feeds):
    expected = batches(feeds(config(), range(BATCH), BATCH), 5)
    assert the_same(
        expected, batches(feeds(config(workers=2, prefetch=1), [1, 4, 7], BATCH), 5), [1, 4, 7]
    )


@pytest.mark.parametrize(
    ("packing", "workers"), [("concat", 0), ("fit", 0), ("none", 0), ("concat", 1)]
)
def test_a_saved_position_continues_the_same_on_another_split_of_the_lanes(packing, workers, feeds):
    cfg = config(packing=packing, workers=workers)
    whole = feeds(config(packing=packing, prefetch=7), range(BATCH), BATCH)
    batches(whole, 11)
    state = whole.state()
    expected = batches(whole, 6)
    for lanes in (range(2), range(2, 8)):
        part = feeds(cfg, lanes, BATCH)
        part.restore(state[lanes.start : lanes.stop])
        assert the_same(expected, batches(part, 6), slice(lanes.start, lanes.stop))
        assert (part.state() == whole.state()[lanes.start : lanes.stop]).all()


def test_batches_made_ahead_do_not_count_in_the_position(feeds):
    eager, lazy = (feeds(config(prefetch=many), range(BATCH), BATCH) for many in (9, 1))
    batches(eager, 3), batches(lazy, 3)
    time.sleep(0.2)
    assert (eager.state() == lazy.state()).all() and eager.state().dtype == np.int64


def test_a_position_of_another_shape_is_refused(feeds):
    feed = feeds(config(), range(BATCH), BATCH)
    with pytest.raises(DataError, match="number of data.sources changed"):
        feed.restore(np.zeros((BATCH, 3), np.int64))


def test_marks_of_other_systems_are_told_where_they_are_kept(feeds):
    Path("marked").mkdir()
    Path("marked/a.txt").write_bytes(b"plain\n")
    Path("marked/b.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    kept = "is kept, as in marked/b.txt"
    mark = f"a byte order mark {kept} (normalize: [bom] drops it)"
    crlf = f"CRLF {kept} (normalize: [newlines] makes it LF)"
    for normalize, said in ((["bom"], [crlf]), ([], [mark, crlf])):
        source = source_of("text", "marked/*.txt", normalize=normalize)
        (line,) = feeds(config(sources=[source]), range(BATCH), BATCH).describe()
        assert line.split("; ")[1:] == said


def test_evaluation_reads_each_held_out_document_once_and_then_pads_for_ever(feeds):
    feed = feeds(config(), range(BATCH), BATCH, evaluation=True)
    text, counted, empty = b"", 0, 0
    while empty < 3:
        batch = next(feed)
        text += batch["targets"][batch["bytes"] == 1].astype(np.uint8).tobytes()
        counted += int(batch["bytes"].sum())
        empty += not batch["mask"].any()
        assert batch["bytes"].dtype == np.float32 and not batch["bytes"][batch["mask"] == 0].any()
    held = int(feed.describe()[0].split()[1])
    assert 0 < held < 40 and len(feed.describe()) == 1 and text.count(b"file") > held
    assert counted == len(text)


def test_evaluation_without_held_out_documents_is_an_error():
    with pytest.raises(DataError, match="holdout"):
        Feed(DataConfig(sources=[source_of("jsonl", "lines.jsonl")]), [0], 1, evaluation=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_record_surfaces_from_the_background_with_its_name(workers, feeds, corpus):
    (corpus / "bad.jsonl").write_text('{"text": "fine, fine, fine"}\n{"text": 3}\n')
    cfg = config(sources=[source_of("jsonl", "bad.jsonl")], seq_len=16, workers=workers)
    with pytest.raises(DataError, match="bad.jsonl: line 2"):
        batches(feeds(cfg, range(2), 2), 50)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_a_worker_that_is_killed_is_an_error_and_no_hang(feeds):
    feed = feeds(config(workers=1), range(BATCH), BATCH)
    next(feed)
    for child in children(os.getpid()):
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(child, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="terminated unexpectedly"):
        batches(feed, 100)


PROGRAM = """
import time
from maxstack.data.feed import Feed
from maxstack.schema.data import DataConfig, SyntheticSource

def main():
    feed = Feed(DataConfig(sources=[SyntheticSource(kind="synthetic")], seq_len=8, workers=2), range(4), 4)
    print(next(feed)["tokens"].shape, flush=True)
    time.sleep(60)

if __name__ == "__main__":
    main()
"""  # noqa: E501


@pytest.fixture(scope="module")
def program(corpus):
    """A main module of its own, run with arguments that grain's flags do not know; it waits after
    its first batch."""
    package = corpus / "userpackage"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "userpackage.train", "data.seq_len=3", "--unknown-flag"]
    main = subprocess.Popen(command, cwd=corpus, stdout=subprocess.PIPE, text=True)
    main.first_line = main.stdout.readline()
    yield main
    main.kill()
    main.communicate()


def test_workers_start_from_a_main_module_with_arguments_of_its_own(program):
    assert program.first_line == "(4, 8)\n"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_workers_end_when_the_main_process_is_killed(program):
    started = children(program.pid)
    assert len(started) >= 2
    program.kill()
    deadline = time.time() + 20
    while time.time() < deadline and any(alive(child) for child in started):
        time.sleep(0.1)
    assert not any(alive(child) for child in started)


HANGING = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from maxstack.data import sources
from maxstack.data.feed import Feed
from maxstack.schema.data import DataConfig, SyntheticSource

asked, plain = [0], sources.Synthetic.__getitem__

def standing(self, index):
    asked[0] += 1
    if asked[0] > 4:
        Path("hung").touch()
        time.sleep(1e9)
    return plain(self, index)

sources.Synthetic.__getitem__ = standing

def main():
    cfg = DataConfig(sources=[SyntheticSource(kind="synthetic")], seq_len=8, packing="none", workers=int(sys.argv[2]))
    feed = Feed(cfg, range(4), 4, evaluation=sys.argv[1] == "evaluation", whole=sys.argv[1] == "evaluation")
    next(feed)
    workers = multiprocessing.active_children()
    print(*(worker.pid for worker in workers), flush=True)
    while not Path("hung").exists():
        time.sleep(0.01)
    if sys.argv[1] == "error":
        raise SystemError("in the loop")
    if sys.argv[1] == "leaves":
        os._exit(42)
    if sys.argv[1] == "stopped":
        for worker in workers:
            os.kill(worker.pid, signal.SIGSTOP)
    begin = time.monotonic()
    feed.close()
    print(time.monotonic() - begin < 5, len(multiprocessing.active_children()), flush=True)

if __name__ == "__main__":
    main()
"""  # noqa: E501


def hanging(folder, *arguments):
    """Output of a program whose source hangs over a batch that nobody needs: (exit code, workers,
    further lines, stderr)."""
    (folder / "hanging.py").write_text(HANGING)
    with subprocess.Popen(
        [sys.executable, "hanging.py", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as main:
        try:
            said, told = main.communicate(timeout=40)
        finally:
            main.kill()
    started, *lines = said.splitlines()
    return main.returncode, started.split(), lines, told


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("ending", "code"),
    [("closed", 0), ("stopped", 0), ("evaluation", 0), ("error", 1), ("leaves", 42)],
)
@pytest.mark.release
def test_workers_that_hang_or_are_stopped_hold_up_no_end_and_leave_no_memory_and_no_warning(
    ending, code, tmp_path
):
    before = {*Path("/dev/shm").iterdir()}

    def left():
        return any(map(alive, workers)) or {*Path("/dev/shm").iterdir()} - before

    found, workers, lines, told = hanging(tmp_path, ending, "2")
    deadline = time.time() + 10
    while time.time() < deadline and left():  # by others who use the memory just now, too
        time.sleep(0.02)
    assert found == code and len(workers) == 2 and not left()
    assert lines == ([] if code else ["True 0"]) and "resource_tracker" not in told
    assert told.endswith("SystemError: in the loop\n") if ending == "error" else told == ""


@pytest.mark.slow
def test_a_thread_whose_source_hangs_holds_up_no_end_and_the_source_is_named(tmp_path):
    code, _, lines, told = hanging(tmp_path, "closed", "0")
    assert code == 0 and lines == ["False 0"]
    assert told.startswith(
        "data.sources: synthetic-0 does not answer: no batch came in 5 s; going on without it\n"
    )


def test_a_feed_that_goes_on_waits_for_the_thread_that_it_left_behind(feeds, monkeypatch, capsys):
    hung, asked, plain = threading.Event(), [0], Synthetic.__getitem__

    def standing(self, index):
        asked[0] += 1
        if asked[0] > BATCH:
            hung.wait(60)
        return plain(self, index)

    cfg = DataConfig(sources=[SyntheticSource(kind="synthetic")], seq_len=8, packing="none")
    undisturbed = feeds(cfg, range(BATCH), BATCH)
    expected = batches(undisturbed, 3)
    undisturbed.close()
    monkeypatch.setattr(Synthetic, "__getitem__", standing)
    monkeypatch.setattr(feed_module, "PATIENCE", 0.1)
    feed = feeds(cfg, range(BATCH), BATCH)
    start = feed.state()
    next(feed)
    while asked[0] <= BATCH:
        time.sleep(0.01)
    feed.restore(start)
    assert "synthetic-0 does not answer" in capsys.readouterr().err
    threading.Timer(0.3, hung.set).start()
    begin = time.monotonic()
    assert the_same(expected, batches(feed, 3)) and time.monotonic() - begin > 0.25, (
        "two threads would have read the same source"
    )


def alive(process):
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_a_long_held_out_document_spreads_over_all_lanes_of_every_split(feeds, tmp_path):
    (tmp_path / "long.txt").write_text("abcdefgh" * 64)
    cfg = config(sources=[source_of("text", str(tmp_path / "long.txt"))])
    whole, half = (
        feeds(cfg, lanes, 4, evaluation=True, whole=True) for lanes in (range(4), [1, 3])
    )
    for _ in range(5):
        ours, theirs = next(whole), next(half)
        for key in ours:
            np.testing.assert_array_equal(ours[key][[1, 3]], theirs[key])
        assert (ours["mask"].sum(1) > 0).all() == ours["mask"].any()
    assert not ours["mask"].any(), "512 bytes are four batches of 4 x 32"


@pytest.mark.parametrize(
    ("line", "settings", "says"),
    [
        ('{"body": "a"}', {}, "line 1: no key 'text'"),
        ('{"text": "a"}', {"record": {"kind": "chat"}}, "line 1: no messages, conversations"),
        ('{"prompt": "a", "completion": " b"}', {"record": {"kind": "pairs"}}, "no chosen"),
    ],
)
def test_wrong_columns_kinds_and_shapes_are_told_before_the_first_batch(
    corpus, line, settings, says
):
    (corpus / "wrong.jsonl").write_text(f"{line}\n")
    source = {"kind": "jsonl", "files": ["wrong.jsonl"], **settings}
    fields = {"sources": [source], "tokenizer": {"kind": "bytes", "eos": True}, "seq_len": 32}
    feed = Feed(DataConfig.model_validate(fields), [0], 1)
    with pytest.raises(DataError, match=says):
        feed.mixture.check()
    Feed(DataConfig.model_validate(fields | {"quarantine": 1}), [0], 1).mixture.check()


def test_a_template_that_is_not_there_is_no_fault_of_a_record():
    source = {"kind": "jsonl", "files": ["chat.jsonl"], "record": {"kind": "chat"}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_rows("chat.jsonl", [{"messages": turns}])
    fields = {"sources": [source], "tokenizer": {"kind": "bytes"}, "template": "gone.jinja"}
    mixture = Feed(DataConfig.model_validate(fields | {"quarantine": 1}), [0], 1).mixture
    says = "^gone.jinja: the chat template .* No such file .*Jinja$"
    with pytest.raises(ConfigError, match=says):
        mixture.check()
