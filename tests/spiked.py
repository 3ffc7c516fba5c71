"""A run that is killed, meets spikes, goes back before them, and goes on: real processes."""

import json
import random
import signal
from pathlib import Path

import processes


def make(folder: Path, name: str, *overrides: str, steps: int = 36, text: str = "ab" * 64) -> Path:
    """The folder of the run over pieces of a text, which has ended. After half of its steps
    there is a batch of noise; later two in a row, before which it goes back; it is killed in
    between, and goes on."""
    config = configuration(folder, steps, text)
    words = f"run.name={name}", *overrides
    code = processes.interrupt(config, folder / name, steps * 2 // 3, signal.SIGKILL, *words)
    assert code == -signal.SIGKILL
    processes.train(config, *words)
    return folder / name


def configuration(folder: Path, steps: int, text: str, batch: int = 8) -> Path:
    """Pieces of 64 bytes of the text, one batch after the other, some of them noise."""
    dice = random.Random(0)
    noise = {steps * 4 // 7, steps * 5 // 6, steps * 5 // 6 + 1}
    letters = [chr(code) for code in range(33, 127)]

    def line(step: int) -> str:
        at = dice.randrange(len(text) - 63)
        piece = "".join(dice.choices(letters, k=64)) if step in noise else text[at : at + 64]
        return json.dumps({"text": piece}) + "\n"

    lines = [line(step) for step in range(1, steps + 1) for _ in range(batch)]
    (folder / "documents.jsonl").write_text("".join(lines))
    (folder / "held_out.jsonl").write_text("".join(line(0) for _ in range(4 * batch)))
    data = {"packing": "none", "shuffle": False, "seq_len": 64}
    sources = {
        name: [{"kind": "jsonl", "files": [str(folder / f"{name}.jsonl")]}]
        for name in ("documents", "held_out")
    }
    return processes.write_config(
        folder,
        train={"steps": steps, "batch_size": batch},
        checkpoint={"every": steps // 9, "keep": 100},
        eval={"every": steps // 6, "data": data | {"sources": sources["held_out"]}},
        data=data | {"sources": sources["documents"]},
        optimizer={"learning_rate": {"kind": "constant", "value": 0.01}},
        faults={
            "spike": {
                "window": 8, "warm_up": 8, "rewind_after": 2, "before": 2
            }
        },
    )  # fmt: skip
