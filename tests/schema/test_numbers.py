"""A number that no run has is refused at once, by its key."""

import pytest

from maxstack import load
from maxstack.errors import ConfigError

MIXER, MLP = "model.blocks.block.mixer", "model.blocks.block.mlp"
EXPERTS = f"{MLP}={{kind: moe, top_k: 1, hidden: 8, experts: %d}}"
KEYS = (
    *("model.layers", "model.unroll", "model.embed", "model.vocab", f"{MLP}.hidden"),
    *(f"{MIXER}.heads", f"{MIXER}.kv_heads", f"{MIXER}.head_dim", f"{MIXER}.window"),
    *("mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.stage", "mesh.microbatches", "mesh.rounds"),
    *("data.seq_len", "data.workers", "data.prefetch", "run.virtual_devices"),
    *("train.steps", "train.batch_size", "train.accumulate"),
)


@pytest.mark.parametrize("key", KEYS)
def test_a_number_of_10_to_the_18th_is_refused_by_its_key(key):
    with pytest.raises(ConfigError, match=f"{key}: got 1000000000000000000; allowed: a whole"):
        load.load_alone("quickstart", [f"{key}={10**18}"])


def test_what_is_counted_one_by_one_is_refused_from_10001_on():
    for key in ("model.layers", f"{MIXER}.kv_heads", EXPERTS.partition("=")[0]):
        override = EXPERTS % 10_001 if key == MLP else f"{key}=10001"
        with pytest.raises(ConfigError, match=r"got 10001; allowed: a whole number >= 1 and <="):
            load.load_alone("quickstart", [override])
