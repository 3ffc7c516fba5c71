"""The configuration of low-rank adapters, checked before jax is imported."""

from collections.abc import Iterator

from pydantic import Field

from maxstack.config import (
    Fault,
    Items,
    PositiveFloat,
    Regex,
    Section,
    SizeInt,
)


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): only they are trained and have
    optimizer state; everything else is frozen. With weights in low precision (quantization: nf4)
    this is QLoRA (Dettmers et al. 2023, arXiv:2305.14314)."""

    rank: SizeInt = 8
    """Rank: columns of A and rows of B, in W x + alpha / rank B A x."""
    alpha: PositiveFloat = 16.0
    """Scale of an adapter's output, which is then divided by the rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of an adapter's input in training; the same on any mesh."""
    targets: Items[Regex] = (".*/(mixer|mlp)/.*",)
    """Weights to adapt: regular expressions that match the whole path of a weight, or of its
    module, as in quantization.rules; only projections, neither experts nor embedding tables."""
    modules_to_save: Items[Regex] = ()
    """Patterns, as in targets, of weights to train in full beside the adapters: head and embedding,
    for example, if the base model has never seen the tokens of the chat template."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank, so that larger ranks do not learn more
    slowly (Kalajdzievski 2023, arXiv:2312.03732)."""
    dora: bool = False
    """Also train the magnitude of each column of W + B A (Liu et al. 2024, arXiv:2402.09353)."""
    adapter: str | None = None
    """Folder in PEFT's format, at a path or URL, with the adapter that a new run starts from; its
    rank, alpha and targets must match the ones given here. null: start with A random and B zero."""

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def own_faults(self) -> Iterator[Fault]:
        if not self.targets:
            yield (
                "targets",
                "targets=[]: give at least one pattern, such as '.*/mixer/(query|value)', or drop "
                "lora",
            )
