"""Updates of weights in bfloat16: rounded to the nearest, or by chance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxstack import cli, train
from maxstack.errors import ConfigError
from maxstack.load import load
from maxstack.optim import rounding

KEY = jax.random.key(3)


def test_rounding_by_chance_is_right_on_average_and_exact_where_nothing_is_lost():
    wide = jnp.full(40_000, 1 + 2**-9, jnp.float32)  # a quarter of the way to 1 + 2**-7
    found = rounding.to_bfloat16(wide, KEY).astype(jnp.float32)
    assert {*np.unique(found).tolist()} == {1.0, 1 + 2**-7}
    assert float(jnp.mean(found > 1)) == pytest.approx(0.25, abs=0.01)
    kept = jnp.array([1.5, -2.0, 0.0, jnp.inf, -jnp.inf, jnp.nan, 3.3895314e38], jnp.float32)
    np.testing.assert_array_equal(rounding.to_bfloat16(kept, KEY).astype(jnp.float32), kept)


def test_small_updates_add_up_by_chance_alone():
    weights, updates = {"w": jnp.ones(4000, jnp.bfloat16)}, {"w": jnp.full(4000, 1e-4)}
    means = {}
    for kind in ("nearest", "stochastic"):
        moved = weights
        for step in range(200):
            moved = rounding.apply_updates(moved, updates, kind, jax.random.fold_in(KEY, step))
        means[kind] = float(moved["w"].astype(jnp.float32).mean())
    assert means["nearest"] == 1
    assert means["stochastic"] == pytest.approx(1.02, abs=2e-3)


def test_a_mesh_draws_the_same():
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    wide = jax.random.normal(KEY, (64, 16))
    apart = jax.device_put(wide, NamedSharding(mesh, PartitionSpec("fsdp")))
    for given in (wide, apart):
        found = jax.jit(rounding.to_bfloat16)(given, KEY)
        np.testing.assert_array_equal(found, rounding.to_bfloat16(wide, KEY))


def test_weights_that_stand_still_are_told_with_their_share(tmp_path, capsys):
    cfg = tiny.config(
        model=tiny.model(**tiny.ONE_KIND, param_dtype="bfloat16"),
        optimizer={"learning_rate": 1e-5, "schedule": None},
        train={"steps": 21},
    )
    path, shares = str(tiny.write(tmp_path, cfg)), {}
    for kind in ("nearest", "stochastic"):
        words = f"run.output_dir={tmp_path}", f"run.name={kind}", "run.trackers=[]"
        more = f"optimizer.rounding={kind}", "run.compilation_cache=null"
        assert cli.run(train.main, [path, *words, *more]) == 0
        rows = [row for row in tiny.metrics(tmp_path / kind) if "weights_still" in row]
        shares[kind] = np.mean([row["weights_still"] for row in rows[-20:]])
        out = capsys.readouterr().out
        said = f"{shares[kind]:.0%} of the weights in bfloat16 did not change in a step"
        assert (said in out) == (kind == "nearest")
    assert 0.5 < shares["stochastic"] < shares["nearest"] - 0.01


def test_there_is_nothing_to_round_by_chance_in_float32(tmp_path):
    path = tiny.write(tmp_path, tiny.config())
    with pytest.raises(ConfigError, match=r"stochastic is for weights in bfloat16"):
        load(path, ["optimizer.rounding=stochastic"])
