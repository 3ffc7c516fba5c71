import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxstack.config.compose import plain
from maxstack.config.reader import read_yaml
from maxstack.config.writer import inline, write_yaml

TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from(["on", "012", "1e-4", "null", "", "a: b", "- x", "2%", "1_0", "~"]),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), TEXT
)
DATA = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(TEXT.filter(bool), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(TEXT.filter(bool), DATA, min_size=1, max_size=4))
@pytest.mark.slow
def test_block_style_reads_back_unchanged(data):
    assert (
        plain(read_yaml("".join(f"{line}\n" for line, _ in write_yaml(data)), "file.yml")) == data
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-6, "1e-06"),
        (math.inf, ".inf"),
        ("off", '"off"'),
        ("bfloat16", "bfloat16"),
        ("a b", "a b"),
        ([], "[]"),
    ],
)
def test_values_are_written_as_a_person_would(value, text):
    assert inline(value) == text
