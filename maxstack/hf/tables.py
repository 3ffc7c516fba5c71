"""What an adapter of PEFT holds beside pairs of matrices: whole tensors (modules_to_save, and the
tables of a vocabulary that grew) and rows of tables (trainable_token_indices)."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from maxstack.errors import ConfigError, quoted
from maxstack.hf.contents import HEAD
from maxstack.hf.tensors import Plain

if TYPE_CHECKING:
    from maxstack.hf.peft import Adapter

ROWS = ".token_adapter.trainable_tokens_delta"
"""End of the name of a module's rows, which stand in the place of the table's."""
BASE = ".token_adapter.base_layer"


def listed(module: str, names: Iterable[str]) -> bool:
    """True where one of the names is the end of a module's path, as peft reads them."""
    return any(f".{module}".endswith(f".{name}") for name in names)


def taken(adapter: "Adapter") -> tuple[dict[str, np.ndarray], dict[str, list[int]]]:
    """Whole tensors, and rows of tables with their numbers, by the names that the tensors have in
    the model, out of an adapter's tensors. ConfigError where rows have no numbers."""
    said = adapter.said.get("trainable_token_indices") or {}
    named = {"embed_tokens": said} if isinstance(said, list) else said
    tables: dict[str, np.ndarray] = {}
    numbers: dict[str, list[int]] = {}
    for name in [*adapter.tensors]:
        if name.endswith(ROWS):
            module = name.removesuffix(ROWS)
            found = [own for key, own in named.items() if listed(module, [key])]
            tables[f"{module}{ROWS}"] = rows = adapter.tensors.pop(name)
            if len(found) != 1 or not len(found[0]) == len({*found[0]}) == len(rows):
                raise ConfigError(
                    f"{adapter.folder}: {len(rows)} rows of {module}, and trainable_token_indices="
                    f"{quoted(said)}; save the adapter with peft again"
                )
            numbers[f"{module}.weight"] = found[0]
        elif name.endswith(".weight") and ".lora_" not in name:
            tables[name.replace(BASE, "")] = adapter.tensors.pop(name)
    return tables, numbers


def replaced(
    adapter: "Adapter", tensors: Mapping[str, Plain], embedding: str, where: str
) -> dict[str, np.ndarray]:
    """The whole tensors of a model folder that an adapter replaces, by name, float32, as peft's
    model has them: of a model whose head is its embedding, a head of its own where they differ.
    ConfigError where they are another model's."""
    tied, made = HEAD not in tensors, dict(adapter.tables)
    for name, numbers in adapter.rows.items():
        rows = made.pop(name.removesuffix(".weight") + ROWS)
        if name not in made and name not in tensors:
            raise ConfigError(
                f"{adapter.folder}: has rows of {name}, and {where} has no such tensor, which may "
                "be one with its embedding; merge it with peft (merge_and_unload)"
            )
        if name not in made:
            made[name] = tensors[name].array().astype(np.float32)
        if odd := [number for number in numbers if not 0 <= number < len(made[name])]:
            raise ConfigError(f"{adapter.folder}: {name} has no row {odd[0]} in {where}")
        made[name][numbers] = rows
    if tied and embedding in adapter.tables:
        head = made.setdefault(HEAD, tensors[embedding].array().astype(np.float32))
        if np.array_equal(head, made[embedding]):
            del made[HEAD]
    grown = {len(made[name]) for name in (embedding, HEAD) if name in made}
    for name, table in made.items():
        base = tensors.get(embedding if tied and name == HEAD else name)
        free = name in (embedding, HEAD)
        if base is None or base.shape[free:] != table.shape[free:]:
            has = "none" if base is None else f"{[*base.shape]}"
            raise ConfigError(
                f"{adapter.folder}: is of another model: {name} is {[*table.shape]}, and in "
                f"{where} that is {has}"
            )
        others = {embedding, *([] if tied else [HEAD])} - made.keys()
        if free and (len(grown) > 1 or (others and len(table) != base.shape[0])):
            raise ConfigError(
                f"{adapter.folder}: {name} has {len(table)} rows, and {HEAD} or {embedding} "
                "another number; save both with peft (save_embedding_layers=True)"
            )
    return made
