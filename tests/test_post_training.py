"""From one run to the next: a model learns from conversations, then from preferences, is scored,
exported, and taught from, by the commands that a user gives."""

import json
import shutil

import documents
import numpy as np
import parity
import processes
import pytest
import tiers
import tokenizers
from engines import SMALL
from json_lines import read_rows, write_rows

from maxstack import cli, train
from maxstack.data import people
from maxstack.data.tokenizers import open_tokenizer
from maxstack.inference import records as scoring
from maxstack.load import load

pytestmark = pytest.mark.slow
MODEL = {
    "vocab": 264,
    "embed": 32,
    "layers": 2,
    "dtype": "float32",
    "blocks": {
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 8},
            "mlp": {"kind": "gated", "hidden": 64},
        }
    },
}
RUN = {
    "model": MODEL,
    "data": {
        "sources": [
            {
                "kind": "function",
                "call": "maxstack.data.people:chat",
                "documents": 64,
                "record": {"kind": "chat"},
            }
        ],
        "template": "plain",
        "packing": "fit",
        "seq_len": 96,
    },
    "objective": {"kind": "sft"},
    "optimizer": {"preset": "adamw", "learning_rate": 0.01},
    "train": {"steps": 4, "batch_size": 8},
    "checkpoint": {"every": 4},
}
PAIRS = (
    "data.sources=[{kind: function, call: 'maxstack.data.people:pairs', documents: 64, "
    "record: {kind: pairs}}]"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with two runs: conversations, and an adapter on top of them; and pairs.jsonl."""
    folder = tmp_path_factory.mktemp("post-training")
    (folder / "run.yml").write_text(json.dumps(RUN))
    write_rows(folder / "pairs.jsonl", map(people.pairs, range(11)))
    trained(folder, "sft")
    trained(folder, "adapted", f"model.from={folder}/sft", "lora={rank: 2}")
    return folder


def trained(folder, name, *overrides):
    """The scalars of a run's steps."""
    words = [f"run.output_dir={folder}", f"run.name={name}", "run.tensorboard=false", *overrides]
    assert train.main([str(folder / "run.yml"), *words]) == 0
    return processes.rows(folder / name)


def maxstack(*words):
    """A command that succeeds."""
    assert cli.main([*map(str, words)]) == 0


def scored(model, made, folder):
    """The pairs with what a model says of them."""
    out = folder / f"by-{model.name}.jsonl"
    maxstack(
        *("score", model, "--records", made / "pairs.jsonl", "--kind", "pairs"),
        *("--out", out, "model.dtype=float32"),
    )
    return read_rows(out)


@pytest.mark.parametrize("model", tiers.of(["sft", "sft/checkpoints/4", "adapted"], slow=["sft"]))
def test_preferences_begin_where_another_run_ended(made, tmp_path, model):
    """The reference is where the run begins: the first loss is ln 2, at stored log-probabilities
    of that run too."""
    objective = "objective={kind: preference}"
    first, *_, last = trained(made, tmp_path.name, f"model.from={made / model}", PAIRS, objective)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6) and last["loss"] < first["loss"]
    assert load(made / tmp_path.name / "config.yml").data.template == "plain"
    stored = tmp_path / "stored.jsonl"
    maxstack(
        *("score", made / model, "--records", made / "pairs.jsonl", "--kind", "pairs"),
        *("--out", stored),
    )
    source = f"data.sources=[{{kind: jsonl, files: [{stored}], record: {{kind: pairs}}}}]"
    again = trained(
        *(made, f"{tmp_path.name}-stored", f"model.from={made / model}", source),
        "objective={kind: preference, reference: stored}",
    )
    assert again[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert again[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)


@pytest.mark.release
@pytest.mark.parametrize(
    ("record", "objective"),
    [("pairs", "{kind: preference}"), ("labelled", "{kind: unpaired}")],
)
def test_a_run_with_a_reference_resumes_bit_for_bit(made, tmp_path, record, objective):
    source = f"{{kind: function, call: 'maxstack.data.people:{record}', documents: 64, "
    source += f"record: {{kind: {record}}}}}"
    words = [f"model.from={made}/sft", f"data.sources=[{source}]", f"objective={objective}"]
    words += ["checkpoint.every=2", "train.accumulate=2", "mesh.tensor=2"]
    whole = trained(made, tmp_path.name, *words)
    shutil.rmtree(made / tmp_path.name / "checkpoints" / "4")
    again = trained(made, tmp_path.name, *words)[len(whole) :]
    figures = ("loss", "grad_norm", "rewards/chosen")
    assert [row["step"] for row in again] == [3, 4]
    for row, wanted in zip(again, whole[2:], strict=True):
        assert [row[name] for name in figures] == [wanted[name] for name in figures]


def test_scores_of_records_go_on_where_they_ended(made, tmp_path, monkeypatch):
    words = ("score", made / "sft", "--records", made / "pairs.jsonl", "--kind", "pairs")
    maxstack(*words, "--out", tmp_path / "whole.jsonl")
    monkeypatch.setattr(scoring, "AT_ONCE", 1)
    real, calls = scoring.BatchScorer.__call__, []

    def interrupted(step, segments):
        calls.append(len(segments))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(step, segments)

    monkeypatch.setattr(scoring.BatchScorer, "__call__", interrupted)
    out = tmp_path / "out.jsonl"
    again = [*map(str, words), "--out", str(out), "--batch-size", "4"]
    assert cli.main(again) == 130 and not out.exists()
    maxstack(*again)
    assert 0 < sum(calls[2:]) < 2 * 11
    for ours, whole in zip(read_rows(out), read_rows(tmp_path / "whole.jsonl"), strict=True):
        assert ours["prompt"] == whole["prompt"]
        assert ours["ref_chosen_logps"] == pytest.approx(whole["ref_chosen_logps"], rel=1e-5)


def test_a_reward_model_scores_records_and_is_exported(made, tmp_path):
    """The folder of transformers' sequence classification gives the same rewards."""
    objective = "objective={kind: reward}"
    trained(made, tmp_path.name, f"model.from={made}/sft", PAIRS, objective)
    maxstack("export", made / tmp_path.name, "--out", tmp_path / "folder")
    config = json.loads((tmp_path / "folder/config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")
    found = [
        [(row["chosen_reward"], row["rejected_reward"]) for row in scored(model, made, tmp_path)]
        for model in (made / tmp_path.name, tmp_path / "folder")
    ]
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
    assert len({*found[0]}) == 11


def test_a_student_learns_from_stored_tokens_of_its_teacher(made, tmp_path):
    chats, out = tmp_path / "chats.jsonl", tmp_path / "taught.jsonl"
    write_rows(chats, map(people.chat, range(16)))
    words = ("score", made / "sft", "--records", chats, "--kind", "chat", "--top", 4)
    maxstack(*words, "--out", out)
    source = f"data.sources=[{{kind: jsonl, files: [{out}], record: {{kind: chat}}}}]"
    (loss, *_) = trained(
        *(made, tmp_path.name, f"model.from={made}/sft", source),
        "objective={kind: distill, top: 4, beta: 0}",
    )
    assert loss["loss"] == pytest.approx(0, abs=1e-4) and loss["agreement"] == 1
    assert len(read_rows(out)[0]["top_tokens"][1]) == 4


def test_a_teacher_that_reads_other_tokens_is_refused(made, tmp_path, capsys):
    folder = shutil.copytree(parity.GOLDENS / "qwen3", tmp_path / "qwen3")
    documents.write_tokenizer(folder)
    other = tmp_path / "other.json"
    other.write_text((folder / "tokenizer.json").read_text().replace('"alpha"', '"omega"'))
    words = [made / "run.yml", f"run.output_dir={tmp_path}", "objective={kind: distill}"]
    words += [f"teacher.from={folder}"]
    words += [f"data.tokenizer={{kind: huggingface, path: {other}, eos: </s>}}"]
    assert cli.run(train.main, [*map(str, words)]) == 1
    said = capsys.readouterr().err
    assert "its tokenizer is not that of the run" in said and "b'alpha', and b'omega'" in said


@pytest.mark.release
def test_a_head_trained_beside_an_adapter_is_exported_beside_it_and_merged(made, tmp_path, capsys):
    lora = "lora={rank: 2, modules_to_save: [head]}"
    words = [str(made / "run.yml"), f"model.from={made}/sft", PAIRS, lora]
    off = "objective={kind: preference, reference: adapter_off}"
    assert cli.run(train.main, [*words, f"run.output_dir={tmp_path}", off]) == 1
    assert "adapter_off leaves lora.modules_to_save as they are" in capsys.readouterr().err
    trained(made, tmp_path.name, *words[1:], "objective={kind: preference}")
    run = made / tmp_path.name
    capsys.readouterr()
    maxstack("export", made / "sft", "--out", tmp_path / "base")
    maxstack("lora", "export", run, "--out", tmp_path / "adapter")
    assert "modules and head whole of" in capsys.readouterr().out
    merging = "--adapter", tmp_path / "adapter", "--out", tmp_path / "merged"
    maxstack("lora", "merge", tmp_path / "base", *merging)
    maxstack("export", run, "--out", tmp_path / "folder")
    wanted, *found = (
        [row["ref_chosen_logps"] for row in scored(model, made, tmp_path)]
        for model in (run, tmp_path / "folder", tmp_path / "merged")
    )
    for logps in found:
        np.testing.assert_allclose(logps, wanted, rtol=1e-5)
    lora = lora.replace("head", "norm/scale")
    trained(made, f"{tmp_path.name}-norm", *words[1:-1], lora, "objective={kind: preference}")
    command = ["lora", "export", f"{run}-norm", "--out", str(tmp_path / "no")]
    assert cli.main(command) == 1
    assert "norm/scale is trained in full beside the adapter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("teacher.blocks.block.mixer.kv_heads=1", "kv_heads=1 is not divisible by mesh.tensor=2"),
    ],
)
def test_a_teacher_has_to_fit_the_run(made, capsys, change, says):
    words = [str(made / "run.yml"), "objective={kind: distill}", f"teacher={json.dumps(MODEL)}"]
    assert cli.run(train.main, [*words, "mesh.tensor=2", change]) == 1
    said = capsys.readouterr().err
    assert change.split("=")[0] in said and says in said


