"""The assembled step: the same numbers on any mesh and under accumulation, where the arrays lie,
and what the compiler says."""

import jax
import numpy as np
import pytest
import tiers
import tiny

FSDP_TENSOR = {"data": 2, "fsdp": 2, "tensor": 2}
ONE_LAYER = tiny.model(layers=1, pattern=["local"])


@pytest.mark.slow
def test_a_known_bad_mesh_makes_xla_say_that_it_rematerializes_what_was_sharded(capfd):
    """No mesh of test_meshes.py does."""
    mesh = FSDP_TENSOR | {"rules": {"embed": ["fsdp", "tensor"]}}
    run = tiny.make_run(tiny.config(mesh=mesh), 8)
    run.step.lower(run.abstract, run.batches.abstract()).compile(
        compiler_options={"xla_backend_optimization_level": 0}
    )
    assert "Involuntary full rematerialization" in capfd.readouterr().err


@pytest.mark.parametrize("dtype", tiers.of(["bfloat16", "float16"], "bfloat16"))
@pytest.mark.parametrize(
    "optimizer",
    [{"ema": {"decay": 0.9}}, {"chain": [{"kind": "sgd", "momentum": 0.9}], "learning_rate": 0.3}],
    ids=str,
)
@pytest.mark.slow
def test_weights_in_half_precision_are_trained_and_stay_so_with_optimizer_state_in_float32(
    dtype, optimizer
):
    run = tiny.make_run(tiny.config(model=ONE_LAYER | {"param_dtype": dtype}, optimizer=optimizer))
    state, placed, losses = run.init(), run.batches.place(tiny.batch(run.cfg), 8), []
    for _ in range(20):
        state, scalars = run.step(state, placed)
        losses.append(float(scalars["loss"]))
    assert losses[-1] < losses[0] - 0.5 and np.isfinite(losses).all()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {dtype}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.opt) if leaf.ndim} == {"float32"}


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.slow
def test_one_microbatch_of_eight_rows_equals_eight_of_one(devices):
    one, eight = (
        tiny.make_run(
            tiny.config(
                model=ONE_LAYER,
                train={"batch_size": 8 * devices, "accumulate": accumulate, "steps": 5},
                objective={"z_loss": 1e-3},
                optimizer={"learning_rate": 1.0, "chain": [{"kind": "sgd"}]},
            ),
            devices,
        )
        for accumulate in (1, 8)
    )
    ((_, params, *_), whole), ((_, parts, *_), split) = (
        run.step(one.init(), run.batches.place(tiny.batch(run.cfg), 8 * devices))
        for run in (one, eight)
    )
    for name in whole:
        np.testing.assert_allclose(whole[name], split[name], rtol=2e-6, err_msg=name)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_the_weights_of_a_row_do_not_count_where_the_mask_is_zero():
    cfg = tiny.config()
    run, data = tiny.make_run(cfg), tiny.batch(cfg)
    changed = data | {"targets": np.where(data["mask"] > 0, data["targets"], 0)}
    losses = [
        float(run.step(run.init(), run.batches.place(rows, 8))[1]["loss"])
        for rows in (data, changed)
    ]
    assert losses[0] == losses[1]


def test_weights_and_optimizer_state_are_made_in_shards():
    run = tiny.make_run(tiny.config(mesh=FSDP_TENSOR), 8)
    state = run.init()
    query = state.params["blocks"]["local"]["mixer"]["query"]
    wanted = jax.sharding.NamedSharding(
        run.mesh, jax.sharding.PartitionSpec(None, "fsdp", "tensor", None)
    )
    assert query.sharding.is_equivalent_to(wanted, query.ndim)
    assert query.addressable_shards[0].data.size == query.size // 4
    moments = [leaf for leaf in jax.tree.leaves(state.opt) if leaf.shape == query.shape]
    assert moments and all(
        leaf.sharding.is_equivalent_to(query.sharding, query.ndim) for leaf in moments
    )


@pytest.mark.slow
def test_initial_weights_do_not_depend_on_the_mesh():
    one, eight = (
        tiny.make_run(tiny.config(mesh=mesh), n).init()
        for mesh, n in (({}, 1), ({"data": 1, "fsdp": 8}, 8))
    )
    for ours, theirs in zip(
        jax.tree.leaves(one.params), jax.tree.leaves(eight.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_bfloat16_compute_keeps_float32_weights_and_loss():
    run = tiny.make_run(tiny.config(model=ONE_LAYER | {"dtype": "bfloat16"}))
    state, scalars = run.step(run.init(), run.batches.place(tiny.batch(run.cfg), 8))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    assert scalars["loss"].dtype == np.float32
    text = run.step.lower(run.abstract, run.batches.abstract()).as_text()
    assert "dot_general" in text and "tensor<384x32xbf16>" in text


@pytest.mark.slow
def test_padding_after_a_document_reaches_no_expert_and_attention_asks_for_no_segments():
    moe = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 16, "router": {"balance_loss": 0.1}}
    layer = ONE_LAYER["blocks"]["local"] | {"mlp": moe}
    cfg = tiny.config(
        model=ONE_LAYER | {"pattern": ["local"], "blocks": {"local": layer}},
        data={"packing": "none"},
    )
    run, data = tiny.make_run(cfg), tiny.batch(cfg)
    assert [choice.case.packed for choice in run.kernels if choice.op == "attention"] == [False]
    real = np.arange(48) < np.arange(3, 43, 5)[:, None]
    rows = data | {"segments": real.astype(np.int32), "mask": data["mask"] * real}
    changed = rows | {"tokens": np.where(real, rows["tokens"], 7)}
    (_, before), (_, after) = (
        run.step(run.init(), run.batches.place(given, 8)) for given in (rows, changed)
    )
    assert {name: float(value) for name, value in before.items()} == pytest.approx(
        {name: float(value) for name, value in after.items()}, rel=1e-6
    )
    (_, without) = run.step(
        run.init(), run.batches.place(changed | {"segments": np.ones_like(rows["segments"])}, 8)
    )
    assert without["expert_load"] != after["expert_load"]
