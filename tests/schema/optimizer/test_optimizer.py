"""The shipped optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_trees import INFO, first, tree

from maxstack.config.compose import plain, presets_dir, read_file
from maxstack.optim import build, learning_rate_at
from maxstack.schema.optimizer import OptimizerConfig, schedule_faults

PRESETS = sorted(path.stem for path in (presets_dir() / "optimizers").glob("*.yml"))


def preset(name):
    return OptimizerConfig(**plain(read_file(presets_dir() / "optimizers" / f"{name}.yml")))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_preset_updates_models_with_and_without_a_head(name, tied):
    of = {key: leaf for key, leaf in INFO.items() if not tied or key != "head"}
    tx = build(preset(name), 100, of)

    def step(params):
        updates, state = tx.update(
            params, tx.init(params), params, value=jnp.float32(1.0), grad=params
        )
        return updates

    assert jax.eval_shape(step, tree(of)) == jax.eval_shape(lambda params: params, tree(of))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("steps", [2, 10, 100_000])
def test_every_preset_has_a_rate_for_short_and_long_runs(name, steps):
    assert list(schedule_faults(preset(name), steps)) == []
    rates = [
        float(learning_rate_at(preset(name), steps)(step)) for step in {0, steps // 2, steps - 1}
    ]
    assert all(np.isfinite(rates)) and max(rates) > 0


def test_the_adamw_preset_is_the_default():
    assert preset("adamw") == OptimizerConfig()


def test_the_muon_preset_orthogonalises_matrices_of_blocks_and_nothing_else():
    state = jax.eval_shape(build(preset("muon"), 100, INFO).init, tree(INFO))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    second_moments = {path for path in paths if ".nu[" in path}
    of_matrices = [path for path in paths if "group_0" in path]
    assert not [path for path in second_moments if "group_0" in path]
    assert all(word in str(of_matrices) for word in ("query", "out", "gate", "down"))
    assert all(
        word in str(second_moments)
        for word in ("query_bias", "mixer_norm", "embed", "head", "norm")
    )
    assert not [
        path
        for path in of_matrices
        if "embed" in path or "head" in path or "bias" in path or "scale" in path
    ]


def test_the_learning_rate_of_a_preset_scales_all_its_updates():
    changed = preset("muon").model_dump() | {"learning_rate": 2e-3}
    small, large = (
        first(
            build(OptimizerConfig(**(config | {"schedule": None})), 100, INFO),
            tree(INFO),
            tree(INFO),
        )
        for config in (preset("muon").model_dump(), changed)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(2 * a, b, rtol=1e-5), small, large)
