"""cuDNN as a backend: all that it would get wrong without saying so is refused, and what is
accepted reaches it as it was asked."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest

from maxstack.kernels.attention import cudnn
from maxstack.kernels.attention.request import AttentionCase, Inputs, Request
from maxstack.kernels.backends import Device

H100 = Device("gpu", "NVIDIA H100", (9, 0))
LLAMA = AttentionCase(Request(0.25), 4096, 4096, 32, 8, 128, 128, "bfloat16", False, False, H100)
REFUSED = {
    "cpu has compute capability 0.0": {"device": Device("cpu", "cpu")},
    "8.0": {"device": Device("gpu", "Tesla V100", (7, 0))},
    "RTX 5090 has compute capability 12.0": {"device": Device("gpu", "RTX 5090", (12, 0))},
    "float32": {"dtype": "float32"},
    "documents": {"packed": True},
    "chunks": {"request": Request(0.25, chunk=512)},
    "soft_cap 30": {"request": Request(0.25, soft_cap=30.0)},
    "sinks": {"sinks": True},
    "without a causal mask": {"request": Request(0.25, window=512, causal=False)},
    "scale": {"request": Request(0.0)},
    "from position 1": {"request": Request(0.25, offset=1)},
    "4096 causal queries of 8192": {"keys": 8192},
    "4000 queries": {"queries": 4000, "keys": 4000},
    "4032 keys": {"keys": 4032, "request": Request(0.25, causal=False)},
    "value_dim 64": {"value_dim": 64},
    "head_dim 192": {"head_dim": 192, "value_dim": 192},
    "head_dim 100": {"head_dim": 100, "value_dim": 100},
    "32 heads": {"kv_heads": 5},
}
SERVED = {
    "causal": {},
    "window": {"request": Request(0.25, window=512)},
    "all": {"request": Request(0.25, causal=False)},
    "cross": {"request": Request(0.25, causal=False), "keys": 8192},
    "narrow": {"head_dim": 64, "value_dim": 64, "kv_heads": 1},
    "a100": {"device": Device("gpu", "NVIDIA A100", (8, 0))},
    "b200": {"device": Device("gpu", "NVIDIA B200", (10, 0))},
}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(cudnn, "missing", lambda: None)


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cudnn_cannot_do_right_is_refused_with_the_reason(reason):
    assert reason in cudnn.supports(dataclasses.replace(LLAMA, **REFUSED[reason]))


@pytest.mark.parametrize("name", SERVED)
def test_what_cudnn_can_do_is_accepted(name):
    assert cudnn.supports(dataclasses.replace(LLAMA, **SERVED[name])) is None


@pytest.mark.parametrize(
    "request_, mask, window",
    [
        (Request(0.25), "CAUSAL", 0),
        (Request(0.25, window=17), "CAUSAL", 17),
        (Request(0.25, window=1), "CAUSAL", 1),
        (Request(0.25, window=999), "CAUSAL", 0),
        (Request(0.25, causal=False), "NO_MASK", 0),
    ],
)
def test_mask_scale_and_window_reach_both_kernels(request_, mask, window, monkeypatch):
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000
    )
    q, k = (jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))

    def step(q, k, v):
        o, back = jax.vjp(lambda q, k, v: cudnn.run(Inputs(q, k, v), request_), q, k, v)
        return o, back(o)

    text = jax.jit(step).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r'@(__cudnn\$\w+)\(([^)]*)\) \{.*?backend_config = "(\{.*?\})", ', text)
    assert [(target, operands.count("%")) for target, operands, _ in calls] == [
        ("__cudnn$fmhaSoftmax", 3),
        ("__cudnn$fmhaSoftmaxBackward", 6),
    ]
    for _, _, config in calls:
        found = json.loads(config.replace("\\22", '"'))["cudnn_fmha_backend_config"]
        # the window counts the query itself, and 0 is none:
        # jax/_src/cudnn/fused_attention_stablehlo.py
        assert (
            found["mask_type"],
            found["fmha_scale"],
            found["sliding_window_length"],
            found["dropout_rate"],
        ) == (mask, 0.25, window, 0)
    assert "x256x256x" not in text  # no mask or bias of queries by keys
