"""Every family computes what transformers computed: logits and gradients of golden models with
noise on every parameter."""

import parity
import pytest
import tiers

EVERY_KIND = (
    "gpt2",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "mixtral",
    "olmo2",
    "gemma4_per_layer",
    "phi3",
)
"""A family of each structural kind but chunks and the gated delta rule, which take longest."""
OTHERS = {*parity.FAMILIES} - {*EVERY_KIND, "qwen3_5_moe", "gemma4_moe"}
"""All but two whose mixers and experts are those of others."""


@pytest.mark.parametrize("family", tiers.of(parity.FAMILIES, *EVERY_KIND, slow=OTHERS))
def test_logits_and_gradients_are_those_of_transformers(family):
    found = parity.measure(parity.GOLDENS / family)
    assert found.argmax and found.logits <= parity.LOGITS and found.gradient <= parity.GRADIENT, (
        found
    )
