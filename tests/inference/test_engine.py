"""The engine against transformers, against itself and against `score`."""

import dataclasses
import functools
import os
import sys
from pathlib import Path

import numpy as np
import parity
import processes
import pytest
import tiers
from engines import answers, build, compile_bursts, finish, outputs_of, reset_engine
from flax import nnx

from maxstack.errors import DataError
from maxstack.inference import programs
from maxstack.inference.batch_invariance import StepSizes
from maxstack.inference.engine_setup import OVERRIDES
from maxstack.inference.multi_step import STEPS
from maxstack.inference.request import Sampling
from maxstack.inference.runner import step_sizes
from maxstack.inference.score import Rows, logprobs_of
from maxstack.inference.trained_model import open_model

GOLDENS = {
    path.parent.name: path.parent
    for path in sorted((Path(__file__).parents[1] / "goldens").glob("*/greedy.npz"))
}
LENGTH = 64
GREEDY = Sampling(max_tokens=32, temperature=0.0, logprobs=0)
STOPPING = Sampling(
    max_tokens=24, temperature=0.8, top_p=0.9, logprobs=3, seed=4,
    stop_tokens=frozenset(range(0, 128, 32)),
)  # fmt: skip
KINDS = ["llama", "gpt_oss", "llama4", "deepseek_v3", "qwen3_next"]
"""Models with full and windowed attention, sinks, chunks, latents, experts and recurrence."""

SAMPLERS = {}
"""By vocabulary and longest text."""


@functools.cache
def built(name, max_length, overrides):
    """An engine whose programs others share, and its limits."""
    engine, limits = build(GOLDENS[name], [*OVERRIDES, "mesh.tensor=1", *overrides], max_length)
    engine._sampler = SAMPLERS.setdefault((engine.cfg.model.vocab, max_length), engine._sampler)
    return engine, limits


def engine_of(name, max_length=LENGTH, overrides=(), requests=4, **limits):
    """An engine for few requests at a time."""
    engine, most = built(name, max_length, (*overrides,))
    return reset_engine(engine, most._replace(requests=requests, **limits))


def cached_in(dtype):
    """Overrides for a cache of that dtype."""
    return [] if dtype == "null" else [f"serve.cache_dtype={dtype}"]


def prompts_of(golden, part="", rows="prompts"):
    pairs = zip(golden[part + rows], golden[f"{part}lengths"], strict=True)
    return [row[:length].tolist() for row, length in pairs]


def random_prompts(*lengths):
    rng = np.random.default_rng(1)
    return [rng.integers(0, 128, length).tolist() for length in lengths]


def leaked(engine):
    """Pages that have users."""
    scheduler = engine.scheduler
    return sum(pool.size - pool.available for pools in scheduler.pools for pool in pools)


@pytest.mark.parametrize("name", tiers.of(GOLDENS, "deepseek_v3", slow=["gemma3", *KINDS[:3]]))
def test_greedy_answers_to_prompts_of_unequal_length_are_those_of_transformers(name):
    golden = np.load(GOLDENS[name] / "greedy.npz")
    for part, length in {"": LENGTH, "short_": int(golden.get("original", 0))}.items():
        if not length:
            continue
        engine = engine_of(name, length)
        sampling = dataclasses.replace(GREEDY, max_tokens=golden[f"{part}tokens"].shape[1])
        made = answers(engine, prompts_of(golden, part), sampling)
        for tokens, wanted, logprobs in zip(
            made, golden[f"{part}tokens"], golden[f"{part}logprobs"], strict=True
        ):
            assert [token.token for token in tokens] == wanted.tolist()
            assert np.allclose([token.logprob for token in tokens], logprobs, atol=1e-4)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("llama", "null"),
        *(pytest.param(name, "null", marks=pytest.mark.release) for name in KINDS[1:-1]),
        pytest.param("qwen3_next", "null", marks=pytest.mark.slow),
        pytest.param("llama", "int8", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "fp8", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "int8", marks=pytest.mark.release),
    ],
)
def test_a_request_has_the_same_bits_alone_in_company_preempted_and_after_a_prefix_hit(name, dtype):
    overrides = cached_in(dtype)
    sampling = Sampling(max_tokens=20, temperature=0.8, top_p=0.9, logprobs=3, seed=-5)
    prompts = random_prompts(19, 1, 26, 7, 30, 3)
    roomy = engine_of(name, overrides=overrides)
    alone = [answers(roomy, [prompt], sampling)[0] for prompt in prompts]
    hits = roomy.scheduler.hits
    assert answers(roomy, prompts, sampling) == alone
    assert roomy.scheduler.hits > hits
    tight = engine_of(name, overrides=overrides, pages=(16,) * len(roomy.scheduler.pools[0]))
    assert answers(tight, prompts, sampling) == alone
    assert tight.scheduler.preemptions > 0
    assert leaked(roomy) == leaked(tight) == 0


