"""Faults that nobody would notice: a record that cannot be read, a bit that flips on one
replica."""

import gzip
import itertools
import json
import random
from pathlib import Path

from drills.runs import (
    Outcome,
    Started,
    across,
    baseline,
    complete,
    outcome,
    settings,
    told,
    unlike,
)

KINDS = ("jsonl", "gzip", "array_record")
TEXTS = 40


def corrupt(folder: Path, count: int, dice: random.Random) -> Outcome:
    """8: one record of a shard, of three kinds of file; the baseline has an empty document in its
    place, which is passed over too."""
    found, kinds = outcome(folder), itertools.cycle(dice.sample(KINDS, len(KINDS)))
    for number in range(count):
        kind, bad, workers, top = (
            next(kinds),
            dice.randrange(TEXTS),
            number % 3,
            folder / f"{number}",
        )
        texts = [
            f"document {i} " + "".join(dice.choices("abcdefgh ", k=dice.randrange(60, 200)))
            for i in range(TEXTS)
        ]
        source, name = _written(top / "data", kind, texts, bad, empty=True)
        config = settings(
            top,
            eval={"every": 0},
            train={"steps": 24, "batch_size": 8},
            data={
                "sources": [
                    source,
                    {"kind": "synthetic", "documents": 100, "length": 80, "vocab": 320},
                ],
                "workers": workers,
                "quarantine": 1,
            },
        )
        complete(config, "without", "data.quarantine=0")
        _written(top / "data", kind, texts, bad, empty=False)
        complete(config, "passed-over")
        wrong = unlike(top / "passed-over", top / "without")
        line = [line for line in told(top / "passed-over").splitlines() if "passed over" in line]
        wrong += [f"the log says {line}"] * (len(line) != 1 or name not in line[0])
        with Started(config, "fails", "data.quarantine=0") as started:
            codes, output = started.wait(), started.output()
        wrong += [f"exit {codes}: {output[-800:]}"] * (
            codes != [2] or name not in output or "Traceback" in output
        )
        found.add([f"record {bad} of {kind}, {workers} workers: {text}" for text in wrong])
    return found


def _written(folder: Path, kind: str, texts: list[str], bad: int, empty: bool) -> tuple[dict, str]:
    """A source of these documents, one of which is empty or cannot be read -> its section, and what
    a message about that one says."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = ["" if i == bad and empty else text for i, text in enumerate(texts)]
    if kind == "jsonl":
        lines = [json.dumps({"text": text}) for text in texts]
        lines[bad] = lines[bad] if empty else lines[bad][:-9]
        (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
        return {"kind": "jsonl", "files": [str(folder / "a.jsonl")]}, f"a.jsonl: line {bad + 1}"
    if kind == "gzip":
        for i, text in enumerate(texts):
            data = gzip.compress(text.encode())
            (folder / f"{i:02}.txt.gz").write_bytes(
                data if empty or i != bad else data[:20] + bytes([data[20] ^ 16]) + data[21:]
            )
        return {"kind": "text", "files": [str(folder / "*.txt.gz")]}, f"{bad:02}.txt.gz"
    from array_record.python.array_record_module import ArrayRecordWriter

    path = folder / "a.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    data = path.read_bytes()
    if not empty:
        at = data.index(texts[bad].encode()) + 20
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    return {
        "kind": "array_record",
        "files": [str(path)],
        "content": "text",
    }, f"a.array_record: record {bad}"


def flipped(folder: Path, count: int, dice: random.Random) -> Outcome:
    """14: any bit of any gradient, where one of four replicas, in 1, 2 or 4 processes, computes
    its update: once, or each time that this batch is computed; and NaN in the memory of one, in a
    run that compares on demand alone. A flip that leaves no trace in the state, as in a gradient
    of zero, is no fault."""
    found, turn = outcome(folder), 0
    config = across(folder, mesh={"data": 4}, checkpoint={"every": 4}, faults={"check_every": 3})
    while found.injected < count:
        number, turn = found.injected, turn + 1
        name, often, who = (
            f"run-{turn}",
            ("once", "always", "memory")[number % 3],
            dice.randrange(4),
        )
        many = (1, 2, 4)[number // 3 % 3] if count > 3 else 1
        each = 4 // many
        fault = {
            "kind": "flip",
            "step": dice.randrange(2, 22),
            "replica": who,
            "often": often,
            "leaf": dice.randrange(20),
            "element": dice.randrange(1 << 20),
            "bit": dice.randrange(8, 31),
        }
        if often == "memory":
            fault = {"kind": "spoil"} | {key: fault[key] for key in ("step", "replica", "leaf")}
        with Started(config, name, count=many, each=each, fault=fault) as started:
            codes, output = started.wait(), started.output()
        base = baseline(config, count=many, each=each)
        if (
            "SILENT" not in output
            and codes == [0] * many
            and not unlike(config.parent / name, base)
        ):
            assert turn < 3 * count + 5, "hardly any flip leaves a trace"
            continue
        process, device = divmod(who, each)
        guilty = f"device {2048 * process + device} (cpu) of process {process}"
        words = [
            "SILENT DATA CORRUPTION",
            guilty,
            "the fault stays" if often == "always" else "a passing one",
        ]
        wrong = [f"the log does not say {word}" for word in words if word not in output]
        wrong += [f"exit {codes}: {output[-1500:]}"] * (
            codes != [1 if often == "always" else 0] * many or "Traceback" in output
        )
        if often == "always" and not wrong:
            complete(config, name, count=many, each=each)
        found.add(
            [f"{fault}: {text}" for text in wrong or unlike(config.parent / name, base, last=True)]
        )
    return found
