import pytest

from maxstack.commands import score
from maxstack.errors import ConfigError
from maxstack.inference import records
from maxstack.schema.data import ChatRecord

WORDS = ["run", "--records", "a.jsonl", "--out", "b.jsonl"]


def test_records_are_scored_by_the_preset_and_columns_that_are_named(monkeypatch):
    asked = []
    monkeypatch.setattr(records, "score_records", lambda *args, **_: asked.append(args[4]) or 1)
    columns = ["--column", "question=problem", "--column", "answer=a=b"]
    args = score.main.parse([*WORDS, "--preset", "gsm8k", *columns])
    score._score_records(None, None, args)
    named = {"question": "problem", "answer": "a=b"}
    assert asked == [ChatRecord(kind="chat", preset="gsm8k", columns=named)]
    with pytest.raises(SystemExit):
        score.main.parse([*WORDS, "--column", "question"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "prompts"], "--kind prompts: is not one of chat, pairs, labelled"),
        (["--top", "4"], "--top: needs records with one answer; give --kind chat or labelled"),
        (["--kind", "pairs", "--preset", "alpaca"], "--preset alpaca gives chat"),
    ],
)
def test_records_that_cannot_be_scored_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        score._record_kind(score.main.parse([*WORDS, *words]))
