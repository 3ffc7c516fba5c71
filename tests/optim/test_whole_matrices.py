"""Optimizers that look at whole matrices or whole layers see them whole, however their shards
lie."""

import jax
import numpy as np
import pytest
import tiers
import tiny

from maxstack.state import flat

GROUPS = [
    {
        "match": ["*mlp*"],
        "chain": [
            {"kind": "scale_by_factored_rms", "min_dim_size_to_factor": 8},
            {"kind": "scale_by_trust_ratio"},
            {"kind": "scale_by_learning_rate"},
        ],
    },
    {"match": ["*"], "chain": [{"kind": "lamb", "weight_decay": 0.1}]},
]
OPTIMIZERS = {
    "muon": {
        "chain": [],
        "groups": [
            {
                "match": [{"path": "*", "ndim": 2}, "!embed*", "!head*"],
                "chain": [{"kind": "muon", "beta": 0.95, "consistent_rms": 0.2}],
            },
            {"match": ["*"], "chain": [{"kind": "adamw"}]},
        ],
    },
    "galore": {"chain": [{"kind": "galore", "rank": 4, "update_proj_gap": 2}]},
    "groups": {"chain": [], "groups": GROUPS},
}


def after_three_steps(optimizer, mesh, devices):
    model = tiny.model(layers=2, pattern=["global"])
    chosen = {"learning_rate": 1e-2} | OPTIMIZERS[optimizer]
    run = tiny.make_run(tiny.config(model=model, mesh=mesh, optimizer=chosen), devices)
    state = run.init()
    begin = jax.device_get(state.params)
    for i in range(3):
        state, _ = run.step(state, tiny.place(run, i))
    return jax.tree.map(np.subtract, jax.device_get(state.params), begin)


@pytest.mark.parametrize("optimizer", tiers.of(OPTIMIZERS, slow=["muon"]))
def test_a_mesh_moves_weights_as_one_device_does(optimizer):
    ours = after_three_steps(optimizer, {"data": 1, "fsdp": 4, "tensor": 2}, 8)
    alone = after_three_steps(optimizer, {}, 1)
    for path, wanted in flat(alone).items():
        assert np.linalg.norm(flat(ours)[path] - wanted) <= 1e-3 * np.linalg.norm(wanted), path
