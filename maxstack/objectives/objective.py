"""The protocol of objectives: the fields of a batch that an objective needs, and the loss that it
computes from them.

A loss is sums and a weight, never means (`Loss`): microbatches and devices add sums, and a step
divides once, so padding, masks and accumulation are exact. Terms of the model's own parts (routers,
multi-token prediction) are means by counts of their own; their sums are multiplied by `factors` of
the global batch before that one division. A step calls `prepare` on the global batch, then `loss`
on each microbatch. Where rows depend on each other (`coupled`) and there are several microbatches,
`measure` on each and `complete` on all of them together come before the first `loss`; of a single
microbatch, `loss` calls both.
"""

import dataclasses
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax

from maxstack.models.block import Aux
from maxstack.models.model import Reports
from maxstack.models.stack import losses_and_reports
from maxstack.schema.objective import RowField as Field

if TYPE_CHECKING:
    from maxstack.schema.config import Config

Batch = Mapping[str, jax.Array]
Metrics = Mapping[str, jax.Array]
"""Sums to report, by name."""


class Loss(NamedTuple):
    """Sums and a weight, never means: accumulation, padding and devices stay exact. All float32."""

    total: jax.Array
    """The value that is differentiated."""
    weight: jax.Array
    """Divisor of the sums: how many tokens, pairs or answers the objective counts."""
    metrics: dict[str, jax.Array]
    """Terms of `total` and other sums to report, by name; the log shows `loss`. The sum `x` is
    divided by `x/weight` where there is one."""
    reports: Reports
    """Reports of the model's layers, for Model.after_step."""


@dataclasses.dataclass(frozen=True)
class Models:
    """The model that is trained, and frozen models beside it."""

    policy: Any
    frozen: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Models by name, as in Objective.frozen."""


class Objective:
    """A loss over batches of certain fields; objective.kind chooses it."""

    frozen: tuple[str, ...] = ()
    """Names of frozen copies of the starting weights, such as the reference."""
    coupled: bool = False
    """True where the loss of a row depends on other rows."""
    unit: ClassVar[str] = "tokens"
    """The unit that `Loss.weight` counts."""
    annotations: tuple[str, ...] = ()
    """Fields of a batch, float32 [B, T], that `annotate` makes when its rollout is first learned
    from."""

    section: Any
    """The section `objective` of the configuration."""
    model: Any
    """The section `model`."""

    def __init__(self, cfg: "Config"):
        self.cfg = cfg
        self.section = cfg.objective
        self.model = cfg.model

    def check_trains(self) -> None:
        """Raise ConfigError if this objective cannot train the model."""

    @property
    def forward_passes(self) -> int:
        """Forward passes of a step beside that of the model that is trained."""
        return len(self.frozen)

    @property
    def fields(self) -> Mapping[str, Field]:
        """Arrays that a batch must hold, by name."""
        return token_fields(self.cfg)

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """Add the fields that are drawn or counted over the whole global batch of a step, before it
        is cut into microbatches: arrays [B, ...], and scalars that every microbatch gets. `key`
        depends on seed and step; fold in the row for what belongs to one."""
        return batch

    def annotate(self, models: Models, batch: Batch) -> Batch:
        """The `annotations` of a batch that lacks them."""
        raise NotImplementedError

    def measure(self, models: Models, batch: Batch) -> Batch:
        """Add the fields that `complete` reads to a microbatch, where `coupled`, without
        gradient."""
        return batch

    def complete(self, batch: Batch) -> Batch:
        """Add the fields that `loss` reads to the measured global batch, where `coupled`."""
        return batch

    def weight(self, batch: Batch) -> jax.Array:
        """`Loss.weight` of a batch or microbatch, float32; by default its counted targets. It
        follows from the batch alone, so that it is known of all microbatches before the first."""
        return batch["mask"].astype(jax.numpy.float32).sum()

    def tokens(self, batch: Batch) -> jax.Array:
        """The number of tokens that the layers see, float32: the divisor of the routers' loss."""
        # Segment 0 is padding.
        if "segments" in batch:
            return (batch["segments"] > 0).sum().astype(jax.numpy.float32)
        real = batch.get("real", jax.numpy.ones(batch["tokens"].shape, bool))
        return real.sum().astype(jax.numpy.float32)

    def factors(self, batch: Batch) -> Batch:
        """Factors of the global batch for terms of the model's own parts. Where the objective
        counts pairs, for example, the step divides by pairs, while router_loss is a mean over
        tokens: its factor is pairs / tokens."""
        weight, factors = self.weight(batch), {}
        if any(block.experts for block in self.cfg.model.blocks.values()):
            factors["factor/router_loss"] = weight / jax.numpy.maximum(self.tokens(batch), 1.0)
        if self.cfg.model.mtp_depth:
            # Counted targets, also where the objective itself counts samples or pairs.
            targets = Objective.weight(self, batch)
            factors["factor/mtp_loss"] = weight / divisor(targets)
        return factors

    def loss(self, models: Models, batch: Batch) -> Loss:
        """The loss of a microbatch, with metrics as in Loss.metrics."""
        raise NotImplementedError

    def make_loss(
        self, batch: Batch, total: jax.Array, metrics: Metrics, aux: Aux, **added: jax.Array
    ) -> Loss:
        """The loss with terms of the model's own parts: `added`, and router_loss from the reports
        of its blocks, `aux`."""
        routers, reports = losses_and_reports(aux)
        metrics = {**metrics}
        for name, value in (added | routers).items():
            total = total + value * batch.get(f"factor/{name}", 1.0)
            # The metric is a mean by its own count, without the factor.
            count = self.tokens(batch) if name in routers else Objective.weight(self, batch)
            metrics |= {name: value, f"{name}/weight": count}
        return Loss(total, self.weight(batch), metrics, reports)

    def evaluate(self, models: Models, batch: Batch) -> dict[str, jax.Array]:
        """Sums over a held-out batch: `nll` and its `weight`, `bytes` of text; for any other metric
        x, `x` and `x/weight`. By default the loss, with the same random numbers each time."""
        return self.evaluate_loss(models, batch) | {"bytes": batch["bytes"].sum()}

    def evaluate_loss(self, models: Models, batch: Batch, **figures: str) -> dict[str, jax.Array]:
        """The loss of a held-out batch with the same random numbers each time, and metrics of it by
        the names of `figures`."""
        # A fixed key, so that two evaluations differ by the weights alone.
        result = self.loss(models, self.prepare(batch, jax.random.key(0, impl="threefry2x32")))
        sums = {"nll": result.metrics["loss"], "weight": result.weight}
        for name, metric in figures.items():
            sums[name] = result.metrics[metric]
            sums[f"{name}/weight"] = result.metrics.get(f"{metric}/weight", result.weight)
        return sums