@pytest.mark.parametrize("name", tiers.of(KINDS, "llama", slow=["qwen3_next"]))
def test_an_embedding_is_the_state_that_gives_the_logits_of_transformers(name):
    golden = np.load(GOLDENS[name] / "golden.npz")
    prompts = prompts_of(golden, rows="tokens")
    sampling = Sampling(max_tokens=1, embed=True)
    made = []
    for limits in ({}, {"pages": (12,) * len(engine_of(name).scheduler.pools[0])}):
        engine = engine_of(name, **limits)
        numbers = [engine.add(prompt, sampling) for prompt in prompts]
        outputs = {output.request: output for output in outputs_of(engine)}
        made.append(np.stack([outputs[number].embedding for number in numbers]))
        assert all(not output.tokens and output.finish for output in outputs.values())
    assert np.array_equal(*made)
    _, graph, params = parity.model_and_params(GOLDENS[name])
    logits = nnx.merge(graph, nnx.State(params)).logits(made[0][:, None])[:, 0]
    for own, row, length in zip(logits, golden["logits"], golden["lengths"], strict=True):
        np.testing.assert_allclose(own, row[length - 1], atol=2e-4 * row.std(), rtol=1e-4)


@pytest.mark.parametrize(
    "name", tiers.of(["llama", "deepseek_v3", "qwen3_next"], "llama", slow=["deepseek_v3"])
)
def test_log_probabilities_of_prompt_and_answer_are_those_of_score(name):
    prompts = random_prompts(17, 9)
    engine = engine_of(name)
    numbers = [
        engine.add(prompt, dataclasses.replace(GREEDY, prompt_logprobs=0)) for prompt in prompts
    ]
    given, made = {}, {}
    for output in outputs_of(engine):
        given.setdefault(output.request, []).extend(output.prompt)
        made.setdefault(output.request, []).extend(output.tokens)
    texts = [[*given[number], *made[number]] for number in numbers]
    tokens = np.zeros((2, max(map(len, texts))), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = [token.token for token in text]
    lengths = np.array([len(text) for text in texts], np.int32)
    run, params = open_model(str(GOLDENS[name]), ["model.dtype=float32"])
    scored = logprobs_of(run, params, Rows(tokens, lengths), 2)
    for text, row in zip(texts, scored, strict=True):
        assert text[0].logprob is None
        own = [token.logprob for token in text[1:]]
        assert np.abs(own - row[1 : len(text)]).max() < 1e-5


@pytest.mark.parametrize("dtype, most", [("int8", 0.02), ("fp8", 0.16)])
@pytest.mark.parametrize(
    "name", tiers.of(["llama", "deepseek_v3", "gpt_oss"], "llama", slow=["deepseek_v3"])
)
@pytest.mark.slow
def test_a_cache_in_low_precision_gives_nearly_the_same_log_probabilities(name, dtype, most):
    # an eighth step of e4m3 beside a 254th of int8, through few layers whose scores are of size 1
    prompts, sampling = random_prompts(40), dataclasses.replace(GREEDY, prompt_logprobs=0)

    def scores(cache_dtype):
        engine = engine_of(name, overrides=cached_in(cache_dtype))
        engine.add(prompts[0], sampling)
        given = [token.logprob for output in outputs_of(engine) for token in output.prompt]
        return np.array(given[1:])

    apart = np.abs(scores(dtype) - scores("null"))
    assert 0 < apart.max() < most


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_the_start_finds_no_different_bits_with_a_cache_in_low_precision(dtype):
    engine = engine_of("llama", overrides=cached_in(dtype))
    assert StepSizes(engine.programs, engine.cfg.model.vocab, LENGTH).different() == []


@pytest.mark.release
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next"])
def test_steps_of_all_sizes_have_equal_bits_on_a_cpu(name, tmp_path):
    """By one device and XLA's usual optimizations, in a process of their own."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"tokens": [1, 2, 3]}\n')
    command = [sys.executable, "-m", "maxstack.cli", "generate", str(GOLDENS[name])]
    command += ["--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl"), "serve.rows=128"]
    command += ["model.dtype=float32", "serve.max_length=200", "serve.identical=strict"]
    assert "depend on other requests" not in processes.run(command, os.environ | {"XLA_FLAGS": ""})


@pytest.mark.parametrize(
    "name, dtype, expert",
    [
        pytest.param("gpt_oss", "int8", 2, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "null", 2, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "null", 1, marks=pytest.mark.release),
        pytest.param("deepseek_v3", "fp8", 1, marks=pytest.mark.release),
        pytest.param("qwen3_next", "null", 2, marks=pytest.mark.release),
    ],
)
def test_a_mesh_of_devices_gives_the_tokens_of_one(name, dtype, expert):
    mesh = [f"mesh.expert={expert}", "mesh.tensor=2", "mesh.data=2"]
    overrides = cached_in(dtype)
    prompts = random_prompts(11, 2, 21, 5, 13)
    sampling = dataclasses.replace(GREEDY, max_tokens=12)
    whole, split = (
        answers(engine_of(name, overrides=[*overrides, *over]), prompts, sampling)
        for over in ([], mesh)
    )
    assert [[token.token for token in tokens] for tokens in split] == [
        [token.token for token in tokens] for tokens in whole
    ]


@pytest.mark.slow
def test_guesses_change_neither_greedy_nor_sampled_answers_and_save_steps():
    prompts = [[5, 6, 7, 8] * 4, random_prompts(9)[0]]
    for sampling in (GREEDY, dataclasses.replace(GREEDY, temperature=0.3, top_k=3, seed=2)):
        plain = engine_of("llama")
        guessing = engine_of("llama", overrides=["serve.speculate=3"])
        assert answers(guessing, prompts, sampling) == answers(plain, prompts, sampling)
        assert 0 < guessing.accepted <= guessing.drafted


def test_a_preempted_request_reports_each_token_of_its_prompt_once():
    engine = engine_of("llama", pages=(16,))
    prompts = random_prompts(40, 38)
    sampling = dataclasses.replace(GREEDY, prompt_logprobs=0, max_tokens=8)
    numbers = [engine.add(prompt, sampling) for prompt in prompts]
    given = {number: [] for number in numbers}
    for output in outputs_of(engine):
        given[output.request] += [token.token for token in output.prompt]
    assert engine.scheduler.preemptions > 0
    assert [given[number] for number in numbers] == prompts


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "the prompt is empty"),
        ([3, 128], "token 128 is outside the model's vocabulary of 128"),
        ([3, -1], "token -1 is outside"),
        ([3] * 64, "64 tokens long, and serve.max_length=64"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused(prompt, message):
    engine = engine_of("llama")
    with pytest.raises(DataError, match=message):
        engine.add(prompt, GREEDY)
    assert not engine.busy


def test_an_aborted_request_frees_its_pages_and_others_go_on():
    engine = engine_of("llama")
    kept, gone = engine.add([1, 2, 3], GREEDY), engine.add([4, 5], GREEDY)
    engine.step()
    engine.abort(gone)
    engine.abort(gone)
    assert [*finish(engine)[0]] == [kept]
    assert leaked(engine) == 0


def answers_and_ends(engine, prompts, sampling, many=1):
    """Tokens and ends of answers to equal prompts too; numbers of their choices differ."""
    tokens, ends, steps = {}, {}, 0
    for choice, prompt in enumerate(prompts):
        engine.add(prompt, dataclasses.replace(sampling, choice=choice))
    first = min(engine._sequences)
    while engine.busy:
        steps += 1
        for output in engine.step(many):
            tokens.setdefault(output.request - first, []).extend(output.tokens)
            ends[output.request - first] = output.finish
    assert leaked(engine) == 0
    return (tokens, ends), steps


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "null"),
        pytest.param("llama", "int8", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "null", marks=pytest.mark.slow),
        *(pytest.param(name, "null", marks=pytest.mark.release) for name in KINDS[1:-1]),
    ],
)
@pytest.mark.slow
def test_many_steps_at_once_give_the_bits_of_one_at_a_time(name, dtype):
    overrides, prompts = cached_in(dtype), random_prompts(19, 1, 26, 7, 30, 3)
    single, steps = answers_and_ends(engine_of(name, overrides=overrides), prompts, STOPPING)
    assert {*single[1].values()} == {"stop", "length"}
    engine = engine_of(name, overrides=overrides)
    compile_bursts(engine, lambda engine: answers_and_ends(engine, prompts, STOPPING, STEPS))
    many, fewer = answers_and_ends(engine, prompts, STOPPING, STEPS)
    assert many == single and fewer < 0.7 * steps
    groups = len(engine.scheduler.pools[0])
    tight = engine_of(name, overrides=overrides, pages=(16,) * groups)
    assert answers_and_ends(tight, prompts, STOPPING, STEPS)[0] == single
    assert tight.scheduler.preemptions > 0


@pytest.mark.parametrize("name", tiers.of(["llama", "gpt_oss"], slow=["llama"]))
def test_many_steps_at_once_on_a_mesh_give_its_bits_of_one_at_a_time(name):
    mesh, prompts = ["mesh.tensor=2", "mesh.data=4"], random_prompts(11, 2, 21, 5, 13, 9)
    single, many = (
        answers_and_ends(engine_of(name, overrides=mesh), prompts, STOPPING, n)[0]
        for n in (1, STEPS)
    )
    assert many == single


def test_requests_that_need_the_host_at_each_token_are_answered_step_by_step():
    prompts = random_prompts(9, 4)
    for more in ({"presence_penalty": 0.5}, {"min_tokens": 12}, {"logit_bias": {5: 1.0}}):
        sampling = dataclasses.replace(STOPPING, **more)
        single, many = (
            answers_and_ends(engine_of("llama"), prompts, sampling, n)[0] for n in (1, STEPS)
        )
        assert many == single


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", []),
        pytest.param("gpt_oss", [], marks=pytest.mark.slow),
        pytest.param("llama", ["mesh.tensor=2", "mesh.data=2"], marks=pytest.mark.release),
        *(pytest.param(name, [], marks=pytest.mark.release) for name in KINDS[2:]),
        pytest.param("gpt_oss", ["mesh.tensor=2", "mesh.data=2"], marks=pytest.mark.release),
    ],
    ids=str,
)
def test_equal_prompts_are_computed_once_and_change_no_bit(name, mesh):
    one, other = random_prompts(11, 17)
    prompts = [one, one, other, one, other, one, other, one]
    engine = engine_of(name, overrides=mesh, requests=8)
    plain, alone = engine_of(name, overrides=mesh), []
    for choice, prompt in enumerate(prompts):
        plain.add(prompt, dataclasses.replace(STOPPING, choice=choice))
        alone += finish(plain)[0].values()
    together, _ = answers_and_ends(engine, prompts, STOPPING, STEPS)
    assert [together[0][choice] for choice in range(len(prompts))] == alone
    if not engine._layout.recurrent:
        assert engine.scheduler.hits >= 4 * 10 + 2 * 16


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("llama", ()),
        pytest.param("llama", ("mesh.data=2",), marks=pytest.mark.slow),
        pytest.param("qwen3_next", (), marks=pytest.mark.slow),
        pytest.param("gpt_oss", (), marks=pytest.mark.release),
    ],
)
def test_a_cache_that_grows_and_sizes_that_are_tried_change_no_bit(name, mesh, monkeypatch):
    monkeypatch.setattr(programs, "FEWEST", 4)
    monkeypatch.setattr(programs, "SMALL", 0)
    prompts = random_prompts(19, 1, 26, 7, 30, 3)
    overrides = [*OVERRIDES, *(mesh or ["mesh.tensor=1"])]
    engine, limits = build(GOLDENS[name], overrides, LENGTH, on_demand=1, rows=32)
    assert {*engine.programs.held} == {4}
    other = build(GOLDENS[name], overrides, LENGTH)[0] if mesh else engine_of(name)
    assert answers(engine, prompts, STOPPING) == answers(other, prompts, STOPPING)
    assert min(engine.programs.held) >= 16
    # Tried once for each size of step and of cache that was used, with the smallest size.
    used = {size for size, *_ in engine.sizes._tried}
    assert engine.programs.sizes[0] in used
    # On several devices matrices lie as XLA wants them, whose products depend on the rows.
    assert mesh or engine.programs.sizes == step_sizes(limits)


@pytest.mark.parametrize("part", ["states", "logits"])
def test_what_a_size_with_other_bits_computed_is_computed_again(part, monkeypatch, caplog):
    prompts = random_prompts(19, 26, 7)
    engine, limits = build(GOLDENS["llama"], [*OVERRIDES, "mesh.tensor=1"], LENGTH, on_demand=1)
    known = StepSizes._bits

    def differing(self, size, beside, steps, outputs):
        bits = known(self, size, beside, steps, outputs)
        if (size if part == "states" else outputs) != 2:
            return bits
        return bits._replace(**{part: [row + b"." for row in getattr(bits, part)]})

    monkeypatch.setattr(StepSizes, "_bits", differing)
    assert answers(engine, prompts, GREEDY) == answers(engine_of("llama"), prompts, GREEDY)
    assert 2 in step_sizes(limits) and 2 not in engine.programs.sizes
    assert "are used, so that an answer does not depend on other requests" in caplog.text
