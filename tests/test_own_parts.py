"""`kind: module:Name`: parts of a user's own (own_parts.py) where the configuration has kinds."""

import os
import shutil
import sys
import types
from pathlib import Path

import processes
import pytest
import yaml

import maxstack
from maxstack.config import dump, own_kinds, trust
from maxstack.data.filters import chain
from maxstack.data.filters.filter import Removed
from maxstack.errors import ConfigError, DataError
from maxstack.evals.task import Question
from maxstack.evals.task_files import open_tasks
from maxstack.evals.task_metrics import results, values
from maxstack.optim import build
from maxstack.report.trackers import Trackers, check_installed

MIXER = {"kind": "my_parts:ScaledAttention", "heads": 4, "head_dim": 8}
RUN = {
    "run": {"name": "own", "output_dir": "runs", "trackers": [], "virtual_devices": 8},
    "model": {
        "vocab": 264,
        "embed": 32,
        "layers": 2,
        "dtype": "float32",
        "blocks": {"block": {"mixer": MIXER, "mlp": {"kind": "gated", "hidden": 64}}},
    },
    "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
    "data": {"sources": [{"kind": "my_parts:Sums", "below": 20, "holdout": 0.1}], "seq_len": 32},
    "optimizer": {
        "learning_rate": 0.003,
        "schedule": None,
        "chain": [{"kind": "my_parts:SignMomentum", "decay": 0.8}],
    },
    "train": {"steps": 6, "batch_size": 8},
    "checkpoint": {"every": 3},
}
KIND = "model.blocks.block.mixer.kind"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the parts and run.yml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    shutil.copy(Path(__file__).with_name("own_parts.py"), tmp_path / "my_parts.py")
    (tmp_path / "run.yml").write_text(yaml.safe_dump(RUN))
    yield tmp_path
    sys.modules.pop("my_parts", None)


@pytest.mark.slow
def test_a_run_of_my_parts_is_planned_trained_resumed_and_answers(folder):
    def call(*words: str) -> str:
        command = [sys.executable, "-m", "maxstack.cli", *words]
        return processes.run(command, processes.environment(), cwd=folder)

    # The factor of each layer, beside what attention has.
    own, plain = (
        int(call("plan", "run.yml", *more).split(" parameters")[0].split()[-1].replace(",", ""))
        for more in ([], ["model.blocks.block.mixer={kind: attention, heads: 4, head_dim: 8}"])
    )
    assert own - plain == 2 * 32
    call("train", "run.yml", "train.steps=3")
    with (folder / "my_parts.py").open("a") as file:
        file.write("# changed\n")
    said = call("train", "run.yml")
    assert "resumed from step 3" in said
    assert (
        "other code than that which wrote step 3: run.kinds.my_parts:ScaledAttention: sha" in said
    )
    call("train", "run.yml", "run.name=whole")
    rows = [processes.rows(folder / "runs" / name) for name in ("own", "whole")]
    losses = [{row["step"]: row["loss"] for row in each if "loss" in row} for each in rows]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    call("generate", "runs/own", "--prompt", "1 + 2", "--max-tokens", "4")


def test_it_is_a_section_like_any_other(folder):
    cfg = maxstack.load("run.yml")
    (source,), mixer = cfg.data.sources, cfg.model.blocks["block"].mixer
    assert (source.below, mixer.start, mixer.LAYER) == (20, 0.1, "my_parts:Scaled")
    assert {*cfg.run.kinds} == {
        f"my_parts:{name}" for name in ("ScaledAttention", "Sums", "SignMomentum")
    }
    assert all(each.startswith("sha256 ") for each in cfg.run.kinds.values())
    (folder / "again.yml").write_text(dump(cfg))
    assert maxstack.load("again.yml") == cfg


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.blocks.block.mixer.strt=1", "override: .*strt: unknown key;.* did you mean start?"),
        (f"{KIND}=my_parts:ScaledAtention", "my_parts has no .*; did you mean ScaledAttention?"),
        (f"{KIND}=own_partz:Scaled", "no module own_partz in the working folder or among"),
        (f"{KIND}=my_parts:Scaled", "is no section of a kind.*; my_parts has ScaledAttention"),
        (f"{KIND}=my_parts:Sums", "allowed: attention, .*, module:Name derived from MixerPart"),
        (
            f"{KIND}=broken:Part",
            f"override: {KIND}: importing broken failed with ZeroDivisionError",
        ),
        ("optimizer.chain=[{kind: my_parts:Sums}]", "my_parts:Sums is no transform"),
        ("optimizer.chain=[{kind: my_parts:SignMomentum, decay: x}]", "chain.0.decay: .* number"),
    ],
)
def test_a_mistake_is_told_with_its_place(override, said, folder):
    (folder / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=said):
        maxstack.load("run.yml", override)


def test_a_record_of_somebody_else_imports_nothing(folder, monkeypatch):
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    sent = folder / "sent"
    (sent / "checkpoints").mkdir(parents=True)
    (sent / "config.yml").write_text(yaml.safe_dump(RUN))
    with pytest.raises(
        ConfigError, match=r"^sent/config.yml:\d+: data.sources.0.kind: .*--trust-code"
    ):
        maxstack.load("sent/config.yml")
    assert "my_parts" not in sys.modules
    monkeypatch.setitem(os.environ, trust.VARIABLE, "1")
    assert maxstack.load("sent/config.yml").run.kinds