def objective_of(cfg: "Config", trains: bool = False) -> Objective:
    """The objective of a configuration. ConfigError if it `trains` and cannot train the model."""
    objective: Objective = pkgutil.resolve_name(cfg.objective.OBJECTIVE)(cfg)
    if trains:
        objective.check_trains()
    return objective


def token_fields(cfg: "Config") -> dict[str, Field]:
    """Fields of rows of tokens: positions and segments where rows hold several documents; `real`
    where they do not, but padding must go to no expert."""
    packed = any(data.packing != "none" or data.has_records for data in cfg.data_sections.values())
    fields = {"tokens": "int32", "targets": "int32", "mask": "float32"}
    if packed:
        fields |= {"positions": "int32", "segments": "int32"}
    # Padding would fill experts, and rows without segments do not tell it from tokens.
    elif any(block.experts for block in cfg.model.blocks.values()):
        fields |= {"real": "bool"}
    return {
        name: Field("batch seq", dtype) for name, dtype in fields.items()
    } | cfg.objective.row_fields


def divisor(weight: jax.Array) -> jax.Array:
    """The divisor of sums of this weight: 1 where it is 0, since the sums are then 0 too."""
    return jax.numpy.where(weight > 0, weight, 1.0)


def row_keys(key: jax.Array, rows: int) -> jax.Array:
    """uint32 [rows, 2]: a random key for each row of a global batch, the same on any mesh and in
    any microbatch."""
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jax.numpy.arange(rows))
    return jax.random.key_data(keys)


def content_keys(values: jax.Array, seed: int = 0) -> jax.Array:
    """A random key for each row [B], from a seed and a hash of the row's numbers [B, ...]: the same
    in any batch."""
    if jax.numpy.issubdtype(values.dtype, jax.numpy.floating):
        # The bits, since a cast to integers would make all numbers of [0, 1) equal.
        values = jax.lax.bitcast_convert_type(values.astype(jax.numpy.float32), jax.numpy.uint32)
    rows = values.reshape(values.shape[0], -1).astype(jax.numpy.uint32)
    places = jax.numpy.arange(rows.shape[1], dtype=jax.numpy.uint32) * 2 + 1
    # Odd factors lose no bit modulo 2^32 and differ by place; + 1 makes zeros count too.
    products = (rows + 1) * places * jax.numpy.uint32(0x9E3779B9)
    hashes = products.sum(axis=1, dtype=jax.numpy.uint32)
    first = jax.random.key(seed, impl="threefry2x32")
    return jax.vmap(lambda hashed: jax.random.fold_in(first, hashed))(hashes)
