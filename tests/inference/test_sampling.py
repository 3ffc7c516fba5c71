"""Sampling against a plain numpy definition in the order of transformers' logits processors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from maxstack.commands import generate
from maxstack.inference import sampler, sampling
from maxstack.inference.request import Sampling
from maxstack.inference.server.schemas import SamplingBody
from maxstack.layers.batch_invariance import in_groups
from maxstack.package.text_signatures import FILTERS
from maxstack.schema.rollout import RolloutConfig
from maxstack.schema.tasks import GenerationConfig

CHOSEN = jax.jit(sampling.choose)
ADJUSTED = jax.jit(sampling.adjust)
LOGPROBS = jax.jit(sampling.logprobs, static_argnums=2)
RNG = np.random.default_rng(0)


def drawn(logits, chosen=CHOSEN, rows=4096, **fields):
    """Tokens of as many seeds, from the same logits."""
    settings = sampling.pack_settings([(Sampling(seed=seed, **fields), 7) for seed in range(rows)])
    return np.asarray(chosen(jnp.broadcast_to(jnp.asarray(logits), (rows, len(logits))), settings))


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    def softmax(scores):
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()

    scores = logits.astype(np.float64) / temperature
    if top_k:
        scores[scores < np.sort(scores)[-min(top_k, len(scores))]] = -np.inf
    if top_p < 1:
        rising = np.argsort(scores, kind="stable")
        removed = np.cumsum(softmax(scores)[rising]) <= 1 - top_p
        removed[-1] = False
        scores[rising[removed]] = -np.inf
    found = softmax(scores)
    scores[found < min_p * found.max()] = -np.inf
    return softmax(scores)


def assert_distributed(tokens, wanted):
    counts = np.bincount(tokens, minlength=len(wanted))
    assert counts[wanted == 0].sum() == 0
    expected = wanted * len(tokens)
    rare = expected < 5
    counts, expected = (
        np.append(values[~rare], values[rare].sum()) for values in (counts, expected)
    )
    if (expected > 0).sum() > 1:
        real = expected > 0
        assert scipy.stats.chisquare(counts[real], expected[real]).pvalue > 1e-3


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.8},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_tokens_are_drawn_from_what_the_filters_keep(fields):
    logits = RNG.standard_normal(300).astype(np.float32) * 2
    assert_distributed(drawn(logits, **fields), probabilities(logits, **fields))


@pytest.mark.parametrize(
    "fields", [{"top_k": 30}, {"top_p": 0.7}, {"top_k": 50, "top_p": 0.8}], ids=str
)
def test_filters_that_keep_more_than_the_sorted_candidates_are_exact(fields, monkeypatch):
    monkeypatch.setattr(sampling, "CANDIDATES", 16)
    logits = RNG.standard_normal(100).astype(np.float32) * 0.3
    wanted = probabilities(logits, **fields)
    assert (wanted > 0).sum() > 16
    assert_distributed(drawn(logits, jax.jit(lambda *row: sampling.choose(*row)), **fields), wanted)


@pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_p": 0.3}], ids=str)
@pytest.mark.parametrize("size", [8, 2000])
def test_tokens_with_equal_logits_are_kept_together(fields, size):
    logits = np.full(size, -1e9, np.float32)
    tied = np.arange(size) % 2 == 0
    logits[tied] = 1.0
    assert {*drawn(logits, rows=512, **fields) % 2} == {0}
    assert len({*drawn(logits, rows=512, **fields)}) >= min(tied.sum(), 300)


def test_temperature_0_is_the_first_of_the_likeliest_tokens():
    logits = np.zeros(300, np.float32)
    logits[[7, 9]] = 2
    assert {*drawn(logits, rows=8, temperature=0.0, top_k=3)} == {7}


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_the_smallest_temperatures_take_the_likeliest_token(temperature):
    logits = RNG.standard_normal(300).astype(np.float32) * 100
    assert {*drawn(logits, rows=8, temperature=temperature, top_p=0.9)} == {logits.argmax()}


VALUES = {
    "temperature": ((1e-3, 1, 1000), (-0.1, 1000.1, np.inf, np.nan)),
    "top_k": ((0, 1 << 30), (-2, (1 << 30) + 1)),
    "top_p": ((1e-6, 1), (-0.1, 0, 1.1, np.inf, np.nan)),
    "min_p": ((0, 1), (-0.1, 1.1, np.inf, np.nan)),
    "repetition_penalty": ((0.01, 100), (0, -1, 101, np.inf, np.nan)),
}
"""Values of sampling parameters that are taken, and that are refused, wherever they are given."""


def take_argument(name, value):
    generate.main.parse(["model", f"--{name.replace('_', '-')}={value}"])


def take_package_input(name, value):
    low, high = FILTERS[name]
    if not low <= value <= high:
        raise ValueError


PLACES = {
    "command": (VALUES, take_argument),
    "request": (VALUES, lambda name, value: SamplingBody(**{name: value})),
    "task": (GenerationConfig.model_fields, lambda name, value: GenerationConfig(**{name: value})),
    "rollout": (
        RolloutConfig.model_fields,
        lambda name, value: RolloutConfig(prompts=1, **{name: value}),
    ),
    "package": (FILTERS, take_package_input),
}


@pytest.mark.parametrize(
    ("place", "name"),
    [(place, name) for place, (names, _) in PLACES.items() for name in VALUES if name in names],
)
def test_a_parameter_has_the_same_range_wherever_it_is_given(place, name):
    (taken, refused), (_, take) = VALUES[name], PLACES[place]
    for value in taken:
        take(name, value)
    for value in refused:
        with pytest.raises((ValueError, SystemExit)):
            take(name, value)


def test_a_sampling_has_the_fields_that_a_request_and_a_sampling_have_in_common():
    body = SamplingBody(top_k=-1, top_p=0.5, presence_penalty=1.5, logit_bias={3: 2.0}, n=4)
    made = Sampling.of(body, max_tokens=9, seed=7)
    wanted = {"top_p": 0.5, "presence_penalty": 1.5, "logit_bias": {3: 2.0}, "max_tokens": 9}
    assert made == Sampling(**wanted, seed=7)


KINDS = [
    Sampling(temperature=0.0),
    Sampling(seed=1),
    Sampling(seed=2, top_k=40),
    Sampling(seed=3, top_k=1200),
    Sampling(seed=4, top_p=0.5),
    Sampling(seed=5, top_p=0.99),
    Sampling(seed=6, temperature=0.7, top_k=1300, top_p=0.9, min_p=0.01),
    Sampling(seed=7, min_p=0.3),
]
"""Rows with each filter, for the test that rows do not change one another."""
SEEDS = [0, 1, -1, 2**32, 2**40 + 1, 2**63 - 1, -(2**63), 2**64 - 2]


def test_every_seed_of_64_bits_has_its_own_tokens_which_repeat():
    logits = np.zeros((64 * len(SEEDS), 1000), np.float32)
    rows = [(Sampling(seed=seed), place) for seed in SEEDS for place in range(64)]
    found = np.asarray(CHOSEN(logits, sampling.pack_settings(rows))).reshape(len(SEEDS), 64)
    again = np.asarray(CHOSEN(logits, sampling.pack_settings(rows))).reshape(len(SEEDS), 64)
    np.testing.assert_array_equal(found, again)
    assert len({row.tobytes() for row in found}) == len(SEEDS)


def test_seeds_choices_and_positions_draw_independently():
    logits = np.zeros((512, 1000), np.float32)
    by_seed, by_choice, by_position = (
        np.asarray(CHOSEN(logits, sampling.pack_settings(rows)))
        for rows in (
            [(Sampling(seed=n), 0) for n in range(512)],
            [(Sampling(choice=n), 0) for n in range(512)],
            [(Sampling(), n) for n in range(512)],
        )
    )
    for first, second in ((by_seed, by_choice), (by_seed, by_position), (by_choice, by_position)):
        assert first[0] == second[0]
        assert (first == second).mean() < 0.02
        assert scipy.stats.kstest(second, scipy.stats.randint(0, 1000).cdf).pvalue > 1e-3


def adjusted(logits, rows, history, lengths, mask=None):
    made = [None if row is None else (row, count) for row, count in rows]
    words = -(-logits.shape[1] // 32)
    if mask is None:
        mask = np.full((len(logits), words), -1, np.int32)
    settings = sampling.pack_settings([None if row is None else (row, 0) for row, _ in rows])
    return np.asarray(ADJUSTED(logits, history, lengths, settings, sampling.biases(made), mask))


def test_bias_penalties_and_mask_apply_in_the_order_of_transformers():
    vocab = 70
    logits = RNG.standard_normal((1, vocab)).astype(np.float32)
    request = Sampling(
        logit_bias={3: 1.5, 69: -2.0},
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.25,
    )
    history = np.array([[3, 5, 69, 5, 5, 8, -1, -1]], np.int32)
    mask = np.zeros((1, 3), np.int32)
    mask.view(np.uint32)[0] = [0xFFFFFFF7, 0x80000001, 0xFFFFFFFF]
    found = adjusted(logits, [(request, 3)], history, np.array([3], np.int32), mask)

    wanted = logits[0].copy()
    wanted[3] += 1.5
    wanted[69] -= 2.0
    for token in (3, 5, 8, 69):
        wanted[token] *= 1.3 if wanted[token] < 0 else 1 / 1.3
    wanted[5] -= 0.4 + 2 * 0.25
    wanted[8] -= 0.4 + 0.25
    wanted[[3, *range(33, 63)]] = -np.inf
    np.testing.assert_allclose(found[0], wanted, rtol=1e-6)


def test_a_row_without_adjustments_keeps_its_bits_beside_others():
    logits = RNG.standard_normal((3, 70)).astype(np.float32)
    logits[:2, :4] = -0.0, 0.0, -np.inf, 1e-40
    other = Sampling(logit_bias={1: 4.0}, repetition_penalty=2.0, frequency_penalty=1.0)
    history = np.tile(np.arange(70, dtype=np.int32), (3, 1))
    found = adjusted(
        logits, [(Sampling(), 5), (None, 0), (other, 5)], history, np.full(3, 10, np.int32)
    )
    np.testing.assert_array_equal(found[:2].view(np.uint32), logits[:2].view(np.uint32))
    assert (found[2] != logits[2]).all()


def test_stop_tokens_are_barred_before_min_tokens():
    request = Sampling(stop_tokens=frozenset({2, 9}), min_tokens=4, logit_bias={2: 3.0})
    logits, history = np.zeros((2, 40), np.float32), np.full((2, 1), -1, np.int32)
    found = adjusted(logits, [(request, 3), (request, 4)], history, np.zeros(2, np.int32))
    assert {*np.flatnonzero(found[0] == -np.inf)} == {2, 9}
    assert found[1, 2] == 3 and found[1, 9] == 0


@pytest.mark.parametrize(
    ("fields", "made", "wanted"),
    [
        ({"top_k": 3}, 0, False),
        ({"repetition_penalty": 1.1}, 0, True),
        ({"presence_penalty": 0.1}, 0, True),
        ({"frequency_penalty": -0.1}, 0, True),
        ({"logit_bias": {1: 1.0}}, 0, True),
        ({"grammar": "any"}, 0, True),
        ({"stop_tokens": frozenset({1}), "min_tokens": 2}, 1, True),
        ({"stop_tokens": frozenset({1}), "min_tokens": 2}, 2, False),
        ({"stop_tokens": frozenset({1})}, 0, False),
    ],
    ids=str,
)
def test_a_request_says_if_its_logits_are_adjusted(fields, made, wanted):
    assert sampling.is_adjusted(Sampling(**fields), made) is wanted


def test_logprobs_are_log_softmax_and_the_same_bits_as_chosen_and_as_likely():
    logits = RNG.standard_normal((6, 500)).astype(np.float32) * 5
    likeliest = np.argsort(-logits, 1, kind="stable")[:, :5]
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    for rank in range(5):
        own, tokens, values = LOGPROBS(logits, likeliest[:, rank].astype(np.int32), 5)
        np.testing.assert_array_equal(tokens, likeliest)
        np.testing.assert_array_equal(own, values[:, rank])
        np.testing.assert_allclose(values, np.take_along_axis(exact, likeliest, 1), atol=3e-6)
    own, tokens, values = LOGPROBS(logits, likeliest[:, 0].astype(np.int32), 0)
    assert tokens.shape == values.shape == (6, 0)
    np.testing.assert_array_equal(own, LOGPROBS(logits, likeliest[:, 0].astype(np.int32), 1)[0])


@pytest.mark.parametrize("vocab", [260, 5003])
@pytest.mark.slow
def test_a_row_has_the_same_bits_among_any_number_of_rows(vocab):
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((64, vocab)) * 3).astype(np.float32)
    rows = [(KINDS[i % len(KINDS)], i) for i in range(64)]
    choose = jax.jit(in_groups(sampling.choose, sampler.GROUP))
    report = jax.jit(in_groups(lambda x, tokens: sampling.logprobs(x, tokens, 3), sampler.GROUP))
    whole = choose(logits, sampling.pack_settings(rows))
    reported = report(logits, whole)
    assert in_groups(lambda x: x[:, :0], sampler.GROUP)(logits[:5]).shape == (5, 0)
    for size in (1, 4, 6, 16):  # the rows before are the same, those behind are not there
        tokens = choose(logits[:size], sampling.pack_settings(rows[:size]))
        assert (np.asarray(tokens) == np.asarray(whole[:size])).all()
        for part, other in zip(report(logits[:size], tokens), reported, strict=True):
            assert np.asarray(part).tobytes() == np.asarray(other[:size]).tobytes()
