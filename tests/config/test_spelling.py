import time

import pytest

from maxstack.config.compose import presets_dir
from maxstack.config.spelling import did_you_mean, edits, nearest

MODELS = sorted(file.stem for file in (presets_dir() / "models").glob("*.yml"))


@pytest.mark.parametrize(
    ("a", "b", "number"),
    [
        ("", "", 0),
        ("", "abc", 3),
        ("lama", "llama", 1),
        ("trian", "train", 1),
        ("kitten", "sitting", 3),
        ("ca", "abc", 3),
    ],
)
def test_edits_are_counted_with_swaps_of_neighbours(a, b, number):
    assert edits(a, b) == edits(b, a) == number


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lama-3.1-8b", "llama-3.1-8b"),
        ("lama-3.2-1b", "llama-3.2-1b"),
        ("llama31-8b", "llama-3.1-8b"),
        ("LLAMA-3.1-8B", "llama-3.1-8b"),
        ("mixtral-7x8b", "mixtral-8x7b"),
        ("mistral-7b", "mistral-7b-v0.1"),
        ("qwen3-8", "qwen3-8b"),
        ("gpt-2", "gpt2"),
        ("gemma2-9b", "gemma-2-9b"),
    ],
)
def test_the_nearest_preset_is_the_one_that_was_meant(typed, meant):
    assert nearest(typed, MODELS) == [meant]


@pytest.mark.parametrize(
    ("typed", "words", "meant"),
    [
        ("lr", ["learning_rate", "weight_decay"], ["learning_rate"]),
        ("beta2", ["eps", "b1", "b2"], ["b2"]),
        ("int9", ["int4", "fp8", "int8"], ["int8"]),
        ("fp4", ["nf4", "fp8"], ["fp8"]),
        ("wholly other", ["nf4", "fp8"], []),
    ],
)
def test_ties_fall_to_the_longer_start_and_short_forms_to_what_they_shorten(typed, words, meant):
    assert nearest(typed, words) == meant


def test_a_megabyte_is_near_nothing_and_costs_nothing():
    start = time.process_time()
    assert did_you_mean("x" * 1_000_000, ["x" * 900_000, "steps"]) == ""
    assert time.process_time() - start < 0.1
