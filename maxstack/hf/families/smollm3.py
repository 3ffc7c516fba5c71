"""SmolLM3: Llama with no rotary positions in every fourth layer."""

from maxstack.hf.blocks import Every, Layers
from maxstack.hf.families.parts import (
    BIASED,
    LLAMA_ROWS,
    attention,
    block,
    decoder,
    gated,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
from maxstack.hf.table import Key

SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "smollm3",
    decoder(tied=True),
    Layers(
        {
            name: block(
                attention(rope, (4, None), window=None, **BIASED),
                gated(bias=Key("mlp_bias", False)),
            )
            for name, rope in (("rope", Rope(theta=2e6)), ("nope", None))
        },
        Every("nope", "rope", of="no_rope_layer_interval", default=4, flags="no_rope_layers"),
    ),
    LLAMA_ROWS,
    fixed={"use_sliding_window": False},
    silent="""
    layer_types sliding_window max_window_layers no_rope_layer_interval pretraining_tp
    """.split(),
)
