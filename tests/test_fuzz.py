"""Whatever comes to a parser from outside, it gives a value or refuses, soon and in little memory.

`make test` breaks valid inputs some times each; a release for ten minutes each, or for
MAXSTACK_FUZZ_SECONDS."""

import json
import os
import resource
import time

import broken_inputs
import hypothesis
import pytest
from hypothesis import strategies as st

from maxstack.errors import ConfigError, DataError
from maxstack.inference.server.refusal import Refusal
from maxstack.package.loader import PackageError

TIMES = 12
"""Inputs of a target in `make test`."""
SECONDS = float(os.environ.get("MAXSTACK_FUZZ_SECONDS", "600"))
SLOWEST, LARGEST = 5.0, 512 << 10
"""Processor seconds and KiB of memory that an input may take."""


FOUND = (
    ("record", 0, ("conversations", 0, "from"), []),
    ("tokenizer", 0, ("model", "merges", 0), ["b", "b"]),
    ("tokenizer", 0, ("model", "vocab", "b"), 10**9),
    ("tokenizer", 1, ("model", "unk_id"), None),
    ("package", 0, ("devices",), -1),
    ("package", 0, ("files",), []),
    ("package", 0, ("files", "weights/1.safetensors", "bytes"), "1"),
    ("package", 0, ("good_until",), 0),
    ("package", 0, ("weights", "kernel", "file"), 0),
    ("package", 0, ("weights", "kernel", "file"), "a" * 5000),
    ("model", 0, ("vocab_size",), 10**99),
    ("adapter", 0, ("lora_alpha",), 10**99),
)
"""What ended a parser with another error, or took memory: the target, the number of its valid
input, and the value at a place in it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def valid(target, folder):
    if target == "package" and not (folder / "manifest.json").exists():
        broken_inputs.SEEDS["package"] = lambda: broken_inputs._packages(folder)
    return broken_inputs.seeds(target)


def check(target, data, folder):
    """It gives a value or an error for people, within its bounds."""
    began, most = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        broken_inputs.PARSERS[target](data, folder)
    except (ConfigError, DataError, Refusal, PackageError) as error:
        assert str(error) or isinstance(error, Refusal)
    except Exception as error:
        if target != "picture":  # whose caller takes whatever Pillow raises
            raise
        assert not isinstance(error, MemoryError)
    assert time.process_time() - began < SLOWEST
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < LARGEST


def fuzz(target, folder, times, seed):
    inputs = broken_inputs.broken(valid(target, folder))

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=times,
        deadline=None,
        database=None,
        suppress_health_check=[*hypothesis.HealthCheck],
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(st.data())
    def one(drawn):
        data = drawn.draw(inputs)
        hypothesis.note(repr(data[:2000]))
        check(target, data, folder)

    one()


@pytest.mark.parametrize("target", broken_inputs.PARSERS)
def test_broken_input_gives_a_value_or_an_error(target, folder):
    fuzz(target, folder, TIMES, seed=1)


@pytest.mark.parametrize(("target", "number", "place", "value"), FOUND)
def test_what_was_found_once_is_refused(target, number, place, value, folder):
    tree = inner = json.loads(valid(target, folder)[number])
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises((ConfigError, DataError, PackageError)):
        broken_inputs.PARSERS[target](json.dumps(tree).encode(), folder)


@pytest.mark.release
@pytest.mark.parametrize("target", broken_inputs.PARSERS)
def test_broken_input_gives_a_value_or_an_error_for_minutes(target, folder):
    end, seed = time.monotonic() + SECONDS, time.time_ns()
    while time.monotonic() < end:
        seed += 1
        fuzz(target, folder, 500, seed)
