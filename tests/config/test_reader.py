import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxstack.config.compose import plain
from maxstack.config.reader import MAX_NODES, read_yaml
from maxstack.errors import ConfigError


def value(text: str) -> object:
    return plain(read_yaml(f"key: {text}", "file.yml"))["key"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("1.0e4", 1e4),
        ("-2.5", -2.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("+3", 3),
        ("0", 0),
        ("0.5", 0.5),
        ("1_000", 1000),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("18446744073709551615", 2**64 - 1),
        ("{a: 1e-4}", {"a": 1e-4}),
        ("[1, two]", [1, "two"]),
    ],
)
def test_numbers_switches_and_null_are_read_as_written(text, meant):
    got = value(text)
    assert got == meant and type(got) is type(meant)


@pytest.mark.parametrize(
    "text",
    [
        "1:30",
        "12:30:45",
        "2024-01-01",
        "1.2.3",
        "e5",
        "1e",
        "y",
        "n",
        "nan",
        "inf",
        "08:30",
        "bfloat16",
        "1_",
        "_1",
        "0b11",
        "-x",
    ],
)
def test_what_is_no_number_in_yaml_1_2_is_text(text):
    assert value(text) == text


@pytest.mark.parametrize("text", ["on", "off", "yes", "no", "On", "OFF", "YES", "nO"])
def test_old_switches_are_refused_with_a_hint(text):
    with pytest.raises(
        ConfigError, match=rf"^file.yml:1: key: unquoted {text} .*true or false.*'{text}'"
    ):
        value(text)


@pytest.mark.parametrize("text", ["012", "-012", "00", "08", "007.5", "0_1"])
def test_leading_zeros_are_refused_with_a_hint(text):
    with pytest.raises(
        ConfigError, match=rf"^file.yml:1: key: number {text} starts with 0.*'{text}'"
    ):
        value(text)


@pytest.mark.parametrize(
    "text", ["on", "off", "012", "1e-4", "null", "true", "a: b", "*x", "!tag", ""]
)
def test_quoted_text_is_text(text):
    assert value(f"'{text}'") == text and value(f'"{text}"') == text


def test_keys_are_text_even_if_they_look_like_switches_or_numbers():
    assert plain(read_yaml("{on: 1, 012: 2, null: 3, 1e-4: 4}", "file.yml")) == {
        "on": 1,
        "012": 2,
        "null": 3,
        "1e-4": 4,
    }


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb: 2\na: 3", 3, r"key a comes twice.*first at file.yml:1"),
        ("a:\n  b: {c: 1, c: 2}", 2, "key c comes twice"),
        (
            "a: 1\nb: !!python/object/apply:os.system [x]",
            2,
            "tag tag:yaml.org,2002:python/object/apply:os.system is refused",
        ),
        ("a: !env HOME", 1, "tag !env is refused"),
        ("!x\na: 1", 1, "tag !x is refused"),
        ("a: 1\n---\nb: 1", 2, "second document"),
        ("a: &x {k: 1}\nb: {<<: *x}", 2, "merge keys"),
        ("a:\n\tb: 1", 2, "tab"),
        ("a: [1, 2\nb: 3", 2, "not valid YAML"),
        ("a: *.txt", 1, "begins with . or & must be quoted"),
        ("a: 1\nb: *nothing", 2, "refers to no anchor"),
        ("a: 1\n? [x]\n: 1", 2, "key must be text"),
        ("a: &x y\nb: 1\n*x : 2", 3, "cannot be one"),
        ("a: 1\n'': 2", 2, "a key is missing"),
        ("a: 1\nb: \x00", 2, "does not allow"),
        ("a: .nan", 1, "not a number"),
        ("a: 1e999", 1, "too large"),
        ("a: " + "9" * 5000, 1, "too large"),
        ("a: 18446744073709551616", 1, "64 bits"),
        ("a:\n " + "[" * 5000, 2, "nested more than"),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_line(text, line, says):
    with pytest.raises(ConfigError, match=rf"^file.yml:{line}: .*{says}") as caught:
        read_yaml(text, "file.yml")
    assert "\n" not in str(caught.value)


def test_empty_text_is_refused():
    with pytest.raises(ConfigError, match="is empty"):
        read_yaml("# only a comment\n", "file.yml")


def test_anchors_and_aliases_repeat_a_value():
    assert plain(read_yaml("a: &x {k: [1]}\nb: *x", "file.yml")) == {
        "a": {"k": [1]},
        "b": {"k": [1]},
    }


def test_an_alias_bomb_is_refused_without_being_expanded():
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 60))
    with pytest.raises(ConfigError, match=rf"^file.yml:\d: more than {MAX_NODES} values"):
        read_yaml(bomb, "file.yml")


def test_every_value_knows_its_line():
    tree = read_yaml("a:\n  b: 1\n  c:\n    - x\n    - k: >\n        folded\nd: {e: 2}", "file.yml")
    places = {
        path: tree.at(*path).where
        for path in [("a",), ("a", "b"), ("a", "c"), ("a", "c", 1, "k"), ("d", "e")]
    }
    assert places == {
        ("a",): "file.yml:1",
        ("a", "b"): "file.yml:2",
        ("a", "c"): "file.yml:3",
        ("a", "c", 1, "k"): "file.yml:5",
        ("d", "e"): "file.yml:7",
    }


@settings(deadline=None, max_examples=300)
@given(
    st.one_of(
        st.text(), st.text(alphabet="ab01:-[]{}*&!|>'\"#,%@`?\n\t .~<=\\e_\x00\x85\ud800\ufeff")
    )
)
def test_no_text_raises_anything_but_a_config_error(text):
    try:
        plain(read_yaml(text, "file.yml"))
    except ConfigError as error:
        assert str(error).startswith("file.yml")
