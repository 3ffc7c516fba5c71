"""A mixer and an objective that the package does not have, as a user of it would write them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.data import lanes
from maxstack.kernels.sequences import natural
from maxstack.layers.layer import Layer
from maxstack.layers.weight import project
from maxstack.objectives.objective import Field, Loss, Models, Objective, token_fields
from maxstack.schema.mixers import MixerPart
from maxstack.schema.objective import ObjectivePart
from maxstack.schema.parts import Count, Dim, Parts, matrix


class MeanConfig(MixerPart):
    """Mean over the earlier positions of a document."""

    LAYER = "Mean"

    heads: int
    head_dim: int

    def _value(self) -> tuple[Dim, Dim]:
        heads, size = Dim("heads", self.heads, "heads"), Dim("head_dim", self.head_dim, "head_dim")
        return heads, size

    def parts(self, width: Dim) -> Parts:
        out = matrix(*self._value(), width, contract=2, out=True)
        return {"value": matrix(width, *self._value()), "out": out}

    def saved(self) -> dict[str, tuple[Dim, ...]]:
        return {"averaged": self._value()}

    def attended(self, seq_len: int) -> dict[str, Count]:
        each = 6 * self.heads * self.head_dim
        return {"mean": Count(each * (seq_len + 1) / 2, each * seq_len)}


class Mean(Layer):
    """The layer of MeanConfig."""

    def __call__(self, x_BTD: jax.Array, context: Any) -> jax.Array:
        v_BTNH, time = project(x_BTD, self.value), jnp.arange(x_BTD.shape[1])
        seen_BTS = jnp.broadcast_to(time[:, None] >= time, (x_BTD.shape[0], len(time), len(time)))
        if (segments_BT := context.segments_BT) is not None:
            seen_BTS &= segments_BT[:, :, None] == segments_BT[:, None, :]
        share_BTS = seen_BTS / jnp.maximum(seen_BTS.sum(-1, keepdims=True), 1)
        mean_BTNH = jnp.einsum("BTS,BSNH->BTNH", share_BTS.astype(x_BTD.dtype), v_BTNH)
        averaged_BTNH = jax.ad_checkpoint.checkpoint_name(mean_BTNH, "averaged")
        return project(averaged_BTNH, self.out)


class NearConfig(ObjectivePart):
    """Emphasised tokens, near a reference, through noise."""

    OBJECTIVE = "Near"
    RANDOM = True


class Near(Objective):
    """Cross-entropy, each row times its emphasis, of logits with noise, and their distance from
    those of the weights that the run began with."""

    frozen = ("reference",)

    @property
    def fields(self) -> dict[str, Field]:
        return token_fields(self.cfg) | {
            "emphasis": Field("batch", "float32", lane="toys:EmphasisedLane")
        }

    def prepare(self, batch: Any, key: jax.Array) -> Any:
        rows, length = batch["tokens"].shape
        noise_BT = jax.vmap(lambda row: jax.random.normal(jax.random.fold_in(key, row), (length,)))(
            jnp.arange(rows)
        )
        return {**batch, "noise": noise_BT, "real_rows": (batch["mask"].max(1) > 0).sum()}

    def loss(self, models: Models, batch: Any) -> Loss:
        model, reference = models.policy, models.frozen["reference"]
        x_BTD, aux, _ = model.trunk(batch)
        logits_BTV = model.logits(natural(model.norm(x_BTD)))
        reference_BTV = reference.logits(reference.hidden(batch))
        noisy_BTV = logits_BTV * (1 + 0.1 * batch["noise"][:, :, None])
        chosen_BTV = jax.nn.one_hot(batch["targets"], logits_BTV.shape[-1])
        nll_BT = -(jax.nn.log_softmax(noisy_BTV) * chosen_BTV).sum(-1) * batch["mask"]
        distance = (jnp.square(logits_BTV - reference_BTV).mean(-1) * batch["mask"]).sum()
        total = (nll_BT * batch["emphasis"][:, None]).sum()
        metrics = {
            "loss": total,
            "distance": distance,
            "rows": batch["real_rows"] * batch["mask"].sum(),
        }
        return self.make_loss(batch, total + 0.01 * distance, metrics, aux)


class EmphasisedLane(lanes.Lane):
    """Rows with an emphasis."""

    @classmethod
    def arrays(cls, cfg: Any, fields: Any) -> dict[str, np.dtype]:
        return super().arrays(cfg, fields) | {"emphasis": np.dtype(np.float32)}

    def fill(self, row: lanes.Batch) -> None:
        super().fill(row)
        row["emphasis"][...] = 1 + int(row["tokens"][0]) % 3
