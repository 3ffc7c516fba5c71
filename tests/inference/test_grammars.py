"""Grammars of several clients at once."""

import asyncio

import pytest

from maxstack.inference.grammar import Vocabulary
from maxstack.inference.server.grammars import KEPT, WAITING, Grammars, Rule
from maxstack.inference.server.refusal import Refusal
from maxstack.inference.service import Full

QUICK = Rule("guided_regex", "regex", "ab")
SLOW = Rule("guided_json", "json_schema", {"type": "integer", "multipleOf": 9_999_991})


@pytest.fixture
def grammars():
    grammars = Grammars(lambda: Vocabulary([bytes([byte]) for byte in range(256)] + [b""], [256]))
    yield grammars
    grammars.close()


@pytest.mark.slow
def test_a_client_waits_for_its_own_grammars_and_no_other_does(grammars):
    async def ask():
        slow = [asyncio.create_task(grammars.answers(SLOW, 1, "a")) for _ in range(WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(Full, match="64 requests of this client"):
            await grammars.answers(QUICK, 1, "a")
        assert len(await grammars.answers(QUICK, 3, "b")) == 3
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
        assert all(task.cancelled() for task in slow)
        assert len(await grammars.answers(QUICK, 1, "a")) == 1

    asyncio.run(ask())


def test_a_grammar_is_tried_once_and_a_refusal_names_its_field(grammars, monkeypatch):
    async def ask():
        first = await grammars.answers(QUICK, 1, "a")
        first[0].accept(ord("a"))
        monkeypatch.setattr("maxstack.inference.grammar_sandbox.GrammarSandbox.check", None)
        (again,) = await grammars.answers(QUICK, 1, "b")
        again.accept(ord("a"))
        assert again.error is None
        monkeypatch.undo()
        with pytest.raises(Refusal, match="guided_regex: grammar: not a regular expression"):
            await grammars.answers(QUICK._replace(value="("), 1, "a")
        for number in range(KEPT):
            await grammars.answers(QUICK._replace(value=f"a{number}"), 1, "a")
        monkeypatch.setattr("maxstack.inference.grammar_sandbox.GrammarSandbox.check", None)
        with pytest.raises(TypeError):
            await grammars.answers(QUICK, 1, "a")

    asyncio.run(ask())


def test_grammars_together_have_bounded_memory_until_their_answers_are_gone(grammars, monkeypatch):
    monkeypatch.setattr(
        "maxstack.inference.grammar_sandbox.GrammarSandbox.check", lambda *_: (40 << 20, 10 << 20)
    )

    async def ask():
        answers = [await grammars.answers(QUICK, 60, "a")]
        with pytest.raises(Full, match="1280 MiB of 1024"):
            await grammars.answers(QUICK, 60, "b")
        answers.clear()
        await asyncio.sleep(0.1)  # the event loop has them until its next turn
        assert len(await grammars.answers(QUICK, 60, "b")) == 60

    asyncio.run(ask())
