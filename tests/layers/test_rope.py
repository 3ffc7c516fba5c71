"""Frequencies of every scaling against hand-computed numbers, and what the rotation keeps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest

from maxstack.layers.rope import attention_factor, frequencies, rope_table, rotate
from maxstack.schema.mixers import AttentionConfig, RopeConfig

PLACES = jnp.arange(12)[None]


def rope(**fields):
    return RopeConfig.model_validate(fields)


def scaled(head_dim=8, fraction=1.0, **scaling):
    """Divisors of the plain frequencies; theta 10^4 gives 1, 0.1, 0.01, 0.001 for a head of 8."""
    plain = frequencies(rope(fraction=fraction), head_dim)[0]
    return [
        plain / rates for rates in frequencies(rope(fraction=fraction, scaling=scaling), head_dim)
    ]


def test_the_first_pair_turns_by_one_radian_a_position_and_the_others_in_a_geometric_series():
    np.testing.assert_allclose(frequencies(rope(), 8)[0], [1, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(frequencies(rope(theta=16.0, fraction=0.5), 8)[0], [1, 0.25])


def test_linear_divides_every_frequency():
    np.testing.assert_allclose(scaled(kind="linear", factor=8.0)[0], [8] * 4)


def test_proportional_keeps_the_spacing_of_the_whole_head_and_stops_the_rest():
    cfg = rope(fraction=0.5, scaling={"kind": "proportional", "factor": 2.0})
    np.testing.assert_allclose(frequencies(cfg, 8)[0], [0.5, 0.05, 0, 0])


def test_llama3_keeps_short_wavelengths_divides_long_ones_and_blends_between():
    turns = (
        126 / (2 * math.pi) * 0.1
    )  # the pairs turn 20, 2, 0.2 and 0.02 times in the original length
    kept = (turns - 1) / (4 - 1)
    got = scaled(kind="llama3", factor=8.0, original_length=126)[0]
    np.testing.assert_allclose(got, [1, 1 / (kept + (1 - kept) / 8), 8, 8], rtol=1e-9)


def test_yarn_blends_by_the_number_of_turns_in_the_original_length():
    given = {
        "kind": "yarn",
        "factor": 4.0,
        "original_length": 628,
        "beta_fast": 30.0,
        "beta_slow": 0.3,
    }  # 100, 10, 1, 0.1 turns
    low, high = (math.log10(99.95 / turns) for turns in (30.0, 0.3))
    kept = [1 - min(max((i - low) / (high - low), 0), 1) for i in range(4)]
    np.testing.assert_allclose(
        scaled(**given, truncate=False)[0], [1 / (k + (1 - k) / 4) for k in kept], rtol=1e-4
    )
    np.testing.assert_allclose(
        scaled(**given)[0], [1, 1 / (2 / 3 + 1 / 12), 1 / (1 / 3 + 1 / 6), 4], rtol=1e-6
    )


YARN = {"kind": "yarn", "factor": 40.0, "original_length": 4096}
LONGROPE = {"kind": "longrope", "original_length": 4096, "short_factor": [1], "long_factor": [1]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (YARN, 1.3688879454),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, 1.3688879454 / 1.1844439727),
        (YARN | {"attention_factor": 1.5}, 1.5),
        (YARN | {"factor": 0.5}, 1.0),
        (LONGROPE | {"factor": 32.0}, 1.1902380714),
        (LONGROPE, 1.0),
        ({"kind": "linear", "factor": 8.0}, 1.0),
    ],
)
def test_the_attention_factor_multiplies_cosines_and_sines(given, expected):
    cfg = rope(scaling=given)
    assert attention_factor(cfg) == pytest.approx(expected, rel=1e-9)
    cos, sin = rope_table(cfg, PLACES, None, 2)
    np.testing.assert_allclose(np.hypot(cos, sin), expected, rtol=1e-5)


LONG = rope(
    fraction=0.5,
    scaling={
        "kind": "longrope",
        "short_factor": [1, 2],
        "long_factor": [4, 8],
        "original_length": 5,
    },
)


def test_longrope_takes_the_list_of_each_documents_own_length():
    segments = jnp.asarray([[1] * 5 + [2] * 6 + [0], [3] * 6 + [4] * 6])
    places = jnp.asarray([[*range(5), *range(6), 0], [*range(6), *range(6)]])
    cos, sin = rope_table(LONG, places, segments, 8)
    divisor = np.array([[1] * 5 + [4] * 6 + [1], [4] * 12])
    np.testing.assert_allclose(cos[:, :, 0, 0], np.cos(places / divisor), atol=1e-6)
    np.testing.assert_allclose(sin[:, :, 0, 1], np.sin(places * 0.01 / (2 * divisor)), atol=1e-6)


def test_longrope_without_segments_counts_the_row():
    def divisors(length):
        cos, sin = rope_table(LONG, jnp.arange(length)[None], None, 8)
        return 1 / jnp.arctan2(sin, cos)[0, 1, 0]

    np.testing.assert_allclose(divisors(5), [1, 2 / 0.01], rtol=1e-5)
    np.testing.assert_allclose(divisors(6), [4, 8 / 0.01], rtol=1e-5)


def test_longrope_lists_of_another_length_than_the_rotated_pairs_are_refused():
    with pytest.raises(
        pydantic.ValidationError,
        match="hold 2 and 2 divisors; head_dim=16 with fraction=0.5 rotates 4 pairs",
    ):
        AttentionConfig(kind="attention", heads=2, head_dim=16, rope=LONG)


def turned(cfg, x, head_dim=8, places=PLACES):
    return np.asarray(rotate(jnp.asarray(x), rope_table(cfg, places, None, head_dim), cfg))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pair_is_a_complex_number_times_a_turn(interleaved):
    x = np.random.default_rng(0).normal(size=(1, 12, 3, 8)).astype(np.float32)
    y = turned(rope(interleaved=interleaved), x)
    pairs = [
        z[..., 0::2] + 1j * z[..., 1::2] if interleaved else z[..., :4] + 1j * z[..., 4:]
        for z in (x, y)
    ]
    angle = np.arange(12)[None, :, None, None] * np.array([1, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(pairs[0] * np.exp(1j * angle), pairs[1], atol=1e-5)


def test_a_compiled_program_computes_its_cosines_once():
    """Every fusion that reads them would compute them again."""

    def turned(xs):
        table = rope_table(rope(), jnp.arange(64)[None], None, 8)
        return [rotate(x, table, rope()) for x in xs]

    heads = [jnp.ones((1, 64, count, 8)) for count in (1, 2, 3)]
    text = jax.jit(turned).lower(heads).compile().as_text()
    assert text.count(" cosine(") == text.count(" sine(") == 1
