"""The families, a module for each group of relatives."""

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
"""Every Family that a module declares; the first that can express a model is written."""
_OTHER_TYPES = {"kimi_k2": deepseek.DEEPSEEK_V3}
"""Further values of model_type: Kimi K2 is published with the architecture of DeepSeek V3 and a
type of its own."""
FAMILIES: dict[str, Family] = {
    name: family for family in ALL for name in (family.architecture, family.model_type) if name
} | _OTHER_TYPES
