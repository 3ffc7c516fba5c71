"""Distillation of a teacher's distributions: the teacher runs beside the student, or its likeliest
tokens are stored with the data. Logits of both exist for one block of positions at a time. Shapes:
B batch  T time  t time of a block  V vocab  K stored tokens."""

import jax
import jax.numpy as jnp
from jax import Array

from maxstack.kernels.sequences import natural
from maxstack.objectives.objective import Batch, Loss, Models, Objective
from maxstack.objectives.statistics import map_blocks
from maxstack.schema.objective import DistillConfig

TINY = 1e-7
"""Least probability of the tokens that are not stored."""


class Distill(Objective):
    """Sum over targets that count of the generalized Jensen-Shannon divergence between teacher and
    student (Agarwal et al. 2024, arXiv:2306.13649, eq. 1): beta 0 is KL(teacher | student), beta 1
    KL(student | teacher)."""

    section: DistillConfig

    @property
    def frozen(self) -> tuple[str, ...]:  # type: ignore[override]
        """The teacher, unless its probabilities are stored."""
        return () if self.section.top else ("teacher",)

    @property
    def forward_passes(self) -> int:
        """0: the teacher's is counted by its own size."""
        return 0

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Metrics: loss, nll (of the targets), agreement (share of targets whose likeliest token is
        the teacher's); and router_loss where the model has one."""
        cfg, model = self.section, models.policy
        mask_BT = batch["mask"]
        x_BTD, aux, _ = model.trunk(batch)
        student_BTD = natural(model.norm(x_BTD))
        if cfg.top:
            divergence_BT, nll_BT, agrees_BT = map_blocks(
                [model],
                self._from_stored,
                [student_BTD],
                batch["targets"],
                batch["teacher_tokens"],
                batch["teacher_logps"],
            )
        else:
            teacher = models.frozen["teacher"]
            # A teacher sees no dropout.
            plain = {name: x for name, x in batch.items() if name != "keys"}
            # Natural order, since blocks of positions of both models must be the same ones.
            teacher_BTD = natural(teacher.norm(teacher.trunk(plain)[0]))
            divergence_BT, nll_BT, agrees_BT = map_blocks(
                [model, teacher],
                self._from_logits,
                [student_BTD, jax.lax.stop_gradient(teacher_BTD)],
                batch["targets"],
            )
        sums = {
            name: (x_BT * mask_BT).sum()
            for name, x_BT in (
                ("loss", divergence_BT + cfg.next_token * nll_BT),
                ("nll", nll_BT),
                ("agreement", agrees_BT),
            )
        }
        return self.make_loss(batch, sums["loss"], sums, aux)

    def evaluate(self, models: Models, batch: Batch) -> dict[str, Array]:
        """The loss, and agreement."""
        return self.evaluate_loss(models, batch, agreement="agreement")

    def _from_logits(
        self, student_BtV: Array, teacher_BtV: Array, targets_Bt: Array
    ) -> tuple[Array, Array, Array]:
        """(divergence, -log p(target), 1 where both find the same token likeliest)."""
        temperature = self.section.temperature
        # Tables may be padded to different sizes beyond the same tokens.
        shared = min(student_BtV.shape[-1], teacher_BtV.shape[-1])  # others are no tokens
        student_BtV = student_BtV[..., :shared]
        teacher_BtV = jax.lax.stop_gradient(teacher_BtV[..., :shared])
        divergence_Bt = divergence(
            jax.nn.log_softmax(student_BtV / temperature),
            jax.nn.log_softmax(teacher_BtV / temperature),
            self.section.beta,
        )
        agrees_Bt = student_BtV.argmax(-1) == teacher_BtV.argmax(-1)
        return divergence_Bt, _nll(student_BtV, targets_Bt), agrees_Bt.astype(jnp.float32)

    def _from_stored(
        self, student_BtV: Array, targets_Bt: Array, tokens_BtK: Array, logps_BtK: Array
    ) -> tuple[Array, Array, Array]:
        """Divergence, -log p(target) and agreement from stored log-probabilities; all other tokens
        count as one."""
        log_z_Bt = jax.nn.logsumexp(student_BtV, axis=-1, keepdims=True)
        # Normalised over the whole vocabulary, not over
        # the stored tokens, whose rest has its own share.
        own_BtK = jnp.take_along_axis(student_BtV, tokens_BtK, axis=-1) - log_z_Bt
        # Where nothing is stored all is the rest, of which the divergence is 0.
        divergence_Bt = divergence(_with_rest(own_BtK), _with_rest(logps_BtK), self.section.beta)
        agrees_Bt = student_BtV.argmax(-1) == tokens_BtK[..., 0]
        return divergence_Bt, _nll(student_BtV, targets_Bt), agrees_Bt.astype(jnp.float32)


def divergence(student_V: Array, teacher_V: Array, beta: float) -> Array:
    """Generalized Jensen-Shannon divergence of log-probabilities [..., V] -> [...]."""
    # At the ends the mixture is one of the two, and the logarithm of beta or of 1 - beta infinite.
    if beta in (0.0, 1.0):
        p, q = (teacher_V, student_V) if beta == 0.0 else (student_V, teacher_V)
        return (jnp.exp(p) * (p - q)).sum(-1)
    mixed_V = jnp.logaddexp(student_V + jnp.log1p(-beta), teacher_V + jnp.log(beta))
    of_teacher = (jnp.exp(teacher_V) * (teacher_V - mixed_V)).sum(-1)
    of_student = (jnp.exp(student_V) * (student_V - mixed_V)).sum(-1)
    return beta * of_teacher + (1 - beta) * of_student


def _with_rest(logps_K: Array) -> Array:
    """[..., K + 1]: with the log-probability of all others."""
    rest = jnp.maximum(1 - jnp.exp(logps_K).sum(-1, keepdims=True), TINY)
    return jnp.concatenate([logps_K, jnp.log(rest)], axis=-1)


def _nll(logits_BtV: Array, targets_Bt: Array) -> Array:
    is_target_BtV = jnp.arange(logits_BtV.shape[-1]) == targets_Bt[..., None]
    picked_Bt = jnp.where(is_target_BtV, logits_BtV, 0.0).sum(-1)
    return jax.nn.logsumexp(logits_BtV, axis=-1) - picked_Bt
