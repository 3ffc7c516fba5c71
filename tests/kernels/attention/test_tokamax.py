"""The tokamax backend: what it refuses, and what its kernels mean, computed by tokamax's CPU
implementation."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxstack.kernels import tokamax as library
from maxstack.kernels.attention import reference, tokamax
from maxstack.kernels.attention.request import AttentionCase, Inputs, Request
from maxstack.kernels.backends import Device

H100, A100, TPU = (
    Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0)),
    Device("gpu", "NVIDIA A100", (8, 0)),
    Device("tpu", "TPU v5p"),
)
CASE = AttentionCase(Request(0.1), 256, 256, 4, 2, 128, 128, "bfloat16", False, False, H100)


@pytest.fixture
def installed(monkeypatch):
    """tokamax played as installed, and the process ran on the case's device."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(library, "elsewhere", lambda device: None)


def test_a_missing_package_is_told_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert tokamax.supports(CASE) == "tokamax is not installed; pip install tokamax"


def test_a_process_without_the_device_cannot_compile_for_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "looks at the cpu of this process" in tokamax.supports(CASE)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, None),
        ({"device": A100}, None),
        ({"device": TPU}, None),
        ({"request": Request(0.1, window=100, soft_cap=30.0)}, None),
        ({"packed": True}, "dense mask"),
        ({"sinks": True}, "no sinks"),
        ({"request": Request(0.1, offset=8)}, "offset 8"),
        ({"keys": 512}, "512 keys"),
        ({"dtype": "float32"}, "bfloat16 would do"),
        ({"head_dim": 192}, "head_dim 192"),
        ({"queries": 200, "keys": 200}, "multiple of 128"),
        ({"device": TPU, "request": Request(0.1, window=100)}, "no window"),
        ({"device": A100, "request": Request(0.1, soft_cap=30.0)}, "soft cap"),
        ({"device": dataclasses.replace(A100, capability=(7, 5))}, "compute capability 8.0"),
    ],
)
def test_reasons_name_what_tokamax_cannot_do(installed, changes, reason):
    found = tokamax.supports(dataclasses.replace(CASE, **changes))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    "request_",
    [Request(0.1, window=5), Request(0.1, window=5, soft_cap=2.0, causal=False)],
    ids=str,
)
def test_values_and_gradients_are_the_reference_s(request_):
    pytest.importorskip(
        "tokamax", reason="tokamax is an optional package, installed by pip install tokamax"
    )
    q, k, v = (
        jax.random.normal(key, (2, 16, n, 8))
        for key, n in zip(jax.random.split(jax.random.key(0), 3), (4, 2, 2), strict=True)
    )

    def with_gradients(run, **options):
        o, pull = jax.vjp(lambda *x: run(Inputs(*x), request_, **options), q, k, v)
        return o, *pull(jnp.cos(o))

    for ours, theirs in zip(
        with_gradients(tokamax.run, implementation="xla_chunked"),
        with_gradients(reference.run),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
