import importlib.util
import re

import pytest
from rewards.cases import case

from maxstack.errors import ConfigError, installing
from maxstack.rewards import built_in
from maxstack.schema.rewards import ANSWER_FORM, ExactReward, MathReward


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [("Paris", "Paris", 1.0), (" Paris\n", "Paris ", 1.0), ("paris", "Paris", 0.0), ("7", 7, 1.0)],
)
def test_exact(completion, answer, value):
    assert built_in.exact("", completion, {"answer": answer}) == value


def test_a_reward_reads_special_tokens_where_it_asks(pool):
    rewards = pool(ExactReward(kind="exact", special_tokens=True), ExactReward(kind="exact"))
    outcomes = rewards.submit(case("four", answer="<s>four")).result(60)
    assert [outcome.value for outcome in outcomes] == [1.0, 0.0]


def test_a_missing_field_is_named():
    with pytest.raises(KeyError, match="no field 'answer', but question, solution"):
        built_in.exact("", "", {"question": "", "solution": ""})


def test_regex_is_found_anywhere():
    assert built_in.regex("", "so: 4\n", {}, pattern=r"\d") == 1.0
    assert built_in.regex("", "a\nb", {}, pattern="a.b") == 0.0
    assert built_in.regex("", "a\nb", {}, pattern="(?s)a.b") == 1.0


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0),
        ("\n<think></think><answer></answer>\n", 1.0),
        ("<think>a</think> so <answer>4</answer>", 0.0),
        ("<think>a<think>b</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
    ],
)
def test_form_of_reasoning_and_answer(completion, value):
    assert built_in.form("", completion, {}, pattern=ANSWER_FORM) == value


@pytest.mark.parametrize(
    ("completion", "keys", "value"),
    [
        ('{"a": 1}', (), 1.0),
        ("7" * 5000, (), 1.0),
        ("NaN", (), 0.0),
        ('{"a": 1', (), 0.0),
        ("[" * 100_000, (), 0.0),
        ('{"a": 1, "b": 2}', ("a",), 1.0),
        ('["a"]', ("a",), 0.0),
    ],
)
def test_valid_json(completion, keys, value):
    assert built_in.valid_json("", completion, {}, keys=keys) == value


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("It is 72.", "#### 72", 1.0),
        ("$1,234.50", 1234.5, 1.0),
        ("1,2", 2, 1.0),
        ("3/4", "3/4", 1.0),
        ("0.75", "3/4", 1.0),
        ("so 6 / 8", 0.75, 1.0),
        ("1/0", 1, 0.0),
        ("50%", "50 %", 1.0),
        ("0.5", "50 percent", 1.0),
        ("0.05", "50%", 0.0),
        ("at 12:30", 30, 0.0),
        ("3 of 2024-05-01", 1, 0.0),
        ("72", "48/2 = <<48/2=24>>24, and 24+48 = 72\n#### 72", 1.0),
        ("\u22125", -5, 1.0),
        ("10-5", 5, 1.0),
        ("f(x)-5", 5, 1.0),
        (".5", 0.5, 1.0),
        ("1e999999999", 1, 0.0),
    ],
)
def test_last_number(completion, answer, value):
    assert built_in.number("", completion, {"answer": answer}) == value


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("five", "no number"),
        ("12:30", "not one number but 12:30"),
        ("3 or 4", "not one number but 3, 4"),
    ],
)
def test_an_answer_that_is_not_one_number_is_an_error(answer, said):
    with pytest.raises(ValueError, match=f"'{answer}', which has {said}; .*`kind: math`"):
        built_in.number("", "5", {"answer": answer})


def test_overlong_completions_are_punished_softly():
    values = [built_in.soft_overlong(tokens, 20, 10) for tokens in (0, 10, 11, 15, 20, 21, 1000)]
    assert values == [0.0, 0.0, -0.1, -0.5, -1.0, -1.0, -1.0]


@pytest.mark.slow
def test_a_missing_library_is_told_before_the_first_reward(pool, monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('No module named math_verify')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"rewards\.0: .*{re.escape(installing('math'))}"):
        pool(MathReward(kind="math")).check()


@pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="the extra math is missing")
def test_math(pool):
    rewards = pool(MathReward(kind="math", timeout=20.0))
    rewards.check()
    cases = {
        ("so $x=\\frac12$", "1/2"): 1.0,
        ("\\boxed{0.5}", "\\frac{1}{2}"): 1.0,
        ("\\boxed{1234}", "1,234"): 1.0,
        ("$$1+x^2$$", "$x^2+1$"): 1.0,
        ("\\boxed{5} then 6", 5): 1.0,
        ("\\boxed{5}" + " and so on " * 20 + "\\boxed{6}", 5): 0.0,
        ("\\boxed{5}" + " and so on " * 20 + "\\boxed{6}", 6): 1.0,
        ("first \\boxed{3}, so the answer is \\boxed{2}. Done, in 7.", 2): 1.0,
        ("first \\boxed{3}, so the answer is \\boxed{2}. Done, in 7.", 3): 0.0,
        ("$\\boxed{3}$ or rather $\\fbox{2}$", 2): 1.0,
        ("$\\boxed 2$ of 9", 2): 1.0,
        ("\\boxed{\\boxed{\\frac{1}{2}}}", "so \\fbox{0.5}"): 1.0,
        ("\\boxed{\\left\\{1, 2\\right\\}}", "\\{1,2\\}"): 1.0,
        ("\\boxed{2} or \\boxed{3", 2): 1.0,
        ("7 \\boxed{}", 7): 0.0,
        ("nothing", 5): 0.0,
        ("\\boxed{9^{9^{9^9}}}", 5): 0.0,
    }
    found = {key: rewards.submit(case(key[0], answer=key[1])).result(60)[0].value for key in cases}
    assert found == cases
