"""A whole run over two batches of noise among a text that it has learned: refused, gone back before, passed over."""

import json
import random

from processes import numbers, rows, train, write_config

BATCH, STEPS, NOISE = 8, 32, (21, 22)


def documents():
    """A line for each row of each step, the same text but in the steps of noise."""
    rng = random.Random(0)
    for step in range(1, STEPS + 1):
        for _ in range(BATCH):
            yield "".join(rng.choices([chr(code) for code in range(33, 126)], k=80)) if step in NOISE else "ab" * 40


def test_repeated_spikes_take_the_run_back_and_their_batches_are_passed_over_alike_in_every_replay(tmp_path):
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
    config = write_config(tmp_path, train={"steps": STEPS, "batch_size": BATCH}, checkpoint={"every": 4},
                          optimizer={"learning_rate": {"kind": "constant", "value": 0.01}}, data={
        "packing": "none", "shuffle": False, "seq_len": 64, "sources": [{"kind": "jsonl", "files": [str(tmp_path / "documents.jsonl")]}]},
        faults={"spike": {"window": 8, "warm_up": 8, "rewind_after": 2, "before": 2}})
    output = train(config)
    assert "step 21: loss" in output and "a spike; the update was refused" in output
    assert "rewound to step 16; the batches of steps 19 to 22 will be passed over" in output
    told = rows(tmp_path / "run")
    assert [row["step"] for row in told] == [*range(1, 23), 17, 18, *range(23, STEPS + 1)]
    assert [row["skipped"] for row in told if row["step"] in NOISE] == [2, 2] and told[-1]["loss"] < told[15]["loss"]
    assert [row["step"] for row in rows(tmp_path / "run", "passed_over")] == [19, 20, 21, 22]
    first, again = ([row["loss"] for row in told if row["step"] == step] for step in (17, 18))
    assert len({*first}) == len({*again}) == 1, "steps that are done again are the same"
    train(config, "run.name=replay", "train.steps=24")
    train(config, "run.name=replay")
    assert numbers(tmp_path / "replay")[STEPS]["loss"] == numbers(tmp_path / "run")[STEPS]["loss"]
