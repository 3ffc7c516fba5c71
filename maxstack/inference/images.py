"""Images from a diffusion transformer.

A solver follows the model's prediction from noise at t = 1 to an image at t = 0. The model's output
is turned into the ends of the path through the present point, image and noise, and the next point
lies on that path; so one solver serves all kinds of prediction and path (objectives/flow.py). Heun
corrects Euler's step by the velocity at its end. Shapes: N images  S side of an image  C channels.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from maxstack import optim
from maxstack.data.images import image_grid
from maxstack.errors import ConfigError
from maxstack.hardware.compiling import in_order
from maxstack.objectives.flow import Flow
from maxstack.schema import objective_rules
from maxstack.schema.mesh import parts

if TYPE_CHECKING:
    from PIL.Image import Image

    from maxstack.report.log import Log
    from maxstack.report.metrics import Writer
    from maxstack.run import Run
    from maxstack.state import State

Solver = Literal["euler", "heun"]
AT_ONCE = 64
"""Images that a step of the solver computes at a time."""


def tile_images(images: Sequence[np.ndarray], classes: int) -> "Image":
    """Arrange images of `classes` classes in turn as a grid, a column per class if few."""
    columns = classes if 1 < classes <= 20 else 10
    return image_grid(np.stack(images), min(columns, len(images)))


class ImageSamples:
    """Draws grids of images with the weights of a step, or their average, on the run's mesh."""

    def __init__(self, run: "Run", log: "Log", writer: "Writer"):
        settings = run.cfg.eval.samples
        assert settings
        self._run = run
        self._log = log
        self._writer = writer
        self._settings = settings
        self._sampler = Sampler(run, None, settings.steps, "euler", settings.guidance)

    def __call__(self, step: int, state: "State") -> None:
        """Draw with the noise of train.seed at every step, so that images can be compared."""
        cfg, classes = self._run.cfg, self._sampler.classes
        self._sampler.params = optim.eval_params(cfg.optimizer, state.opt, state.params)
        labels = (np.arange(self._settings.count) % classes).astype(np.int32)
        images = [*self._sampler(labels, 0, cfg.train.seed)]
        # Hold no weights between evaluations: the next step replaces them.
        self._sampler.params = None
        path = self._writer.image("samples", step, tile_images(images, classes))
        self._log.say(f"samples at step {step}: {path}")


