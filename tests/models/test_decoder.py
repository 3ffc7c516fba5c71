"""The decoder against an independent numpy model, its pattern, and what each remat policy keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from maxstack.models.model import abstract, initial
from maxstack.schema.decoder import DecoderConfig


def build(**changes):
    cfg = DecoderConfig.model_validate(tiny.model(**changes))
    return nnx.merge(
        abstract(cfg)[0], nnx.State(initial(cfg, 0))
    )  # not jitted: one compilation a shape instead of one a weight


def test_the_pattern_repeats_after_the_prefix_until_the_layers_are_used_up():
    cfg = DecoderConfig.model_validate(
        tiny.model(layers=8, pattern=["local", "local", "global"], prefix=["global"])
    )
    assert cfg.order == ("global", *("local", "local", "global") * 2, "local")


@pytest.mark.slow
def test_unrolling_the_scan_changes_no_value():
    data = {name: jnp.asarray(x) for name, x in tiny.batch(tiny.config()).items()}
    outs = [
        nnx.jit(lambda model, data: model.hidden(data))(build(layers=6, unroll=n), data)
        for n in (1, 3)
    ]
    np.testing.assert_allclose(*outs, atol=1e-5)


@functools.cache
def kept(policy, names=()):
    """How many matmuls the forward and backward pass hold together, and the text of their jaxpr."""
    cfg = DecoderConfig.model_validate(
        tiny.model(layers=2, remat={"policy": policy, "names": list(names)})
    )
    graph, state = abstract(cfg)
    data = {name: jnp.asarray(x) for name, x in tiny.batch(tiny.config()).items()}
    text = str(jax.make_jaxpr(jax.grad(lambda s: nnx.merge(graph, s).hidden(data).sum()))(state))
    return text.count("dot_general["), text


@pytest.mark.slow
def test_remat_none_recomputes_nothing_and_full_recomputes_every_matmul():
    none, text = kept("none")
    full, full_text = kept("full")
    assert "remat" not in text and "checkpoint" not in text
    assert "remat" in full_text or "checkpoint" in full_text
    assert full > none


@pytest.mark.slow
def test_dots_recompute_no_matmul_that_full_does():
    assert kept("none")[0] <= kept("dots")[0] <= kept("dots_no_batch")[0] <= kept("full")[0]
    assert kept("dots")[0] < kept("full")[0]


@pytest.mark.parametrize(
    "name", ["query", "key", "value", "context", "mixer_out", "mlp_gate", "mlp_up", "mlp_out"]
)
def test_saving_a_tensor_by_name_recomputes_less_than_full(name):
    count, text = kept("save", (name,))
    assert f"name={name}" in text
    assert count <= kept("full")[0]
    if name not in ("mlp_out", "context"):
        assert count < kept("full")[0]


def test_offload_moves_the_named_tensor_to_host_memory():
    _, text = kept("offload", ("mlp_gate",))
    assert "pinned_host" in text or "<host>" in text
