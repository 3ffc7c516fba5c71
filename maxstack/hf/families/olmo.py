"""OLMo 2 and 3: norms after the parts alone, queries and keys normed over all heads together."""

from maxstack.hf.families.parts import (
    ATTENTION,
    BIASED,
    GATED,
    OUTER,
    POST_NORMS,
    alike,
    attention,
    decoder,
    full_every,
    rms,
    windowed,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
from maxstack.hf.table import Key

NORM = rms(1e-5)
ROWS = OUTER + POST_NORMS + ATTENTION + GATED
MIXER = {"qk_norm": NORM, "qk_norm_over": "all", **BIASED}

OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    decoder(norm=NORM),
    alike(attention(Rope(), window=None, **MIXER), norm=NORM, placement="post"),
    ROWS,
)

OLMO3 = Family(
    "Olmo3ForCausalLM",
    "olmo3",
    decoder(norm=NORM),
    windowed(
        full_every(4),
        Key("sliding_window", 4096),
        (
            Rope("full_attention", theta=500_000.0),
            Rope("sliding_attention", theta=500_000.0, old_scaling=False),
        ),
        MIXER,
        norm=NORM,
        placement="post",
    ),
    ROWS,
)
