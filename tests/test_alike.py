"""Hosts that see other content under the same path, played by one that changes it."""

import json
import os

import jax
import pytest
import tiny

from maxstack import alike
from maxstack.config import difference


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A configuration whose files lie on this host."""
    monkeypatch.syspath_prepend(f"{tmp_path}")
    (tmp_path / "own_reward.py").write_text("def score(answer):\n    return 1.0\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(1_000_000))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    source = {"kind": "jsonl", "files": [f"{tmp_path}/*.jsonl"]}
    made = {"kind": "function", "call": "own_reward:score"}
    return tiny.config(
        model={"weights": f"{tmp_path}/model"},
        data={"sources": [source, made], "template": f"{tmp_path}/template.jinja"},
    )


def other(file, old, new):
    def change(folder):
        content = (folder / file).read_bytes()
        assert old in content and len(old) == len(new)
        (folder / file).write_bytes(content.replace(old, new, 1))

    return change


CHANGES = {
    "content.data.sources.0.files": other("a.jsonl", b"one", b"two"),
    "content.model.weights": other("model/model.safetensors", bytes(9), b"otherbits"),
    "content.data.template": other("template.jinja", b"{{", b"{%"),
    "content.data.sources.1.call": other("own_reward.py", b"1.0", b"2.0"),
    "jax.jax_threefry_partitionable": lambda _: jax.config.update(
        "jax_threefry_partitionable", not jax.config.jax_threefry_partitionable
    ),
}


@pytest.mark.parametrize("key", CHANGES)
def test_what_another_host_has_otherwise_is_named_by_its_key(host, tmp_path, key):
    before, setting = alike.facts(host), jax.config.jax_threefry_partitionable
    try:
        CHANGES[key](tmp_path)
        assert [name for name, *_ in difference(before, alike.facts(host))] == [key]
    finally:
        jax.config.update("jax_threefry_partitionable", setting)


def test_a_text_that_has_the_form_of_a_call_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "__init__.py").write_text("raise SystemExit('the code has run')")
    monkeypatch.syspath_prepend(f"{tmp_path}")
    source = {"kind": "text", "files": [f"{tmp_path}/*"], "name": "sent.code:score"}
    assert alike.facts(tiny.config(data={"sources": [source]}))
    source = {"kind": "function", "call": "sent.code:score"}
    with pytest.raises(SystemExit):
        alike.facts(tiny.config(data={"sources": [source]}))


def test_copies_of_another_time_are_the_same(host, tmp_path):
    before = alike.facts(host)
    for path in tmp_path.rglob("*"):
        os.utime(path, (1.0, 1.0))
    assert alike.facts(host) == before
