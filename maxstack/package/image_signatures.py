"""Signatures of encoders and diffusion transformers. Shapes: B batch  S side of an image
C channels  K classes  F features."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxstack.inference.images import Sampler, Solver
from maxstack.objectives.images import ImageObjective
from maxstack.package.signature import Array, Arrays, Signature
from maxstack.state import flat, tree

if TYPE_CHECKING:
    from maxstack.run import Run

# Images have one size, so the batch alone is open.
ANY = [{"batch": None}]


def image_signatures(run: "Run") -> Iterator[Signature]:
    """Yield the signatures that read images, or latents, as the data of the run has them."""
    objective: Any = run.objective
    assert isinstance(objective, ImageObjective)
    model: Any = run.cfg.model
    dtype = "float32" if run.cfg.data.has_latents else "uint8"
    shape = "batch", model.image_size, model.image_size, model.channels
    inputs = {"images": Array(shape, dtype)}

    def features(arrays: Arrays, inputs: Arrays) -> tuple[Any, jax.Array]:
        model: Any = nnx.merge(run.graph, nnx.State(tree(arrays)))
        x_BTD, _, _ = model.trunk({"pixels": objective.pixels(inputs["images"])})
        return model, model.features(x_BTD)

    def classified(arrays: Arrays, state: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        model, features_BF = features(arrays, inputs)
        return {"logits": model.logits(features_BF).astype(jnp.float32)}, {}

    def embedded(arrays: Arrays, state: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        return {"embedding": features(arrays, inputs)[1].astype(jnp.float32)}, {}

    if model.has_head:
        outputs = {"logits": ("batch", model.classes)}
        yield Signature("classify", "Logits of classes.", classified, inputs, outputs, ANY)
    # A trace tells the number of features without computing any.
    made = jax.eval_shape(
        lambda arrays, given: run.within(embedded)(arrays, {}, given)[0],
        flat(run.abstract.params),
        {"images": jax.ShapeDtypeStruct((1, *shape[1:]), dtype)},
    )
    outputs = {"embedding": ("batch", made["embedding"].shape[1])}
    yield Signature("embed", "Features, as the head reads them.", embedded, inputs, outputs, ANY)


def sampling_signatures(
    run: "Run", steps: int, solver: Solver, guidance: float
) -> Iterator[Signature]:
    """Yield the signature that makes images of classes, as `maxstack sample` does: number n of a
    seed is the same whatever else is made."""
    sampler = Sampler(run, None, steps, solver, guidance)
    model: Any = run.cfg.model
    outputs = {"images": ("batch", model.image_size, model.image_size, model.channels)}

    def sampled(arrays: Arrays, state: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        images = sampler.images(tree(arrays), inputs["labels"], inputs["numbers"], inputs["seed"])
        return {"images": images}, {}

    inputs = {
        "labels": Array(("batch",), "int32", (0, max(sampler.classes - 1, 0))),
        "numbers": Array(("batch",), "uint32"),
        "seed": Array((), "uint32"),
    }
    about = f"Images of classes, by {steps} steps of {solver} with guidance {guidance:g}."
    yield Signature("sample", about, sampled, inputs, outputs, ANY)
