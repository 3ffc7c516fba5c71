"""The order of a model's blocks in config.json: which block each layer is, and how the layers
become prefix and pattern."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from maxstack.hf.table import Mismatch, Sink, Source, read, write

Names = Sequence[str]


class Order(Protocol):
    """Names the block of every layer."""

    def read(self, source: Source, layers: int) -> list[str]:
        """One name a layer."""

    def write(self, names: Names, sink: Sink) -> None:
        """Put the keys that say this order; Mismatch where none can."""


class Same:
    """All layers are one block."""

    def read(self, source: Source, layers: int) -> list[str]:
        return ["block"] * layers

    def write(self, names: Names, sink: Sink) -> None:
        pass


class Types:
    """layer_types, a word a layer; `absent` gives the words where config.json has none."""

    def __init__(self, words: Mapping[str, str], absent: Callable[[Source, int], list[str]]):
        self.words, self.absent = words, absent

    def read(self, source: Source, layers: int) -> list[str]:
        given = source.get("layer_types") or self.absent(source, layers)
        if not isinstance(given, list) or len(given) != layers or not {*given} <= {*self.words}:
            raise source.fail("layer_types", f"must be {layers} of {', '.join(self.words)}")
        return [self.words[word] for word in given]

    def write(self, names: Names, sink: Sink) -> None:
        back = {name: word for word, name in self.words.items()}
        sink.put("layer_types", [back[name] for name in names])


class Every:
    """Every n-th layer is one block, the others another, as key `of` says or a list of flags
    `flags` says."""

    def __init__(
        self, one: str, others: str, *, of: str, default: int, flags: str, indices: bool = False
    ):
        self.one, self.others, self.of, self.default, self.flags, self.indices = (
            one,
            others,
            of,
            default,
            flags,
            indices,
        )

    def read(self, source: Source, layers: int) -> list[str]:
        step, given = source.get(self.of, self.default), source.get(self.flags)
        if given is None or (not given and not self.indices):
            return [self.one if (i + 1) % step == 0 else self.others for i in range(layers)]
        if self.indices:
            return [self.one if i in given else self.others for i in range(layers)]
        if len(given) < layers:
            raise source.fail(self.flags, f"must have a flag for each of {layers} layers")
        return [self.others if flag else self.one for flag in given[:layers]]

    def write(self, names: Names, sink: Sink) -> None:
        flags = [int(name != self.one) for name in names]
        sink.put(
            self.flags, [i for i, other in enumerate(flags) if not other] if self.indices else flags
        )


class FirstDense:
    """The first few layers are dense, the others mixtures of experts."""

    def __init__(self, key: str = "first_k_dense_replace", default: int = 0):
        self.key, self.default = key, default

    def read(self, source: Source, layers: int) -> list[str]:
        dense = min(source.get(self.key, self.default) or 0, layers)
        return ["dense"] * dense + ["moe"] * (layers - dense)

    def write(self, names: Names, sink: Sink) -> None:
        dense = list(names).count("dense")
        if list(names) != ["dense"] * dense + ["moe"] * (len(names) - dense):
            raise Mismatch("dense layers after mixtures of experts")
        sink.put(self.key, dense)


class Both:
    """Two orders at once: a layer's name is both names with _ between them."""

    def __init__(self, *orders: Order):
        self.orders = orders

    def read(self, source: Source, layers: int) -> list[str]:
        return [
            "_".join(names)
            for names in zip(*(order.read(source, layers) for order in self.orders), strict=True)
        ]

    def write(self, names: Names, sink: Sink) -> None:
        for order, own in zip(
            self.orders, zip(*(name.split("_") for name in names), strict=True), strict=True
        ):
            order.write(own, sink)


class Layers:
    """Number of layers, blocks, prefix and pattern of a model: a table for each block, and their
    order.

    `unrolled`: how many layers at the start must be in the prefix.
    """

    def __init__(
        self,
        tables: Mapping[str, Any],
        order: Order = Same(),  # noqa: B008
        key: str = "num_hidden_layers",
        unrolled: Callable[[Source, int], int] = lambda source, layers: 0,
    ):
        self.tables, self.order, self.key, self.unrolled = tables, order, key, unrolled

    def read(self, source: Source) -> dict[str, Any]:
        """The keys of a DecoderConfig that say its layers."""
        layers = source.need(self.key)
        if type(layers) is not int or not 0 < layers < 10_000:
            raise source.fail(self.key, "must be the number of layers")
        names = self.order.read(source, layers)
        prefix, pattern = arranged(names, self.unrolled(source, layers))
        blocks = {name: read(self.tables[name], source) for name in dict.fromkeys(names)}
        return {"layers": layers, "blocks": blocks, "prefix": prefix, "pattern": pattern}

    def write(self, blocks: Sequence[Mapping[str, Any]], sink: Sink) -> None:
        """Put what says these blocks, one a layer; Mismatch with the first reason where no table
        fits one."""
        sink.put(self.key, len(blocks))
        names = [self._fitting(block, sink) for block in blocks]
        self.order.write(names, sink)

    def _fitting(self, block: Mapping[str, Any], sink: Sink) -> str:
        reasons = []
        for name, table in self.tables.items():
            trial = Sink(sink)
            try:
                write(table, block, trial)
            except Mismatch as error:
                reasons.append(str(error))
                continue
            sink.update(trial)
            return name
        raise Mismatch(
            f"a block fits no kind of this family's: {'; '.join(dict.fromkeys(reasons))}"
        )


def arranged(names: Names, unrolled: int = 0) -> tuple[list[str], list[str]]:
    """(prefix, pattern) that give these layers with the fewest blocks compiled: prefix, one period,
    and the remainder."""
    best: tuple[int, int, int] | None = None
    layers = len(names)
    for first in range(unrolled, min(layers, unrolled + 64) + 1):
        for period in range(1, min(layers - first, 128) + 1):
            if best and first + period >= best[0]:
                break
            if all(names[i] == names[i - period] for i in range(first + period, layers)):
                cost = first + period + (layers - first) % period
                best = min(best or (cost, first, period), (cost, first, period))
                break
    _, first, period = best or (0, layers, 0)
    return list(names[:first]), list(names[first : first + period])