def test_an_installed_package_gives_a_short_name(folder, monkeypatch):
    made = folder / "my_parts-1.2.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parts\nVersion: 1.2\n")
    (made / "top_level.txt").write_text("my_parts\n")
    (made / "entry_points.txt").write_text("[maxstack.kinds]\nscaled = my_parts:ScaledAttention\n")
    own_kinds._short_names.cache_clear()
    words = [f"model.blocks.block.mixer.{key}={MIXER[key]}" for key in ("heads", "head_dim")]
    cfg = maxstack.load("run.yml", f"{KIND}=scaled", *words)
    assert cfg.model.blocks["block"].mixer.kind == MIXER["kind"]
    assert cfg.run.kinds[MIXER["kind"]].startswith("my-parts 1.2, sha256 ")
    own_kinds._short_names.cache_clear()


def test_a_cell_that_runs_again_replaces_the_kind(monkeypatch):
    cell = types.ModuleType("cell")
    monkeypatch.setitem(sys.modules, "cell", cell)
    code = "from maxstack.parts import SourcePart\nclass Own(SourcePart):\n    DOCUMENTS = 'D'\n"
    code = f"class D: ...\n{code}"
    for key in ("first", "second"):
        exec(f"{code}    {key}: int = 1\n", vars(cell))  # noqa: S102
        source = f"data.sources=[{{kind: cell:Own, {key}: 2}}]"
        cfg = maxstack.load("synthetic", source)
        assert getattr(cfg.data.sources[0], key) == 2
    assert cfg.run.kinds == {"cell:Own": "without a file"}


def test_steps_of_documents_and_transforms_do_what_they_say(folder):
    cfg = maxstack.load("run.yml", "data.steps=[{kind: my_parts:Even}]")
    (even,) = chain.open_filters(cfg.data.steps, {}).values()
    assert even("ab") == "ab" and even("abc") == Removed("odd", 3)
    run = maxstack.assemble(cfg.model_copy(update={"mesh": type(cfg.mesh)()}))
    import jax
    import jax.numpy as jnp

    tx = build(cfg.optimizer, 6, run.info)
    weights = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), run.abstract.params)
    updates, _ = tx.update(weights, tx.init(weights), weights, value=0.0, grad=weights)
    for leaf in jax.tree.leaves(jax.tree.map(lambda leaf: leaf + 0.003, updates)):
        assert float(abs(leaf).max()) < 1e-9


def test_a_metric_of_a_task_is_a_function(folder):
    task = {
        "task": "words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{a}}",
        "doc_to_target": "{{b}}",
        "metric_list": [{"metric": "my_parts:share_of_words"}],
    }
    (folder / "words.yaml").write_text(yaml.safe_dump(task))
    (folder / "rows.jsonl").write_text('{"a": "1", "b": "one two"}\n' * 2)
    (opened,) = open_tasks(["words.yaml"])
    question = Question({}, text="1", right=("one two",))
    found = [values(opened, question, answer) for answer in ("two", "one two")]
    assert found == [{"share_of_words": 0.5}, {"share_of_words": 1.0}]
    assert results(opened, [question] * 2, found)["share_of_words"] == 0.75


def test_a_tracker_is_a_class(folder):
    cfg = maxstack.load("run.yml", "run.trackers=[my_parts:Lines]")
    check_installed(cfg.run.trackers)
    (folder / "run").mkdir()
    trackers = Trackers(folder / "run", cfg)
    trackers.add("scalars", 3, {"loss": 0.5})
    trackers.close()
    assert (folder / "run" / "lines.txt").read_text() == "3 loss 0.5\n"
    with pytest.raises(ConfigError, match="run.trackers: my_parts has no Line; did you mean Lines"):
        check_installed(["my_parts:Line"])


LAYERS = {
    "[:, -1:]": r"kind broken:Part: its layer returned \(8, 1, 32\) for an input of \(8, 32, 32\)",
    "[0] and None": "its layer returned NoneType for an input of",
}


@pytest.mark.parametrize("end", LAYERS)
def test_a_layer_that_returns_another_shape_is_refused(end, folder):
    (folder / "broken.py").write_text(
        "from my_parts import Scaled, ScaledAttention\n"
        "class Part(ScaledAttention):\n    LAYER = 'Layer'\n"
        f"class Layer(Scaled):\n    def __call__(self, x, context):\n"
        f"        return {'None' if 'None' in end else 'super().__call__(x, context)' + end}\n"
    )
    mixer = "{kind: broken:Part, heads: 4, head_dim: 8}"
    cfg = maxstack.load("run.yml", f"model.blocks.block.mixer={mixer}", "mesh={data: -1, fsdp: 1}")
    with pytest.raises(ConfigError, match=LAYERS[end]):
        maxstack.assemble(cfg).lower()
    sys.modules.pop("broken")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("class Part(MixerPart):\n    pass", "broken:Part: declares no LAYER"),
        ("class Part(MixerPart):\n    LAYER = 'Convv'\nclass Conv: pass", "did you mean Conv"),
    ],
)
def test_a_section_without_its_class_is_refused(body, said, folder):
    (folder / "broken.py").write_text(f"from maxstack.parts import MixerPart\n{body}\n")
    with pytest.raises(ConfigError, match=said):
        maxstack.load("run.yml", f"{KIND}=broken:Part")
    sys.modules.pop("broken")


def test_tokens_of_another_vocabulary_are_refused(folder):
    (folder / "broken.py").write_text(
        "import numpy as np\nfrom my_parts import SumDocuments, Sums\n"
        "class Part(Sums):\n    DOCUMENTS = 'Ids'\n"
        "class Ids(SumDocuments):\n    def __getitem__(self, index):\n"
        "        return np.full(40, 264, np.int32)\n"
    )
    cfg = maxstack.load("run.yml", "data.sources=[{kind: broken:Part}]", "train.steps=2")
    with pytest.raises(DataError, match=r"batch holds tokens from \d+ to \d+, and model.vocab=264"):
        maxstack.train(cfg)
    sys.modules.pop("broken")
