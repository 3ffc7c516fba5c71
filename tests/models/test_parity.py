"""Every family computes what transformers computed: logits and gradients of golden models with noise on every parameter."""

import parity
import pytest


@pytest.mark.parametrize("family", parity.FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(family):
    found = parity.measure(parity.GOLDENS / family)
    assert found.argmax and found.logits <= parity.LOGITS and found.gradient <= parity.GRADIENT, found
