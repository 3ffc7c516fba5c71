from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxstack import regular_file
from maxstack.config import compose
from maxstack.config.compose import merged_tree, plain
from maxstack.config.reader import MAX_BYTES
from maxstack.config.writer import inline
from maxstack.errors import ConfigError

PRESETS = {"": ("recipes", "."), "model": ("models",)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder beside a folder of presets."""
    presets = {
        "start": "train: {steps: 10}",
        "recipes/text": "data: {path: a, rows: 4}\nmodel: small",
        "models/small": "size: 1\nnorm: {kind: rms, eps: 1}",
        "models/large": "extends: small\nsize: 100",
        "models/other": "width: 7",
    }
    for name, text in presets.items():
        write(tmp_path / "presets" / f"{name}.yml", text)
    monkeypatch.setattr(compose, "presets_dir", lambda: tmp_path / "presets")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def composed(path: object, *overrides: str) -> object:
    return plain(merged_tree(PRESETS, str(path), overrides))


def run(text: str, *overrides: str) -> object:
    write(Path("run.yml"), text)
    return composed("run.yml", *overrides)


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run(text, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_extends_merges_mappings_and_replaces_lists_scalars_and_null(folder):
    write(folder / "below.yml", "a: {x: 1, y: 2}\nlist: [1, 2, 3]\nscalar: 1\ngone: {x: 1}")
    assert run("extends: below.yml\na: {y: 3, z: 4}\nlist: [9]\nscalar: two\ngone: null") == {
        "a": {"x": 1, "y": 3, "z": 4},
        "list": [9],
        "scalar": "two",
        "gone": None,
    }


def test_a_mapping_of_another_kind_replaces(folder):
    write(folder / "below.yml", "a: {kind: x, only_x: 1}\nb: {kind: x, both: 1}")
    assert run("extends: below.yml\na: {kind: y, only_y: 2}\nb: {kind: x, more: 2}") == {
        "a": {"kind": "y", "only_y": 2},
        "b": {"kind": "x", "both": 1, "more": 2},
    }


def test_of_several_extended_files_the_later_wins(folder):
    write(folder / "one.yml", "a: 1\nb: 1\nc: 1")
    write(folder / "two.yml", "b: 2\nc: 2")
    assert run("extends: [one.yml, two.yml]\nc: 3") == {"a": 1, "b": 2, "c": 3}


def test_extended_paths_are_relative_to_the_file_that_names_them(folder):
    write(folder / "deep/below.yml", "a: 1")
    write(folder / "deep/middle.yml", "extends: ./below.yml\nb: 2")
    assert run("extends: deep/middle.yml\nc: 3") == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize("name", ["start", "start.yml", "configs/start.yml"])
def test_a_shipped_run_is_found_from_any_folder(folder, name):
    assert composed(name) == {"train": {"steps": 10}}


def test_a_file_of_the_working_folder_comes_before_a_shipped_one(folder):
    write(folder / "configs/start.yml", "mine: 1")
    assert composed("configs/start.yml") == {"mine": 1}


def test_a_preset_stands_for_its_file_and_presets_extend_siblings(folder):
    assert run("model: large") == {"model": {"size": 100, "norm": {"kind": "rms", "eps": 1}}}


def test_keys_beside_preset_are_merged_over_it(folder):
    assert run("model: {preset: small, norm: {eps: 2}}") == {
        "model": {"size": 1, "norm": {"kind": "rms", "eps": 2}}
    }


def test_a_preset_may_be_a_path_relative_to_the_file(folder):
    write(folder / "mine/model.yml", "extends: small\nsize: 5")
    assert run("model: mine/model.yml")["model"]["size"] == 5


@pytest.mark.parametrize("model", ["other", "{preset: other}"])
def test_another_preset_replaces_the_extended_files_model(folder, model):
    assert run(f"extends: text\nmodel: {model}")["model"] == {"width": 7}


def test_like_takes_over_a_sibling_after_overrides(folder):
    text = "blocks:\n  a: {x: {p: 1, q: 2}}\n  b: {like: a, x: {q: 3}}\n  c: {like: b, y: 4}"
    assert run(text, "blocks.a.x.p=9") == {
        "blocks": {
            "a": {"x": {"p": 9, "q": 2}},
            "b": {"x": {"p": 9, "q": 3}},
            "c": {"x": {"p": 9, "q": 3}, "y": 4},
        }
    }


def test_every_value_knows_which_file_or_override_gave_it(folder):
    write(folder / "below.yml", "a:\n  x: 1\n  y: 2")
    write(
        folder / "run.yml",
        "extends: below.yml\nmodel: large\nblocks:\n  p: {k: 1}\n  q: {like: p}\na: {y: 3}",
    )
    tree = merged_tree(PRESETS, "run.yml", ["a.z=1"])
    places = {
        path: tree.at(*path).where
        for path in [("a", "x"), ("a", "y"), ("a", "z"), ("model", "size"), ("blocks", "q", "k")]
    }
    assert {
        path: where.replace(str(folder.parent) + "/", "") for path, where in places.items()
    } == {
        ("a", "x"): "below.yml:2",
        ("a", "y"): "run.yml:6",
        ("a", "z"): "override",
        ("model", "size"): "presets/models/large.yml:2",
        ("blocks", "q", "k"): "run.yml:4",
    }


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (["a.b=2"], {"a": {"b": 2, "c": [{"k": 1}, 5]}}),
        (["a.b=1e-4"], {"a": {"b": 1e-4, "c": [{"k": 1}, 5]}}),
        (["a.b='on'"], {"a": {"b": "on", "c": [{"k": 1}, 5]}}),
        (["a.b="], {"a": {"b": None, "c": [{"k": 1}, 5]}}),
        (["a.c.0.k=2"], {"a": {"b": 1, "c": [{"k": 2}, 5]}}),
        (["a.c.1=[6, {z: 1}]"], {"a": {"b": 1, "c": [{"k": 1}, [6, {"z": 1}]]}}),
        (["a={b: 3}"], {"a": {"b": 3, "c": [{"k": 1}, 5]}}),
        (["n.e.w=1"], {"a": {"b": 1, "c": [{"k": 1}, 5]}, "n": {"e": {"w": 1}}}),
        (['n."x.y"=1'], {"a": {"b": 1, "c": [{"k": 1}, 5]}, "n": {"x.y": 1}}),
        (["a.b=2", "a.b=3"], {"a": {"b": 3, "c": [{"k": 1}, 5]}}),
    ],
)
def test_overrides_are_typed_like_yaml(folder, overrides, changed):
    assert run("a:\n  b: 1\n  c: [{k: 1}, 5]", *overrides) == changed


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=large", "model.norm.eps=3"],
        ["model.norm.eps=3", "model=large"],
        ["model.norm.eps=3", "model.preset=large"],
    ],
)
def test_a_preset_on_the_command_line_keeps_the_keys_given_beside_it(folder, overrides):
    assert run("model: other", *overrides) == {
        "model": {"size": 100, "norm": {"kind": "rms", "eps": 3}}
    }


def test_what_an_override_replaces_need_not_be_there(folder):
    write(folder / "base.yml", "model: gone")
    wanted = {"model": {"width": 7}}
    assert (
        run("extends: base.yml\nmodel: {preset: gone/too.yml, depth: 2}", "model=other") == wanted
    )


@pytest.mark.parametrize("overrides", [["m.kind=y", "m.new=1"], ["m.new=1", "m.kind=y"]])
def test_another_kind_on_the_command_line_replaces_the_mapping(folder, overrides):
    assert run("m: {kind: x, old: 1}", *overrides) == {"m": {"kind": "y", "new": 1}}


def test_an_index_reaches_into_a_default_list(folder):
    write(folder / "run.yml", "a: 1")
    tree = merged_tree(
        PRESETS,
        "run.yml",
        ["o.chain.1.rate=5"],
        {"o": {"chain": [{"kind": "x"}, {"kind": "y", "rate": 1}]}},
    )
    assert plain(tree) == {"a": 1, "o": {"chain": [{"kind": "x"}, {"kind": "y", "rate": 5}]}}
    assert (
        tree.at("o", "chain", 0, "kind").where == "default"
        and tree.at("o", "chain", 1, "rate").where == "override"
    )


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        ("extends: run.yml", [], r"run.yml: extends itself in a circle: run.yml -> run.yml"),
        (
            "a: 1\nextends: strat",
            [],
            r"run.yml:2: no preset strat; the presets are start, text; did you mean start\?",
        ),
        ("extends: 3", [], r"run.yml:1: extends: got 3; allowed: a preset's name, a path"),
        (
            "extends: nowhere.yml",
            [],
            r"run.yml:1: no file nowhere.yml; the presets are start, text",
        ),
        (
            "model: smal",
            [],
            r"run.yml:1: no model preset smal; the presets are large, other, small; did "
            r"you mean small\?",
        ),
        ("model: {preset: [small]}", [], "run.yml:1: model.preset: got"),
        (
            "model: {extends: small}",
            [],
            "run.yml:1: model.extends: inside a section the key is preset",
        ),
        ("- 1", [], "run.yml:1: holds a list; a configuration is a mapping"),
        ("b:\n  x: {like: y}\n  z: {}", [], r"run.yml:2: b.x.like: got 'y'; allowed: z"),
        ("b:\n  x: {like: y}\n  y: {like: x}", [], r"b.*like: got"),
        ("a: 1", ["a"], "override 'a': overrides have the form a.b.c=value"),
        ("a: 1", ["a.b=1"], "override 'a.b=1': a is 1, which has no b"),
        ("a: [1, 2]", ["a.2=1"], "a is a list; after it came 2; allowed: 0 to 1"),
        ("a: []", ["a.0=1"], "allowed: nothing, as it is empty"),
        ("a: 1", ["a=off"], "override a=off: unquoted off could be"),
        ("a: 1", ["extends=start"], "extends: cannot be overridden"),
        ("a: 1", ["model=nope"], "override: no model preset nope"),
    ],
)
def test_what_does_not_compose_is_refused_in_one_paragraph(folder, text, overrides, says):
    with pytest.raises(ConfigError, match=says):
        run(text, *overrides)
    assert refusal(text, *overrides)


def test_a_missing_file_names_the_nearest_preset(folder):
    with pytest.raises(
        ConfigError,
        match=r"^no configuration file configs/strt.yml; the presets are start, text; did you "
        r"mean start\?$",
    ):
        composed("configs/strt.yml")


@pytest.mark.parametrize("name", ["run", "./run/"])
def test_a_runs_folder_is_told_to_hold_a_file(folder, name):
    (folder / "run").mkdir()
    (folder / "run" / "config.yml").touch()
    with pytest.raises(
        ConfigError,
        match=f"^{name} is a folder, not a YAML file; give {name.rstrip('/')}/config.yml$",
    ):
        composed(name)


@pytest.mark.parametrize("name", ["x\0.yml", "x" * 5000 + ".yml", "~nobody/x.yml", ""])
def test_impossible_paths_are_refused(folder, name):
    with pytest.raises(ConfigError, match="no configuration"):
        composed(name)


def test_an_unreadable_file_is_refused(folder):
    write(folder / "run.yml", "a: 1")
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*args, **kwargs):
            raise PermissionError(13, "Permission denied")

        patch.setattr(regular_file, "open", refuse, raising=False)
        with pytest.raises(ConfigError, match="^run.yml: cannot be read: Permission denied$"):
            composed("run.yml")


def test_text_that_is_not_utf_8_is_refused_with_its_line(folder):
    (folder / "run.yml").write_bytes(b"a: 1\nb: caf\xe9\n")
    with pytest.raises(ConfigError, match="^run.yml:2: byte 0xe9 is not UTF-8"):
        composed("run.yml")


def test_a_byte_order_mark_is_skipped(folder):
    (folder / "run.yml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert composed("run.yml") == {"a": 1}


def test_a_huge_file_is_refused(folder):
    (folder / "run.yml").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="^run.yml: is larger than"):
        composed("run.yml")


def test_files_that_extend_one_file_twice_at_every_level_compose_quickly(folder):
    write(folder / "f0.yml", "a: 1")
    for level in range(1, 40):
        write(folder / f"f{level}.yml", f"extends: [f{level - 1}.yml, f{level - 1}.yml]")
    assert composed("f39.yml") == {"a": 1}


@pytest.mark.slow
def test_a_bomb_of_likes_is_refused(folder):
    text = "{k: 1}"
    for _ in range(30):
        text = f"{{a: {text}, b: {{like: a}}}}"
    assert "expand to more than" in refusal(f"a: {text}")


KEYS = st.lists(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,5}", fullmatch=True).filter(
        lambda key: key not in ("extends", "model", "like", "preset", "kind")
    ),
    min_size=1,
    max_size=4,
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.integers(0, 9)),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(KEYS, VALUES)
def test_any_value_survives_the_command_line(folder, keys, value):
    tree = run("z: 1", f"{'.'.join(['top', *keys])}={inline(value)}")
    for key in ["top", *keys]:
        tree = tree[key]
    assert tree == value and type(tree) is type(value)


@settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.one_of(st.text(), st.text(alphabet='ab.=01"[]{}:, *&!\n')))
def test_no_override_raises_anything_but_a_config_error(folder, text):
    try:
        run("a: [1, {b: 2}]\nb: {a: 1}\nmodel: small", text)
    except ConfigError:
        pass
