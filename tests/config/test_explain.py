from typing import Annotated, ClassVar, Literal

import pydantic
import pytest
from pydantic import Field

from maxstack.config import Items, Section, fault, load, load_tree
from maxstack.errors import ConfigError


class Text(Section):
    kind: Literal["text"]
    """The source."""
    text: str
    """The text."""


class Number(Section):
    kind: Literal["number", "count"]
    """The source."""
    size: int = Field(1, ge=1, lt=9)
    """How large."""


Source = Annotated[Text | Number, Field(discriminator="kind")]


class Pair(Section):
    low: int = 0
    """The lower."""
    high: int = 1
    """The upper."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Pair":
        if self.low > self.high:
            raise fault("low", f"low={self.low} is above high={self.high}")
        return self


class Root(Section):
    PRESETS: ClassVar[dict[str, tuple[str, ...]]] = {}

    name: str = Field("run", pattern="^[a-z]+$")
    """Of the run."""
    flag: bool = False
    """A switch."""
    mode: Literal["none", "latest"] | int = "latest"
    """A word or a number."""
    rate: float | Source = 1.0
    """A number or a source."""
    sources: Items[Source] = ()
    """All of them."""
    pair: Pair | None = None
    """Two numbers."""
    named: dict[str, Pair] = {}
    """By name."""
    axes: dict[str, str | Items[str] | None] = {}
    """By name."""
    size: int = Field(ge=1)
    """How large it is."""
    broken: Items[str] = ()
    """Keys that a rule complains about."""

    @classmethod
    def foreign(cls, path: str) -> str:
        return {"epochs": "here that is size", "trainer.epochs": "here that is size"}.get(path, "")


def check(cfg: Root) -> list[tuple[str, str]]:
    """A rule that complains about the keys that it is told."""
    return [(key, f"{key} is broken") for key in cfg.broken]


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """The paragraphs that a file's text leads to."""
    monkeypatch.chdir(tmp_path)

    def read(text: str, *overrides: str) -> list[str]:
        (tmp_path / "run.yml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_tree(Root, "run.yml", overrides, faults=check)
        error = caught.value
        assert error.__context__ is None or (error.__cause__ is None and error.__suppress_context__)
        return str(error).splitlines()

    return read


KEYS = "name, flag, mode, rate, sources, pair, named, axes, size, broken"


@pytest.mark.parametrize(
    ("text", "paragraph"),
    [
        ("size: 1\nnmae: x", f"run.yml:2: nmae: unknown key; allowed: {KEYS}; did you mean name?"),
        (
            "size: 1\nepochs: 3",
            f"run.yml:2: epochs: unknown key; allowed: {KEYS}; here that is size",
        ),
        (
            "size: 1\ntrainer: {lr: 1, epochs: 3}",
            f"run.yml:2: trainer: unknown key; allowed: {KEYS}; trainer.epochs: here that is size",
        ),
        ("flag: true", "run.yml:1: size: missing; wanted: a whole number >= 1 (How large it is.)"),
        ("size: one", "run.yml:1: size: got 'one' (text); allowed: a whole number >= 1"),
        ("size: 0", "run.yml:1: size: got 0; allowed: a whole number >= 1"),
        ("size: 1e3", "run.yml:1: size: got 1000.0; allowed: a whole number >= 1; write 1000"),
        ("size:", "run.yml:1: size: got null; allowed: a whole number >= 1"),
        (
            "size: 1\nname: A",
            "run.yml:2: name: got 'A' (text); allowed: text that matches ^[a-z]+$",
        ),
        (
            "size: 1\nmode: lastest",
            "run.yml:2: mode: got 'lastest' (text); allowed: one of none, latest, or a "
            "whole number; did you mean latest?",
        ),
        (
            "size: 1\nrate: fast",
            "run.yml:2: rate: got 'fast' (text); allowed: a number, or a mapping whose "
            "kind is one of text, number, count",
        ),
        (
            "size: 1\nrate:\n  kind: number\n  size: 9",
            "run.yml:4: rate.size: got 9; allowed: a whole number >= 1 and < 9",
        ),
        (
            "size: 1\nrate:\n  kind: numbr",
            "run.yml:3: rate.kind: got 'numbr' (text); allowed: text, number, count; did "
            "you mean number?",
        ),
        (
            "size: 1\nrate:\n  kid: number",
            "run.yml:2: rate.kind: missing; allowed: text, number, count",
        ),
        (
            "size: 1\nsources:\n- kind: count\n  sized: 3",
            "run.yml:4: sources.0.sized: unknown key; allowed: kind, size; did you mean size?",
        ),
        (
            "size: 1\nsources:\n- {kind: text, text: a}\n- {kind: text, text: 3}",
            "run.yml:4: sources.1.text: got 3; allowed: text",
        ),
        (
            "size: 1\nsources:\n- 3",
            "run.yml:3: sources.0: got 3; allowed: a mapping whose kind is one of text, "
            "number, count",
        ),
        (
            "size: 1\nsources: {kind: text}",
            "run.yml:2: sources: got a mapping; allowed: a list, each item a mapping "
            "whose kind is one of text, number, count",
        ),
        ("size: 1\npair: 3", "run.yml:2: pair: got 3; allowed: a mapping, or null"),
        ("size: 1\npair:\n  low: 2\n  high: 1", "run.yml:3: pair.low: low=2 is above high=1"),
        ("size: 1\nnamed:\n  x: {low: 2}", "run.yml:3: named.x.low: low=2 is above high=1"),
        (
            "size: 1\nnamed:\n  x: {lo: 2}",
            "run.yml:3: named.x.lo: unknown key; allowed: low, high; did you mean low?",
        ),
        (
            "size: 1\naxes: {a: 3}",
            "run.yml:2: axes.a: got 3; allowed: text, or a list, each item text, or null",
        ),
        ("size: 1\naxes:\n  a: [x, 3]", "run.yml:3: axes.a.1: got 3; allowed: text"),
        ("size: 1\nbroken: [flag]", "run.yml:1: flag: flag is broken"),
        ("size: 1\nbroken: [pair.low]\npair: {low: 0}", "run.yml:3: pair.low: pair.low is broken"),
    ],
)
def test_a_problem_is_one_paragraph_with_its_place_and_what_is_allowed(problems, text, paragraph):
    assert problems(text) == [paragraph]


def test_a_problem_from_the_command_line_says_so(problems):
    assert problems("size: 1", "size=0") == ["override: size: got 0; allowed: a whole number >= 1"]


class Block(Section):
    heads: int
    """How many."""
    pair: Pair
    """Two numbers."""


class Model(Section):
    PRESETS: ClassVar[dict[str, tuple[str, ...]]] = {}

    blocks: dict[str, Block]
    """By name."""


@pytest.mark.parametrize(
    ("extra", "overrides", "paragraph"),
    [
        (
            "",
            ["blocks.blok.heads=3"],
            "override: blocks.blok: is not there; there is block; a new one needs pair "
            "too; did you mean block?",
        ),
        (
            "blocks: {other: {pair: {hig: 1}}}",
            [],
            "run.yml:2: blocks.other: is not there; there is block; a new one needs heads too",
        ),
    ],
)
def test_an_incomplete_entry_beside_those_of_another_file_is_told_their_names(
    tmp_path, monkeypatch, extra, overrides, paragraph
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below.yml").write_text("blocks: {block: {heads: 2, pair: {low: 0}}}")
    (tmp_path / "run.yml").write_text(f"extends: ./below.yml\n{extra}")
    with pytest.raises(ConfigError) as caught:
        load(Model, "run.yml", overrides)
    assert str(caught.value) == paragraph


def test_an_incomplete_entry_beside_those_of_its_own_file_is_told_what_it_lacks(tmp_path):
    (tmp_path / "run.yml").write_text("blocks: {block: {heads: 2, pair: {}}, other: {pair: {}}}")
    with pytest.raises(
        ConfigError,
        match=r"run.yml:1: blocks.other.heads: missing; wanted: a whole number \(How many.\)$",
    ):
        load(Model, tmp_path / "run.yml")


def test_all_problems_are_told_up_to_five(problems):
    assert [line.split(":")[2].strip() for line in problems("size: x\nflag: x\nname: 3")] == [
        "name",
        "flag",
        "size",
    ]
    many = problems("size: 1\n" + "".join(f"unknown{i}: 1\n" for i in range(8)))
    assert len(many) == 6 and many[-1] == "... and 3 more problems"


def test_several_faults_of_one_rule_are_told_apart(problems):
    assert problems("size: 1\nflag: true\nbroken: [size, flag]") == [
        "run.yml:1: size: size is broken",
        "run.yml:2: flag: flag is broken",
    ]


def test_a_problem_in_what_like_takes_over_names_the_place_that_gave_it(problems):
    assert problems("size: 1\nnamed:\n  x:\n    low: 0\n    hih: 1\n  y:\n    like: x") == [
        "run.yml:5: named.x.hih: unknown key; allowed: low, high; did you mean high?",
        "run.yml:5: named.y.hih: unknown key; allowed: low, high; did you mean high?",
    ]
