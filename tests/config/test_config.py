import pytest
from tiny_config import TINY

from maxstack import config
from maxstack.errors import ConfigError
from maxstack.load import load, load_tree


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The path of a small valid file in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yml").write_text(TINY)
    return "tiny.yml"


def test_a_file_becomes_a_frozen_typed_object(tiny):
    cfg = load(tiny, ["train.steps=7"])
    assert (
        cfg.train.steps,
        cfg.model.blocks["local"].mixer.window,
        cfg.model.blocks["local"].mixer.heads,
    ) == (7, 8, 4)
    with pytest.raises(ValueError, match="frozen"):
        cfg.train.steps = 8


def test_a_part_of_a_default_mapping_is_merged_over_it_unless_it_names_its_kind(tiny):
    part, tree = load_tree(tiny, ["optimizer.schedule.warmup_steps=20"])
    assert (
        part.optimizer.schedule["kind"] == "warmup_cosine"
        and part.optimizer.schedule["warmup_steps"] == 20
    )
    assert tree.at("optimizer", "schedule", "kind").where == "default"
    assert load(
        tiny, ["optimizer.schedule={kind: warmup_cosine, warmup_steps: 20}"]
    ).optimizer.schedule.keys() == {"kind", "warmup_steps"}


def test_a_part_of_a_default_section_is_of_the_default_kind(tiny):
    cfg = load(tiny, ["data.tokenizer.eos=true"])
    assert (cfg.data.tokenizer.kind, cfg.data.tokenizer.eos) == ("bytes", True)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.profile={start: 2, steps: 3}", "mesh.rules.seq=tensor", "run.name='1e-4'"],
        ["optimizer.chain.1.b2=0.5"],
    ],
)
def test_the_resolved_text_loads_back_to_the_same_object(tiny, tmp_path, overrides):
    cfg, tree = load_tree(tiny, overrides)
    for text in (config.dump(cfg), config.annotated(cfg, tree)):
        (tmp_path / "again.yml").write_text(text)
        assert load("again.yml") == cfg


def test_every_resolved_value_carries_its_origin(tiny):
    cfg, tree = load_tree(tiny, ["train.steps=7", "optimizer.chain.1.b2=0.5"])
    lines = dict(
        line.split("  # ") for line in config.annotated(cfg, tree).splitlines() if "  # " in line
    )
    origins = {line.strip(): origin for line, origin in lines.items()}
    wanted = {
        "steps: 7": "override",
        "batch_size: 8": "tiny.yml:19",
        "window: 8": "tiny.yml:12",
        "accumulate: 1": "default",
        "b2: 0.5": "override",
        "pattern: [local, full]": "tiny.yml:13",
    }
    assert {line: origins[line] for line in wanted} == wanted


@pytest.mark.parametrize(("key", "most"), [("run.name", 128), ("run.output_dir", 1024)])
def test_a_run_whose_folder_no_system_takes_is_refused_by_key(tiny, key, most):
    load(tiny, [f"{key}={'x' * most}"])
    for letters in (most + 1, 300_000):
        with pytest.raises(
            ConfigError,
            match=rf"override: {key}: got 'x+\.\.\.x+' \(text\); allowed: text .*of at most "
            rf"{most} char",
        ):
            load(tiny, [f"{key}={'x' * letters}"])


def test_difference_names_the_keys_that_differ(tiny):
    a = load(tiny)
    assert config.difference(a, a) == []
    b = load(
        tiny,
        [
            "train.steps=7",
            "model.blocks.more={like: full}",
            "data.sources.0.documents=9",
            "model.pattern=[full]",
        ],
    )
    changes = {key: (old, new) for key, old, new in config.difference(a, b)}
    assert changes.keys() == {
        "train.steps",
        "model.blocks.more",
        "data.sources.0.documents",
        "model.pattern",
    }
    assert changes["train.steps"] == (100, 7) and changes["model.blocks.more"][0] == config.ABSENT
    assert changes["model.pattern"] == (["local", "full"], ["full"])