def test_rows_of_conversations_are_shown_with_what_counts(made, capsys):
    maxstack("data", "show", made / "run.yml", "--rows", 1)
    said = capsys.readouterr().out
    assert "[[" in said and said.count("[[") == said.count("]]")
    counted = said.split("[[")[1].split("]]")[0]
    assert counted.startswith(("{", "The "))


def test_an_export_holds_the_template_and_the_end_of_answers(made, tmp_path, capsys):
    """So the folder answers as the run does."""
    out = tmp_path / "folder"
    maxstack("export", made / "sft", "--out", out)
    assert "{%- generation %}" in (out / "chat_template.jinja").read_text()
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 256
    own = open_tokenizer(load(made / "sft/config.yml").data.tokenizer)
    theirs = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    text = "Žluťoučký kůň<|endoftext|>\n\0 36"
    ids, _ = own.encode_marked(text)
    assert theirs.encode(text).ids == [*own.bos, *ids.tolist()]
    assert theirs.decode(ids, skip_special_tokens=False) == text
    capsys.readouterr()
    said = []
    for model in (made / "sft", out):
        maxstack(
            *("generate", model, "--chat", "--prompt", "Ada, 36, Rome. age?"),
            *("--max-tokens", 8, "--temperature", 0, "model.dtype=float32", *SMALL),
        )
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
