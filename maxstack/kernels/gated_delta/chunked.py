"""The gated delta rule by chunks: matrix products instead of one step a token.

Within a chunk the values that positions write depend on each other by a triangular system, which
the UT transform solves for all of them at once (Yang et al. 2024, arXiv:2406.06484, section 3.2;
with decay arXiv:2412.06464, section 3.3); a scan passes one state from chunk to chunk. Decays are
multiplied by adding exponents for each pair of positions, and the system is solved by doubling
blocks: shorter forms of both lose digits (`_decays`, `_unit_inverse`).

Shapes: B batch  T time  K key heads  G value heads / key heads  H key dim  V value dim  X chunks  C
position in a chunk  S another position in it.
"""

import jax
import jax.numpy as jnp

from maxstack.kernels.gated_delta.reference import EXACT, document_numbers

LOWEST = -1e30


def run(
    q_BTKH: jax.Array,
    k_BTKH: jax.Array,
    v_BTNV: jax.Array,
    decay_BTN: jax.Array,
    beta_BTN: jax.Array,
    segments_BT: jax.Array | None,
    chunk: int = 64,
) -> jax.Array:
    """[B, T, N, V] in v's dtype, computed in float32, in chunks of `chunk` positions."""
    b, t, n, v = v_BTNV.shape
    heads = k_BTKH.shape[2], n // k_BTKH.shape[2]
    # Rows shorter than a chunk would be padded for nothing.
    chunk = min(chunk, t)
    q_XBKCH, k_XBKCH = (_chunks(x.astype(jnp.float32), chunk, 1) for x in (q_BTKH, k_BTKH))
    v_XBKGCV, decay_XBKGC, beta_XBKGC = (
        _chunks(x.astype(jnp.float32).reshape(b, t, *heads, *x.shape[3:]), chunk, 2)
        for x in (v_BTNV, decay_BTN, beta_BTN)
    )
    # Decays of every pair of positions, once for the system, the state and the reads.
    within_XBKGCS, since_XBKGC = _decays(
        # The sums multiply decays by 0, and 0 times -inf is NaN.
        jnp.maximum(decay_XBKGC, LOWEST),
        _chunks(document_numbers(segments_BT, t), chunk, 0),
    )

    # Once for each key head; decay and write strength are those of value heads.
    likeness_XBKCS = jnp.tril(_product("XBKCH,XBKSH->XBKCS", k_XBKCH, k_XBKCH), -1)
    solved_XBKGCS = (
        _unit_inverse(within_XBKGCS * likeness_XBKCS[:, :, :, None] * beta_XBKGC[..., None])
        * beta_XBKGC[..., None, :]
    )
    # u is what the chunk would write if it began empty, w what it reads of the state before it.
    u_XBKGCV = _product("XBKGCS,XBKGSV->XBKGCV", solved_XBKGCS, v_XBKGCV)
    w_XBKGCH = _product("XBKGCS,XBKSH->XBKGCH", solved_XBKGCS * since_XBKGC[..., None, :], k_XBKCH)
    # The share of each write that is left at the end of the chunk.
    left_XBKGCH = within_XBKGCS[..., -1, :, None] * k_XBKCH[:, :, :, None]
    states_XBKGHV, new_XBKGCV = _states(u_XBKGCV, w_XBKGCH, left_XBKGCH, since_XBKGC[..., -1])

    # Reads of the chunk's own writes; those of the state before it follow.
    scores_XBKGCS = _product("XBKCH,XBKSH->XBKCS", q_XBKCH, k_XBKCH)[:, :, :, None] * within_XBKGCS
    earlier_XBKGCV = _product("XBKCH,XBKGHV->XBKGCV", q_XBKCH, states_XBKGHV)
    o_XBKGCV = _product("XBKGCS,XBKGSV->XBKGCV", scores_XBKGCS, new_XBKGCV)
    # Decays multiply products of pairs and are at most 1; keys divided by their own would grow.
    o_XBKGCV = o_XBKGCV + earlier_XBKGCV * since_XBKGC[..., None]
    o_BTNV = jnp.transpose(o_XBKGCV, (1, 0, 4, 2, 3, 5)).reshape(b, -1, n, v)[:, :t]
    return o_BTNV.astype(v_BTNV.dtype)


