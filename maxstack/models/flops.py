"""FLOPs of a training step by token and component, for MFU and plan. Products with weights and
inside mixers count; norms, softmax, embedding lookups, the choice of experts and rematerialised
work do not."""

import collections
from collections.abc import Iterator

from maxstack.schema.parts import Count, Dim, weights
from maxstack.schema.stack import BlockConfig, StackConfig


def flops_per_token(model: StackConfig, seq_len: int, adapters: int = 0, frozen: int = 0) -> float:
    """Causal training FLOPs a token, all components."""
    return sum(count.causal for count in components(model, seq_len, adapters, frozen).values())


def forward_pass(model: StackConfig, seq_len: int) -> Count:
    """FLOPs a token of a forward pass."""
    # Forward is 2 of 6.
    whole = components(model, seq_len).values()
    return Count(*(sum(counts) / 3 for counts in zip(*whole, strict=True)))


def components(
    model: StackConfig, seq_len: int, adapters: int = 0, frozen: int = 0
) -> dict[str, Count]:
    """FLOPs a token by component: 6 per weight that multiplies it (forward 2, backward 4), and
    those of attention over the keys that it sees (Kaplan et al. 2020, arXiv:2001.08361, section
    2.1, with the mean number of visible keys in place of the context).

    With `adapters`, the number of parameters of low-rank adapters, those count 6 and the other
    weights, which are frozen, 4. Each of the `frozen` second sets of weights adds a forward pass.
    """
    total: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    parts = [
        # A frozen weight passes gradients on to its inputs and gets none itself: 2 of 6 less.
        *_parts(model, seq_len, 4.0 if adapters else 6.0),
        *([("adapters", _weights(adapters, 6.0))] if adapters else []),
    ]
    if frozen:
        forward = [*_parts(model, seq_len, 2.0, 1 / 3), ("adapters", _weights(adapters, 2.0))]
        parts += [*forward * frozen]
    for name, count in parts:
        # Components without products are in no table.
        if not count.full:
            continue
        total[name][0] += count.causal
        total[name][1] += count.full
    return {name: Count(*sums) for name, sums in total.items()}


def _parts(
    model: StackConfig, seq_len: int, each: float, share: float = 1.0
) -> Iterator[tuple[str, Count]]:
    """Counts by component: `each` for a weight, and a share of what mixers add."""
    for component, products in model.products_outside_blocks(seq_len):
        yield component, _weights(products, each)
    for name in model.order:
        yield from _block(model.blocks[name], model.embed, seq_len, each, share)
    for name in model.mtp_blocks:
        for _, count in _block(model.blocks[name], model.embed, seq_len, each, share):
            yield "further tokens", count


def _weights(number: float, each: float) -> Count:
    return Count(each * number, each * number)


def _block(
    block: BlockConfig, embed: int, seq_len: int, each: float, share: float
) -> Iterator[tuple[str, Count]]:
    for part in (block.mixer, block.mlp):
        for _, weight, component in weights(part, Dim("embed", embed)):
            yield component, _weights(weight.products, each)
        for component, count in part.attended(seq_len).items():
            yield component, Count(*(share * number for number in count))
