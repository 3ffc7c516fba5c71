"""OLMo 2 and 3: norms after the parts alone, queries and keys normed over all heads together."""

from typing import Any

from maxstack.hf.blocks import Layers, Types
from maxstack.hf.families.parts import (
    ATTENTION,
    GATED,
    OUTER,
    POST_NORMS,
    attention,
    decoder,
    gated,
    rms,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
from maxstack.hf.table import Key

NORM = rms(eps=Key("rms_norm_eps", 1e-5))
BIAS = Key("attention_bias", False)
ROWS = OUTER + POST_NORMS + ATTENTION + GATED


def _block(rope: Rope, window: Any) -> dict[str, Any]:
    return {
        "mixer": attention(
            rope, window=window, qk_norm=NORM, qk_norm_over="all", qkv_bias=BIAS, out_bias=BIAS
        ),
        "mlp": gated(),
        "norm": NORM,
        "placement": "post",
    }


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
        Types(
            {"sliding_attention": "sliding", "full_attention": "full"},
            lambda source, layers: [
                "sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)
            ],
        ),
    ),
    ROWS,
)

FAMILIES = (OLMO2, OLMO3)