def _states(
    u_XBKGCV: jax.Array, w_XBKGCH: jax.Array, left_XBKGCH: jax.Array, decay_XBKG: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The state before each chunk, and the values that each position adds to it."""

    def step(
        s_BKGHV: jax.Array, now: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        u_BKGCV, w_BKGCH, left_BKGCH, decay_BKG = now
        # The delta rule writes errors: u less the values that the state predicts for these keys.
        new_BKGCV = u_BKGCV - _product("BKGCH,BKGHV->BKGCV", w_BKGCH, s_BKGHV)
        after_BKGHV = s_BKGHV * decay_BKG[..., None, None] + _product(
            "BKGCH,BKGCV->BKGHV", left_BKGCH, new_BKGCV
        )
        return after_BKGHV, (s_BKGHV, new_BKGCV)

    _, b, k, g, _, h = w_XBKGCH.shape
    return jax.lax.scan(
        step,
        jnp.zeros((b, k, g, h, u_XBKGCV.shape[-1])),
        (u_XBKGCV, w_XBKGCH, left_XBKGCH, decay_XBKG),
    )[1]


def _decays(decay_XBKGC: jax.Array, runs_XBC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The share of the write of position s <= c that is left at position c, and the share of the
    state before the chunk; 0 where a document began in between.

    The exponents after s up to c are added for each pair: the difference of two sums from the start
    would lose digits, and would let one document change the rounding of the next.
    """
    chunk = decay_XBKGC.shape[-1]
    sums_XBKGCS = jnp.einsum(
        "CL,XBKGLS->XBKGCS",
        jnp.tri(chunk),
        jnp.tril(decay_XBKGC[..., None] * jnp.ones(chunk), -1),
        precision=EXACT,
    )
    same_XBCS = (runs_XBC[..., :, None] == runs_XBC[..., None, :]) & jnp.tri(chunk, dtype=bool)
    within_XBKGCS = jnp.where(same_XBCS[:, :, None, None], jnp.exp(sums_XBKGCS), 0.0)
    # The first chunk is compared with itself, since the state before it is zero anyway.
    before_XB1 = jnp.concatenate([runs_XBC[:1, :, :1], runs_XBC[:-1, :, -1:]])
    # The state before a chunk reaches as far as its document does.
    continued_XBC = (runs_XBC == before_XB1)[:, :, None, None]
    since_XBKGC = jnp.exp(sums_XBKGCS[..., 0] + decay_XBKGC[..., :1])
    return within_XBKGCS, jnp.where(continued_XBC, since_XBKGC, 0.0)


@jax.custom_vjp
def _unit_inverse(a: jax.Array) -> jax.Array:
    """(1 + a)^-1 for strictly lower triangular a [.., C, C].

    Inverts blocks on the diagonal and joins pairs of them into blocks of twice the size, so that
    every factor is itself a part of an inverse. Powers of `a`, as in a Neumann product, grow like
    binomial coefficients where keys repeat, and lose all digits.
    """
    size, width = a.shape[-1], 1
    inverse = jnp.broadcast_to(jnp.eye(size), a.shape)
    # triangular_solve takes 0.66 s where this takes 0.29 (whole gradient on a CPU, chunks of 32).
    while width < size:
        block = jnp.arange(size) // width
        # The block below the diagonal of each pair: [[A, 0], [C, B]]^-1 has -B^-1 C A^-1 there.
        corner = jnp.where((block[:, None] == block + 1) & (block % 2 == 0), a, 0.0)
        # Blocks of one are 1 themselves, so the first corner needs no products.
        if width > 1:
            corner = jnp.einsum(
                "...ij,...jk,...kl->...il", inverse, corner, inverse, precision=EXACT
            )
        inverse = inverse - corner
        width *= 2
    return inverse


def _unit_inverse_forward(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _unit_inverse(a)
    return inverse, inverse


def _unit_inverse_backward(inverse: jax.Array, change: jax.Array) -> tuple[jax.Array]:
    # d(A^-1) = -A^-1 dA A^-1: the inverse is all that is kept of the forward pass.
    d_a = jnp.einsum("...ji,...jk,...lk->...il", inverse, change, inverse, precision=EXACT)
    return (-jnp.tril(d_a, -1),)


_unit_inverse.defvjp(_unit_inverse_forward, _unit_inverse_backward)


def _product(equation: str, *x: jax.Array) -> jax.Array:
    """An einsum in the float32 of tensor cores, on devices that have them."""
    return jnp.einsum(equation, *x, precision=jax.lax.Precision.HIGH)


def _chunks(x: jax.Array, chunk: int, heads: int) -> jax.Array:
    """[B, T, heads.., ..] -> [X, B, heads.., C, ..] for `heads` dimensions of heads. The last chunk
    is padded with zeros, numbers of documents with the last of them."""
    # Zeros write and forget nothing. Document numbers repeat the last one: a 0 would begin another.
    rest = -x.shape[1] % chunk
    x = jnp.pad(
        x, ((0, 0), (0, rest), *((0, 0),) * (x.ndim - 2)), mode="constant" if heads else "edge"
    )
    x = jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)
    return jnp.moveaxis(x, 2, 2 + heads)
