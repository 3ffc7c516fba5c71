"""The tensors of a GGUF file by the names, and in the order of numbers, of a Hugging Face folder.

llama.cpp turns pairs of neighbours in a head where transformers turns its halves, so the rows of
queries and keys of what it calls llama come in another order; it keeps 1 + w of Gemma's norms, and
all experts of a layer in one tensor. Blocks are dequantized at each call, one tensor or expert at a
time, so the weights are never in memory twice.
"""

import functools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxstack.data.gguf.config import ROPE_FACTORS
from maxstack.data.gguf.file import FLOATS, Entry, GgufFile
from maxstack.errors import DataError
from maxstack.hf.tensors import Tensor

log = logging.getLogger(__name__)
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OWN: Mapping[str, Mapping[str, str]] = {
    "mixtral": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    "qwen3_moe": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
    "gemma2": SANDWICH,
    "gemma3_text": SANDWICH,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gpt_oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
}
"""Names that a model_type has of its own."""
OF_GPT_OSS = "attn_sinks", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"
TURNED = "llama", "mistral", "mixtral"
SHIFTED = "gemma", "gemma2", "gemma3_text"
NAME = re.compile(r"(?:blk\.(\d{1,6})\.)?(\w+)\.(weight|bias)")
Form = Callable[[np.ndarray], np.ndarray]


class Weight:
    """A weight of a GGUF file."""

    def __init__(
        self,
        file: GgufFile,
        entry: Entry,
        *,
        expert: int | None = None,
        heads: int = 0,
        form: Form | None = None,
    ):
        self._file, self._entry = file, entry
        self._expert = expert
        self._heads, self._form = heads, form
        self.where = file.where(entry)
        self.shape = entry.shape if expert is None else entry.shape[1:]
        self.dtype = FLOATS.get(entry.kind, np.dtype(np.float32))

    def array(self, index: int | None = None) -> np.ndarray:
        """Return the whole, or one index of its first dimension."""
        rows = self._file.rows(self._entry)
        rows = rows if self._expert is None else rows[self._expert]
        if self._heads:
            # Before dequantization, since rows are whole blocks: heads, pairs, two.
            pairs = rows.reshape(self._heads, -1, 2, *rows.shape[1:])
            rows = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
        rows = rows if index is None else rows[index]
        values = self._file.dequantize(self._entry, rows)
        return values if self._form is None else self._form(values)

    def forget(self) -> None:
        self._file.forget()


class Interleaved:
    """gpt-oss' gate and up as columns that alternate, [experts, in, 2 out], or down as [experts,
    in, out], of tensors [experts, out, in]; biases [experts, 2 out] likewise."""

    def __init__(self, *parts: Weight):
        self._parts, first = parts, parts[0].shape
        self.where, self.dtype = parts[0].where, parts[0].dtype
        if any(part.shape != first for part in parts):
            raise DataError(f"{self.where}: has another shape than {parts[-1].where}")
        self.shape = first[0], *first[2:], first[1] * len(parts)

    def array(self, index: int | None = None) -> np.ndarray:
        if index is None:
            return np.stack([self.array(expert) for expert in range(self.shape[0])])
        stacked = np.stack([part.array(index) for part in self._parts], 1)
        return stacked.reshape(-1, *stacked.shape[2:]).T

    def forget(self) -> None:
        for part in self._parts:
            part.forget()


def read_tensors(path: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a GGUF file whose config.json is given. DataError for a damaged file,
    ConfigError for a quantization that cannot be read."""
    file = GgufFile(path)
    file.check_sizes()
    packed = {entry.kind: entry for entry in file.entries.values() if entry.kind not in FLOATS}
    if packed:
        numbers = sum(math.prod(entry.shape) for entry in file.entries.values())
        kinds = ", ".join(sorted(file.kind_name(entry) for entry in packed.values()))
        _say(str(path.resolve()), f"{kinds}, {numbers * 4 / 1e9:.2f} GB as float32")
    return dict(_weights(file, config))


@functools.cache
def _say(where: str, what: str) -> None:
    log.warning("%s: holds %s, as which it is computed unless a dtype is given", where, what)


def _weights(file: GgufFile, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    kind = config["model_type"]
    layer_names = {**LAYER, **OWN.get(kind, {})}
    for entry in file.entries.values():
        name = NAME.fullmatch(entry.name)
        layer, stem, suffix = name.groups() if name else (None, entry.name, "")
        theirs = (OUTER if layer is None else layer_names).get(stem)
        before = "" if layer is None else f"model.layers.{int(layer)}."
        if entry.name in ROPE_FACTORS:
            continue
        if kind == "gpt_oss" and stem in OF_GPT_OSS:
            yield from _of_gpt_oss(file, entry, before, stem, suffix).items()
        elif theirs is None:
            # Under its own name, by which the check of tensors refuses it.
            yield entry.name, Weight(file, entry)
        elif "{}" in theirs:
            for expert in range(entry.shape[0]):
                weight = Weight(file, entry, expert=expert)
                yield f"{before}{theirs.format(expert)}.{suffix}", weight
        else:
            heads = _heads(stem, config) if kind in TURNED else 0
            if heads and entry.shape[0] % (2 * heads):
                raise DataError(f"{file.where(entry)} {list(entry.shape)}: is not of {heads} heads")
            form = _less_one if kind in SHIFTED and stem.endswith("norm") else None
            yield f"{before}{theirs}.{suffix}", Weight(file, entry, heads=heads, form=form)


def _of_gpt_oss(
    file: GgufFile, entry: Entry, before: str, stem: str, suffix: str
) -> dict[str, Tensor]:
    """Return the weights under names that gpt-oss alone has, whose experts are one tensor too."""
    if stem == "attn_sinks":
        return {f"{before}self_attn.sinks": Weight(file, entry)}
    experts, end = f"{before}mlp.experts", "" if suffix == "weight" else "_bias"
    if stem == "ffn_down_exps":
        return {f"{experts}.down_proj{end}": Interleaved(Weight(file, entry))}
    pair = [entry.name.replace("_up_", "_gate_"), entry.name.replace("_gate_", "_up_")]
    if missing := [name for name in pair if name not in file.entries]:
        raise DataError(f"{file.where(entry)}: is of no use without {missing[0]}, which is absent")
    gate, up = (Weight(file, file.entries[name]) for name in pair)
    return {f"{experts}.gate_up_proj{end}": Interleaved(gate, up)}


def _heads(stem: str, config: Mapping[str, Any]) -> int:
    keys = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    return config[keys[stem]] if stem in keys else 0


def _less_one(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32) - 1
