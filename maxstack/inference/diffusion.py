"""Sampling from a masked-diffusion language model.

All positions that are not given begin as mask tokens. Each step computes the logits of all
positions, draws a token for each hidden one, ranks them (at random, or by how sure the model is)
and fills the best of them in for good; the others stay hidden. Shapes: B batch  T time  V vocab.
"""

from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from maxstack.errors import ConfigError
from maxstack.hardware.compiling import in_order
from maxstack.objectives.masked_diffusion import EXCLUDED, MaskedDiffusion
from maxstack.objectives.objective import row_keys
from maxstack.schema.mesh import parts

if TYPE_CHECKING:
    from maxstack.run import Run

Order = Literal["random", "confidence", "margin", "entropy"]
ORDERS = get_args(Order)


def sample(
    run: "Run",
    params: Any,
    tokens_BT: np.ndarray,
    given_BT: np.ndarray,
    *,
    steps: int,
    order: Order,
    temperature: float,
    seed: int,
) -> np.ndarray:
    """Return rows with every position filled in that is not `given_BT`, int32 [B, T].

    Each of `steps` steps fills an equal share of what is hidden: where `order` says, by a draw from
    the model's distribution at `temperature` (0: the likeliest token). A row's numbers follow from
    seed, step and row alone. confidence: the largest probability first (Chang et al. 2022,
    arXiv:2202.04200); margin: the largest lead of the first over the second; entropy: the smallest
    entropy; random: as the training hides. ConfigError for a model that is not trained so.
    """
    if not isinstance(run.objective, MaskedDiffusion):
        raise ConfigError(
            f"objective.kind={run.cfg.objective.kind}: only a model trained by masked_diffusion "
            "or flow is sampled so"
        )
    everywhere = NamedSharding(run.mesh, PartitionSpec())
    rules, (rows, length) = run.cfg.mesh.rules, tokens_BT.shape
    over, pieces = (parts(rules[axis], run.mesh.shape) for axis in ("batch", "seq"))
    # A ring over `seq` cuts each row in two pieces for each device.
    padding = (0, -rows % over), (0, -length % (2 * pieces))
    filled = np.where(given_BT, tokens_BT, run.objective.mask_token).astype(np.int32)
    hidden_BT = jax.device_put(np.pad(~given_BT, padding), everywhere)
    x_BT = jax.device_put(np.pad(filled, padding), everywhere)
    step = jax.jit(
        run.within(_step(run, run.objective, length, order, temperature)),
        compiler_options=in_order(run.mesh),
    )
    total = int((~given_BT).sum(axis=1).max(initial=0))
    # A step that fills nothing would compute for nothing.
    steps = min(steps, total)
    for number in tqdm(range(steps), desc="sampling", unit=" steps", disable=None):
        # Shares that differ by one at most and add up to the total.
        count = total * (number + 1) // steps - total * number // steps
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), number)
        x_BT, hidden_BT = step(params, x_BT, hidden_BT, count, key)
    return np.asarray(x_BT)[:rows, :length]


def _step(
    run: "Run", objective: MaskedDiffusion, length: int, order: Order, temperature: float
) -> Any:
    def step(
        params: Any, x_BT: jax.Array, hidden_BT: jax.Array, count: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(run.graph, nnx.State(params))
        # Padding has a segment of its own, so that no token reads it.
        positions_BT = jnp.broadcast_to(jnp.arange(x_BT.shape[1]), x_BT.shape)
        segments_BT = (positions_BT < length).astype(jnp.int32)
        batch = {"tokens": x_BT, "positions": positions_BT, "segments": segments_BT}
        logits_BTV = model.logits(model.hidden(batch))
        if objective.section.shift:
            logits_BTV = jnp.pad(logits_BTV[:, :-1], ((0, 0), (1, 0), (0, 0)))
        # A position must not be filled with the mask itself.
        logits_BTV = logits_BTV.at[..., objective.mask_token].add(EXCLUDED)
        # A key for each row: its text does not depend on the number of rows or the mesh.
        keys_B = jax.random.wrap_key_data(row_keys(key, x_BT.shape[0]), impl="threefry2x32")
        noise, shape = jax.random.gumbel, logits_BTV.shape[1:]
        drawn_BTV = logits_BTV
        # Gumbel noise of ordinary float32 precision is cut off, which acts as a lower temperature.
        if temperature:
            draw = jax.vmap(lambda key: noise(key, shape, mode="high"))(keys_B)
            drawn_BTV = logits_BTV / temperature + draw
        best_BT = drawn_BTV.argmax(-1).astype(x_BT.dtype)
        if order == "random":
            score_BT = jax.vmap(
                lambda key: jax.random.uniform(jax.random.fold_in(key, 1), shape[:1])
            )(keys_B)
        else:
            score_BT = _score(order, jax.nn.log_softmax(logits_BTV), best_BT)
        score_BT = jnp.where(hidden_BT, score_BT, -jnp.inf)
        # Sorting the order gives each position its rank, so that exactly `count` are chosen, ties
        # too.
        rank_BT = jnp.argsort(jnp.argsort(-score_BT, axis=1), axis=1)
        chosen_BT = hidden_BT & (rank_BT < count)
        return jnp.where(chosen_BT, best_BT, x_BT), hidden_BT & ~chosen_BT

    return step


def _score(order: Order, log_p_BTV: jax.Array, best_BT: jax.Array) -> jax.Array:
    """Return the confidence in each position, [B, T]."""
    if order == "confidence":
        return jnp.take_along_axis(log_p_BTV, best_BT[..., None], axis=-1)[..., 0]
    if order == "margin":
        first, second = jnp.moveaxis(jax.lax.top_k(jnp.exp(log_p_BTV), 2)[0], -1, 0)
        return first - second
    return (jnp.exp(log_p_BTV) * log_p_BTV).sum(-1)
