"""Programs of inference for hardware that is not here."""

import jax
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec
from topologies import needs

from maxstack import sharding
from maxstack.inference.adapters import Adapters
from maxstack.inference.layout import Layout
from maxstack.inference.page_cache import Limits
from maxstack.inference.programs import Programs, cache_shardings, inference_config
from maxstack.plan import topology
from maxstack.run import assemble

LATENTS = {"kind": "mla", "heads": 4, "kv_lora": 128, "q_lora": 32, "nope_dim": 32, "rope_dim": 16}
MIXERS = {
    "head_dim 64": ({"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 64}, 2),
    "head_dim 128": ({"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 128}, 1),
    "latents of 144": (LATENTS | {"value_dim": 32}, 256 / 144),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs("v5e:1x1")) for name in MIXERS])
def test_a_step_on_a_tpu_writes_pages_in_place_which_take_as_many_bytes_as_plan_counts(name):
    mixer, longer = MIXERS[name]
    block = {"mixer": mixer, "mlp": {"kind": "gated", "hidden": 64}}
    model = tiny.model(layers=1, pattern=["block"], dtype="bfloat16", blocks={"block": block})
    cfg = inference_config(tiny.config(model=model, mesh={"fsdp": 1}))
    where = topology.parse("v5e:1x1")
    mesh = sharding.make_mesh(cfg.mesh, where.devices())
    layout = Layout.of(cfg.model, cfg.serve, where.platform)
    limits = Limits(rows=64, page=16, pages=((1 << 14) - 1,), requests=8)
    run = assemble(cfg, mesh, trains=False)
    programs = Programs(run, layout, limits, 512, Adapters())
    cache = jax.eval_shape(programs.empty)

    def placed(x, where=NamedSharding(mesh, PartitionSpec())):  # noqa: B008
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    params = jax.eval_shape(lambda x: programs.prepare(x, keep=True), run.abstract.params)
    given = jax.tree.map(placed, params), jax.tree.map(placed, cache, cache_shardings(run, layout))
    rows, (table,) = jax.tree.map(placed, programs.batch([])[0])
    programs._layers._split(programs._model(given[0]))
    ((_, layer, weights),) = programs._layers._layers
    inputs = programs._layers._inputs
    x, context, (extra,) = jax.tree.map(
        placed, jax.eval_shape(inputs, programs._layers.weights, rows)
    )
    compiled = layer.lower(weights, given[1][0], table, x, context, rows, extra).compile()
    memory = compiled.memory_analysis()
    counted = (1 << 14) * limits.page * layout.token_bytes(0)
    assert counted == sum(x.size * 2 for x in jax.tree.leaves(cache)) * longer
    # The residual stream too, in whole tiles.
    assert counted < memory.alias_size_in_bytes <= counted + (1 << 13)
    assert memory.temp_size_in_bytes < counted / 4
