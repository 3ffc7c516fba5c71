"""The order of a model's blocks in config.json: which block each layer is, and how the layers
become prefix and pattern.

Families say it in different keys (layer_types, every n-th layer, the first few dense); each Order
reads one way to a name a layer and writes the names back. find_pattern then looks for the shortest
prefix and repeated pattern, because the pattern alone is compiled and scanned.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from maxstack.hf.table import Mismatch, Sink, Source, read, write_first

Names = Sequence[str]


class Order(Protocol):
    """Names the block of every layer."""

    def read(self, source: Source, layers: int) -> list[str]:
        """One name a layer."""

    def write(self, names: Names, sink: Sink) -> None:
        """Put the keys that express this order; Mismatch where none can."""


@dataclasses.dataclass(frozen=True)
class Types:
    """layer_types, a word for each layer."""

    words: Mapping[str, str]
    """Word -> block."""
    absent: Callable[[Source, int], list[str]]
    """The words where the key is absent."""

    def read(self, source: Source, layers: int) -> list[str]:
        words = source.get("layer_types") or self.absent(source, layers)
        if not isinstance(words, list) or len(words) != layers or not {*words} <= {*self.words}:
            raise source.fail("layer_types", f"must be {layers} of {', '.join(self.words)}")
        return [self.words[word] for word in words]

    def write(self, names: Names, sink: Sink) -> None:
        back = {name: word for word, name in self.words.items()}
        sink.put("layer_types", [back[name] for name in names])


@dataclasses.dataclass(frozen=True)
class Every:
    """One block in every n-th layer and another elsewhere, by a key with n or by a list."""

    name: str
    others: str
    _: dataclasses.KW_ONLY
    of: str
    """The key with n."""
    default: int
    flags: str
    """The key with a flag for each layer, 0 in every n-th, or with the `indices` of every n-th."""
    indices: bool = False

    def read(self, source: Source, layers: int) -> list[str]:
        step = source.get(self.of, self.default)
        listed = source.get(self.flags)
        # An empty list of flags says nothing, an empty list of indices says none.
        if listed is None or (not listed and not self.indices):
            chosen = {*range(step - 1, layers, step)}
        elif self.indices:
            chosen = {*listed}
        elif len(listed) < layers:
            raise source.fail(self.flags, f"must have a flag for each of {layers} layers")
        else:
            chosen = {i for i, flag in enumerate(listed) if not flag}
        return [self.name if i in chosen else self.others for i in range(layers)]

    def write(self, names: Names, sink: Sink) -> None:
        # The list expresses any order; n would only express regular ones.
        flags = [int(name != self.name) for name in names]
        chosen = [i for i, flag in enumerate(flags) if not flag]
        sink.put(self.flags, chosen if self.indices else flags)


@dataclasses.dataclass(frozen=True)
class FirstDense:
    """The first few layers are dense, the others mixtures of experts."""

    absent: int
    """Dense layers where the key is absent."""
    key = "first_k_dense_replace"

    def read(self, source: Source, layers: int) -> list[str]:
        dense = min(source.get(self.key, self.absent) or 0, layers)
        return ["dense"] * dense + ["moe"] * (layers - dense)

    def write(self, names: Names, sink: Sink) -> None:
        dense = names.count("dense")
        if "dense" in names[dense:]:
            raise Mismatch("dense layers after mixtures of experts")
        sink.put(self.key, dense)


# For layers with two properties in keys of their own (Llama 4: RoPE or none, dense or experts).
class Both:
    """Two orders at once: a layer's name is both names joined by _."""

    def __init__(self, *orders: Order):
        self.orders = orders

    def read(self, source: Source, layers: int) -> list[str]:
        names = (order.read(source, layers) for order in self.orders)
        return ["_".join(pair) for pair in zip(*names, strict=True)]

    def write(self, names: Names, sink: Sink) -> None:
        columns = zip(*(name.split("_") for name in names), strict=True)
        for order, own in zip(self.orders, columns, strict=True):
            order.write(own, sink)


@dataclasses.dataclass(frozen=True)
class Layers:
    """Number of layers, blocks, prefix and pattern of a model."""

    tables: Mapping[str, Any]
    """One for each block."""
    order: Order | None = None
    """None: all layers are one block."""
    key: str = "num_hidden_layers"
    unrolled: Callable[[Source, int], int] = lambda source, layers: 0
    """Number of layers at the start that must be in the prefix."""

    def read(self, source: Source) -> dict[str, Any]:
        """Return the keys of a DecoderConfig that describe its layers."""
        layers = source.need(self.key)
        # Checked here, before lists of that many names are made of it.
        if type(layers) is not int or not 0 < layers < 10_000:
            raise source.fail(self.key, "must be the number of layers")
        names = self.order.read(source, layers) if self.order else [*self.tables] * layers
        prefix, pattern = find_pattern(names, self.unrolled(source, layers))
        # Blocks that no layer is are not read, since their keys may be absent.
        blocks = {name: read(self.tables[name], source) for name in dict.fromkeys(names)}
        return {"layers": layers, "blocks": blocks, "prefix": prefix, "pattern": pattern}

    def write(self, blocks: Sequence[Mapping[str, Any]], sink: Sink) -> None:
        """Put the keys that express these blocks, one a layer; Mismatch with the reasons of the
        first that fits no table."""
        sink.put(self.key, len(blocks))
        try:
            names = [write_first(self.tables, block, sink) for block in blocks]
        except Mismatch as error:
            raise Mismatch(f"a block fits no kind of this family's: {error}") from None
        if self.order:
            self.order.write(names, sink)


def find_pattern(names: Names, unrolled: int = 0) -> tuple[list[str], list[str]]:
    """Return the (prefix, pattern) of these layers with the fewest compiled blocks: those of the
    prefix, of one period, and of the remainder after the last whole period."""
    layers = len(names)
    best = layers + 1, layers, 0
    # The bounds keep the search short for models of thousands of layers.
    for first in range(unrolled, min(layers, unrolled + 64) + 1):
        for period in range(1, min(layers - first, 128) + 1):
            # The cost only grows from here.
            if first + period >= best[0]:
                break
            if all(names[i] == names[i - period] for i in range(first + period, layers)):
                cost = first + period + (layers - first) % period
                # Longer periods of this prefix cost more. Ties go to the shorter prefix.
                best = min(best, (cost, first, period))
                break
    _, first, period = best
    return list(names[:first]), list(names[first : first + period])