class Sampler:
    """Integrates the model's prediction from noise, at t = 1, to images; image n of a seed does not
    depend on what else is drawn. Euler's steps with path=vp are those of DDIM (Song et al. 2021,
    arXiv:2010.02502, eq. 12 without noise)."""

    def __init__(self, run: "Run", params: Any, steps: int, solver: Solver, guidance: float):
        """`guidance` w: the prediction is u + w (c - u), c with the class and u without (Ho &
        Salimans 2022, arXiv:2207.12598); 1: c alone. ConfigError for a model that was not trained
        so, or whose path the solver does not follow."""
        if not isinstance(run.objective, Flow):
            raise ConfigError(
                f"objective.kind={run.cfg.objective.kind}: only a model trained by flow makes "
                "images"
            )
        if solver == "heun" and run.objective.section.path != "line":
            raise ConfigError("--solver heun: follows objective.path=line alone; use euler")
        self._run = run
        self._flow = run.objective
        self.params = params
        self._guidance = guidance
        self.latents: bool = objective_rules.makes_latents(run.cfg)
        """True where the model makes latents, not pixels."""
        over = parts(run.cfg.mesh.rules["batch"], run.mesh.shape)
        # One number of rows for all calls, so that one program serves them.
        self._rows = -(-AT_ONCE // over) * over
        # From noise at 1 to the image at 0, in equal steps before the shift.
        times = 1.0 - np.arange(steps + 1) / steps
        self._times = np.asarray(self._flow.shifted(times), np.float32)  # type: ignore[arg-type]
        self._move: Callable[..., jax.Array] = self._heun if solver == "heun" else self._euler
        step = jax.jit(run.within(self._move), compiler_options=in_order(run.mesh))
        self._step: Callable[..., jax.Array] = step
        self._placed: NamedSharding = run.batches.of_rows
        everywhere = NamedSharding(run.mesh, PartitionSpec())
        self._whole = jax.jit(lambda x: x, out_shardings=everywhere)
        self._begin = jax.jit(run.within(self._noise), compiler_options=in_order(run.mesh))

    @property
    def classes(self) -> int:
        """Number of classes of the model."""
        return self._flow.model.classes

    def __call__(self, labels: np.ndarray, first: int, seed: int) -> Iterator[np.ndarray]:
        """Yield images [S, S, C] of these classes, uint8, or latents float32, numbered from
        `first`."""
        for begin in range(0, len(labels), self._rows):
            some = labels[begin : begin + self._rows]
            padded = np.zeros(self._rows, np.int32)
            padded[: len(some)] = some
            label = jax.device_put(padded, self._placed)
            numbers = np.arange(self._rows, dtype=np.uint32) + np.uint32(first + begin)
            x = self._begin(jax.device_put(numbers, self._placed), seed)
            # Times are arguments, so one program serves every step.
            for now, after in zip(self._times, self._times[1:], strict=False):
                x = self._step(self.params, x, label, now, after)
            yield from self._values(np.asarray(self._whole(x)), np)[: len(some)]

    def images(self, params: Any, labels: Any, numbers: Any, seed: Any) -> jax.Array:
        """Draw images of classes, int32 [N], with these numbers, uint32 [N], in one function."""

        def moved(x: jax.Array, times: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return self._move(params, x, labels, *times), None

        times = jnp.asarray(self._times)
        # A scan, because a package holds all steps in one program.
        x, _ = jax.lax.scan(moved, self._noise(numbers, seed), (times[:-1], times[1:]))
        return self._values(x, jnp)

    def _noise(self, numbers_N: jax.Array, seed: int) -> jax.Array:
        model = self._flow.model
        shape = model.image_size, model.image_size, model.channels
        key = jax.random.key(seed, impl="threefry2x32")
        # By number, so that an image does not depend on what is drawn beside it.
        return jax.vmap(lambda n: jax.random.normal(jax.random.fold_in(key, n), shape))(numbers_N)

    def _ends(
        self, params: Any, x: jax.Array, label: jax.Array, time: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the image and the noise whose path leads through x."""
        model, flow = nnx.merge(self._run.graph, nnx.State(params)), self._flow

        def by_class(label: jax.Array) -> jax.Array:
            times = jnp.full((x.shape[0],), flow.units(time))
            made, _ = model({"pixels": x, "time": times, "label": label})
            return made[..., : flow.model.channels]

        made = by_class(label)
        # Two passes in place of one; with w = 1 the prediction without class cancels out.
        if self._guidance != 1:
            without = by_class(jnp.full_like(label, flow.model.classes))
            made = without + self._guidance * (made - without)
        return flow.ends(made, x, time)

    def _euler(self, params: Any, x: Any, label: Any, now: Any, after: Any) -> jax.Array:
        image, noise = self._ends(params, x, label, now)
        of_image, of_noise = self._flow.shares(after)
        return of_image * image + of_noise * noise

    def _heun(self, params: Any, x: Any, label: Any, now: Any, after: Any) -> jax.Array:
        """Step by the mean of the velocities at both ends; the last step, which ends at 0, takes
        the first alone."""

        def velocity(x: jax.Array, time: jax.Array) -> jax.Array:
            image, noise = self._ends(params, x, label, time)
            return noise - image

        first = velocity(x, now)
        there = x + (after - now) * first
        second = jax.lax.cond(after > 0, lambda: velocity(there, after), lambda: first)
        return x + (after - now) * (first + second) / 2

    def _values(self, x: Any, library: Any) -> Any:
        """Return pixels from 0 to 255, or latents as in the data; `library` is numpy or jax's."""
        section = self._run.cfg.data.image
        scaled = x * library.asarray(section.std) + library.asarray(section.mean)
        if self.latents:
            return scaled.astype(np.float32)
        return library.round(library.clip(scaled, 0, 1) * 255).astype(np.uint8)
