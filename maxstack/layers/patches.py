"""Images as tokens, and back. Shapes: B batch  S side in pixels  C channels  T patches  P side of a
patch  D embed."""

import numpy as np
from flax import nnx
from jax import Array

from maxstack.layers.weight import weight


def patch_weight(patch: int, channels: int, size: int, scale: float, dtype: str) -> nnx.Param:
    """The matrix [P, P, C, D] that multiplies a patch."""
    return weight(
        (patch, patch, channels, size),
        "latent latent latent embed",
        std=scale / (patch**2 * channels) ** 0.5,
        dtype=dtype,
        use="matmul",
        contract=3,
    )


def patches(pixels_BSSC: Array, patch: int) -> Array:
    """[B, T, P, P, C], row by row. Pixels outside whole patches are dropped."""
    rows, side, _, channels = pixels_BSSC.shape
    count = side // patch
    covered = pixels_BSSC[:, : count * patch, : count * patch]
    # A reshape and a product instead of a convolution: the weight is then a matrix like any other.
    x = covered.reshape(rows, count, patch, count, patch, channels).swapaxes(2, 3)
    return x.reshape(rows, count * count, patch, patch, channels)


def pixels(patches_BTPPC: Array) -> Array:
    """The inverse of `patches`."""
    rows, count, patch, _, channels = patches_BTPPC.shape
    side = round(count**0.5)
    x = patches_BTPPC.reshape(rows, side, side, patch, patch, channels).swapaxes(2, 3)
    return x.reshape(rows, side * patch, side * patch, channels)


def sincos2d(side: int, size: int, whole: bool = True) -> np.ndarray:
    """Fixed positions [side * side, size]: sines and cosines of columns, then of rows, with rates
    from 1 to 1 / 10000 (Beyer et al. 2022, arXiv:2205.01580); not `whole`: the last rate is one
    step before that (Peebles & Xie 2023, arXiv:2212.09748)."""
    count = size // 4
    rates = 10000.0 ** -(np.arange(count) / (count - 1 if whole else count))
    rows, columns = np.divmod(np.arange(side * side), side)
    turns = [places[:, None] * rates for places in (columns, rows)]
    return np.concatenate([wave(turn) for turn in turns for wave in (np.sin, np.cos)], axis=1)
