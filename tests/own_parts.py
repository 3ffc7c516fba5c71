"""Parts that are not maxstack's, as a user writes them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxstack.parts import (
    Attention,
    AttentionConfig,
    Dim,
    Documents,
    FilterPart,
    Parts,
    Removed,
    RewardPart,
    SourcePart,
    TransformPart,
    vector,
)


class ScaledAttention(AttentionConfig):
    """Attention whose output has a learned factor per channel (Touvron 2021, arXiv:2103.17239)."""

    LAYER = "Scaled"

    start: float = 0.1
    """Initial factor."""

    def parts(self, width: Dim) -> Parts:
        factor = vector(width._replace(axis="norm"), fill=self.start)
        return {**super().parts(width), "factor": factor}


class Scaled(Attention):
    """The layer of ScaledAttention."""

    def __call__(self, x_BTD: jax.Array, context: Any) -> jax.Array:
        return super().__call__(x_BTD, context) * self.factor[...].astype(x_BTD.dtype)


class SignMomentum(TransformPart):
    """Steps of the size of the learning rate, in the direction of the momentum's signs (Bernstein
    2018, arXiv:1802.04434)."""

    TRANSFORM = "sign_momentum"
    DESCENDS = True

    decay: float = 0.9
    """Decay of the momentum per step."""


def sign_momentum(section: SignMomentum, learning_rate: Any) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(section.decay),
        optax.stateless(lambda updates, _: jax.tree.map(jnp.sign, updates)),
        optax.scale_by_learning_rate(learning_rate),
    )


class Sums(SourcePart):
    """Sums, written out."""

    DOCUMENTS = "SumDocuments"

    below: int = 100
    """Upper bound of the numbers."""


class SumDocuments(Documents):
    """The documents of Sums."""

    def __init__(self, section: Sums):
        self.below = section.below

    def __len__(self) -> int:
        return self.below**2

    def __getitem__(self, index: int) -> bytes:
        a, b = divmod(index, self.below)
        return f"{a} + {b} = {a + b}\n".encode()

    def identity(self) -> str:
        return f"sums {self.below}"


class Even(FilterPart):
    """Keeps documents of an even number of characters."""

    STEP = "is_even"


def is_even(section: Even) -> Any:
    return lambda text: Removed("odd", len(text)) if len(text) % 2 else text


class Brief(RewardPart):
    """1 minus the share of `most` that the completion takes."""

    CALL = "brief"
    SETTINGS = ("most",)

    most: int = 40
    """Characters at which the reward is 0."""


def brief(prompt: str, completion: str, row: dict[str, Any], most: int) -> float:
    return max(0.0, 1 - len(completion) / most)


def share_of_words(answer: str, right: tuple[str, ...]) -> float:
    """A metric: the share of the right answer's words that the answer has."""
    words = right[0].split()
    return sum(word in answer.split() for word in words) / len(words)


class Lines:
    """A tracker: a line for each number."""

    def __init__(self, folder: Any, cfg: Any):
        self._file = (folder / "lines.txt").open("a")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._file.writelines(f"{step} {name} {value}\n" for name, value in values.items())

    def texts(self, step: int, name: str, texts: Any) -> None:
        """Only numbers are kept."""

    def image(self, step: int, name: str, picture: Any) -> None:
        """Only numbers are kept."""

    def close(self) -> None:
        self._file.close()
