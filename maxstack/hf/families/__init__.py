"""The model families, one module for each group of relatives."""

import dataclasses

from maxstack.hf.families import (
    deepseek,
    dit,
    gemma,
    gpt2,
    gpt_oss,
    llama,
    llama4,
    olmo,
    phi3,
    qwen,
    smollm3,
    vision,
)
from maxstack.hf.family import Family

_MODULES = (
    llama,
    qwen,
    gemma,
    gpt2,
    gpt_oss,
    olmo,
    deepseek,
    llama4,
    phi3,
    smollm3,
    vision,
    dit,
)
ALL: tuple[Family, ...] = tuple(
    value for module in _MODULES for value in vars(module).values() if isinstance(value, Family)
)
"""Every Family that a module declares; export takes the first that can express a model."""
_NEEDED = "rms_norm_eps", "rope_theta", "num_key_value_heads"
_VISION_LANGUAGE = dict.fromkeys(
    ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"),
    dataclasses.replace(qwen.QWEN2, needed=_NEEDED),
)
_OTHER_TYPES = {
    "kimi_k2": deepseek.DEEPSEEK_V3,
    **_VISION_LANGUAGE,
    "qwen3_vl_text": dataclasses.replace(qwen.QWEN3, needed=_NEEDED),
    "Transformer2DModel": dataclasses.replace(
        dit.DIT, needed=("norm_type", "num_embeds_ada_norm", "num_attention_heads", "num_layers")
    ),
}
"""Further values of model_type. Kimi K2 has the architecture of DeepSeek V3 and its own type. The
language models of Qwen's vision models rotate a text's positions alike in all sections, so they are
Qwen's others with other defaults. DiT was published as a class that was several models, by
`norm_type`."""
FAMILIES: dict[str, Family] = {
    name: family for family in ALL for name in (family.architecture, family.model_type) if name
} | _OTHER_TYPES
