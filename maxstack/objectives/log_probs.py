"""Losses that are functions of the log-probabilities of tokens. Shapes: B batch  T time  D embed.

Such a loss L(l) has the gradient sum_t (dL/dl_t) dl_t: its derivatives are the weights of a linear
cross-entropy, so that no logits are kept here either, and such an objective only defines `terms`.
First `measure` computes the log-probabilities, `complete` differentiates the loss by them, and
`loss` runs the weighted cross-entropy; that costs one more forward pass of the head.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from maxstack.kernels.sequences import arrange, natural
from maxstack.objectives.next_token import head_losses
from maxstack.objectives.objective import Batch, Loss, Metrics, Models, Objective
from maxstack.objectives.statistics import statistics
from maxstack.schema.objective import ReferenceConfig
from maxstack.weights.adapter import without_adapters

if TYPE_CHECKING:
    from maxstack.models.decoder import Decoder

Sums = dict[str, Array]
"""Arrays [B, T] whose sums are a loss or a metric, by name."""


class Terms(NamedTuple):
    """The loss of log-probabilities at each position, before it is summed."""

    total: Array
    """[B, T]: the loss of each position; their sum is that of the batch."""
    metrics: Sums


class LogProbs(Objective):
    """An objective whose loss is a function of the log-probabilities of targets under the model and
    a reference, and of fields of the batch."""

    section: ReferenceConfig

    def terms(self, batch: Batch) -> Terms:
        """The loss of a batch with `logps`, and where they are asked for `reference_logps` and
        `sharpness`, of all targets [B, T]; natural order. `logps` are 0 in padding."""
        raise NotImplementedError

    @property
    def frozen(self) -> tuple[str, ...]:  # type: ignore[override]
        """The reference, where it is the weights that the run begins with."""
        from_start = self.needs_reference and self.section.reference == "start"
        return ("reference",) if from_start else ()

    @property
    def forward_passes(self) -> int:
        """1 for the reference; the second pass of the head is not counted."""
        return int(self.needs_reference)

    @property
    def needs_reference(self) -> bool:
        """Whether the step computes log-probabilities of the reference for each token; False if
        there is none, or if the records store them."""
        return False

    @property
    def needs_sharpness(self) -> bool:
        """True where the loss needs log sum p^2."""
        return False

    @property
    def temperature(self) -> float:
        """Divides the logits of model and reference."""
        return 1.0

    def extra_loss(self, models: Models, batch: Batch, normed_BTD: Array) -> tuple[Array, Metrics]:
        """A term of the loss that is not a function of log-probabilities, and its metrics, of a
        batch that `complete` has completed."""
        return jnp.zeros(()), {}

    def measure(self, models: Models, batch: Batch) -> Batch:
        """Add the fields that `terms` reads."""
        x_BTD, _, _ = models.policy.trunk(batch)
        return self._measured(models, batch, models.policy.norm(x_BTD))

    def complete(self, batch: Batch) -> Batch:
        """Add `coefficients`, the derivatives of the loss by `logps`, and the terms of loss and
        metrics."""

        def loss(logps_BT: Array) -> tuple[Array, Terms]:
            terms = self.terms({**batch, "logps": logps_BT})
            return terms.total.sum(), terms

        coefficients_BT, terms = jax.grad(loss, has_aux=True)(batch["logps"])
        named = {f"sum/{name}": x for name, x in {"loss": terms.total, **terms.metrics}.items()}
        return jax.lax.stop_gradient({**batch, "coefficients": coefficients_BT, **named})

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Metrics: loss, those of `terms`, and router_loss where the model has one."""
        model = models.policy
        x_BTD, aux, _ = model.trunk(batch)
        normed_BTD = model.norm(x_BTD)
        # Not coupled, or a single microbatch: it needs no other rows than its own.
        if "coefficients" not in batch:
            batch = self.complete(self._measured(models, batch, normed_BTD))
        pulled = head_losses(
            model,
            normed_BTD,
            arrange(batch["targets"]),
            -arrange(batch["coefficients"]),
            temperature=self.temperature,
        ).total
        metrics = {
            name.removeprefix("sum/"): x.sum()
            for name, x in batch.items()
            if name.startswith("sum/")
        }
        beside, more = self.extra_loss(models, batch, normed_BTD)
        # The value is the loss's, the gradient that of the weighed log-probabilities.
        total = metrics["loss"] + beside + pulled - jax.lax.stop_gradient(pulled)
        return self.make_loss(batch, total, {**metrics, **more}, aux)

    def _measured(self, models: Models, batch: Batch, normed_BTD: Array) -> Batch:
        model, real_BT = models.policy, batch["segments"] > 0
        logps_BT = log_probs(model, normed_BTD, batch["targets"], self.temperature)
        # 0 in padding, where a log-probability of some token would enter sums over a row.
        measured = {"logps": logps_BT * real_BT}
        if self.needs_sharpness:
            found = statistics(model, natural(normed_BTD), batch["targets"])
            measured["sharpness"] = found.sharpness
        if self.needs_reference and "reference_logps" not in batch:
            measured["reference_logps"] = self._reference(models, batch)
        return {**batch, **jax.lax.stop_gradient(measured)}

    def _reference(self, models: Models, batch: Batch) -> Array:
        if "reference" in models.frozen:
            return log_probs_of(models.frozen["reference"], batch, self.temperature)
        assert self.section.reference == "adapter_off"
        # The base model is the reference, which costs no second set of weights.
        with without_adapters():
            return log_probs_of(models.policy, batch, self.temperature)


def log_probs(
    model: "Decoder", normed_BTD: Array, targets_BT: Array, temperature: float = 1.0
) -> Array:
    """log p(target) [B, T] in natural order, without gradient; logits are divided by
    `temperature`."""
    targets_BT = arrange(targets_BT)
    # Weights of 0, since only the log-probabilities of the tokens are read.
    unweighed_BT = jnp.zeros(targets_BT.shape, jnp.float32)
    losses = head_losses(
        model, normed_BTD, targets_BT, unweighed_BT, without_gradient=True, temperature=temperature
    )
    return -natural(losses.nll)


def log_probs_of(model: "Decoder", batch: Batch, temperature: float = 1.0) -> Array:
    """log p(target) [B, T] under a model that is not trained."""
    # A reference sees neither dropout nor noise.
    keyless = {name: x for name, x in batch.items() if name not in ("keys", "embedding_noise")}
    x_BTD, _, _ = model.trunk(keyless)
    return jax.lax.stop_gradient(log_probs(model, model.norm(x_BTD), batch["targets"], temperature))
