"""OLMo 2 and 3: norms after the parts alone, queries and keys normed over all heads together."""

from typing import Any

from maxstack.hf.blocks import Layers
from maxstack.hf.families.parts import (
    ATTENTION,
    BIASED,
    GATED,
    OUTER,
    POST_NORMS,
    Table,
    attention,
    block,
    decoder,
    full_every,
    rms,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
from maxstack.hf.table import Key

NORM = rms(1e-5)
ROWS = OUTER + POST_NORMS + ATTENTION + GATED


def _block(rope: Rope, window: Any) -> Table:
    mixer = attention(rope, window=window, qk_norm=NORM, qk_norm_over="all", **BIASED)
    return block(mixer, norm=NORM, placement="post")


OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    decoder(norm=NORM),
    Layers({"block": _block(Rope(theta=500_000.0), None)}),
    ROWS,
)

OLMO3 = Family(
    "Olmo3ForCausalLM",
    "olmo3",
    decoder(norm=NORM),
    Layers(
        {
            "full": _block(Rope("full_attention", theta=500_000.0), None),
            "sliding": _block(
                Rope("sliding_attention", theta=500_000.0, old_scaling=False),
                Key("sliding_window", 4096),
            ),
        },
        full_every(4),
    ),
    ROWS,
)

FAMILIES = (OLMO2, OLMO3)
