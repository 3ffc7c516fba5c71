"""The protocol of models: an nnx module built from its section of the configuration, with
placeholders; weights are drawn apart, by path, straight into their shards."""

import pkgutil
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from maxstack.layers.weight import draw
from maxstack.schema.parts import ModelPart

Reports = Mapping[tuple[str, ...], jax.Array]
"""Sums over the tokens of a batch that the layers of a model report, by path."""


class Model(nnx.Module):
    """A model with placeholders for weights; `initial` draws them."""

    def __init__(self, cfg: Any):
        self.cfg = cfg

    @staticmethod
    def after_step(
        cfg: Any, params: dict[str, Any], reports: Reports
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """The weights after the optimizer's update, changed by the model's own rules, and scalars
        for the metrics."""
        return params, {}


def model_of(cfg: ModelPart) -> type[Model]:
    """The class of the model that a section configures."""
    model: type[Model] = pkgutil.resolve_name(cfg.MODEL)
    return model


def abstract(cfg: ModelPart) -> tuple[Any, nnx.State]:
    """The model's graph and its weights as shapes."""
    return nnx.split(nnx.eval_shape(lambda: model_of(cfg)(cfg)))


def weights_of(cfg: ModelPart) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each weight by path, neither quantized nor with adapters."""
    return nnx.traversals.flatten_mapping(nnx.to_pure_dict(abstract(cfg)[1]), sep="/")


def initial(cfg: ModelPart, seed: int) -> dict[str, Any]:
    """Initial weights by path, as nested dicts."""
    # By path and not in order, so that a weight's values do not depend on which others there are.
    drawn = {path: draw(param, path, seed) for path, param in nnx.to_flat_state(abstract(cfg)[1])}
    return nnx.traversals.unflatten_mapping(drawn)
