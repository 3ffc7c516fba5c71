"""What the rollouts of a run need and how long they take at the least, by sums over shapes: the
engine's part of `maxstack plan`."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from maxstack.errors import ConfigError
from maxstack.inference import capacity
from maxstack.inference.layout import Layout
from maxstack.inference.page_cache import Limits
from maxstack.inference.programs import original_paths, prepare_weights
from maxstack.inference.roofline import Device, Speed, forward_flops
from maxstack.plan.fit import shard_bytes
from maxstack.plan.rollout import Least, Rollout, phases
from maxstack.plan.topology import Topology, groups
from maxstack.rollouts.generator import engine_run, moved_bytes
from maxstack.schema.mesh import parts
from maxstack.state import count, flat
from maxstack.weights.cpu_matrix import with_cpu_matrices

if TYPE_CHECKING:
    from maxstack.plan.report import Plan
    from maxstack.run import Run
    from maxstack.schema.config import Config


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of the samples to count with."""

    prompt: int
    answer: int

    @classmethod
    def of(cls, cfg: "Config", length: int | None, prompt: int | None) -> "Lengths":
        """Those of the command line; where it says nothing, the most that a sample can have.
        ConfigError for samples that the run cannot have."""
        rollout = cfg.rollout
        assert rollout
        room = rollout.room(cfg.train.batch_size, cfg.data.seq_len)
        most = rollout.max_tokens * (rollout.environment.turns if rollout.environment else 1)
        if length is None:
            length = room if prompt is None else min(room, prompt + rollout.max_tokens)
        given = max(1, length - rollout.max_tokens) if prompt is None else prompt
        if length > room:
            raise ConfigError(f"--length {length}: a sample of this run has {room} tokens at most")
        if not 0 < length - given <= most:
            raise ConfigError(
                f"--length {length} --prompt {given}: leave {length - given} tokens for the "
                f"answer, and rollout.max_tokens allows 1 to {most}"
            )
        return cls(given, length - given)


def with_rollouts(plan: "Plan", run: "Run", topology: Topology, lengths: Lengths) -> "Plan":
    """The plan of a step with that of the rollouts that it learns from."""
    rollout = run.cfg.rollout
    assert rollout
    own = _own_devices(run, topology)
    engine, limits, _ = engine_run(run, rollout.prompts * rollout.samples, own)
    cfg, sizes = engine.cfg, dict(engine.mesh.shape)
    layout = Layout.of(cfg.decoder, cfg.serve, topology.platform)
    in_update, in_rollout = _memory(run, engine, layout, limits)
    device = Device.of(cfg, _of_engine(topology, engine), sizes)
    engines = run.mesh.size // engine.mesh.size
    replicas = engines * parts(cfg.mesh.rules["batch"], sizes)
    answers = math.ceil(rollout.prompts * rollout.samples * rollout.on_policy / replicas)
    sampling: dict[str, Least] = {}
    learning: dict[str, Least] = {}
    if device:
        times = _Times(cfg, layout, limits, device, lengths)
        moved = moved_bytes(run.abstract.params, engine.abstract.params)
        sampling = {
            **_moving(moved / engine.mesh.size, topology, run.mesh.shape),
            "prompts": times.prompts(
                rollout.prompts * rollout.on_policy / replicas, rollout.samples
            ),
            "answers": times.answers(answers),
        }
    if plan.roofline:
        update = Least(rollout.steps * plan.roofline.seconds, plan.roofline.limit)
        learning = {**_before(run, topology), "update": update}
    made = Rollout(
        prompts=rollout.prompts,
        samples=rollout.samples,
        prompt=lengths.prompt,
        answer=lengths.answer,
        requests=min(answers, limits.requests),
        replicas=replicas,
        steps=rollout.steps,
        number=run.cfg.train.steps / rollout.steps,
        in_update=in_update,
        in_rollout=in_rollout,
        sampling=sampling,
        learning=learning,
    )
    beside = plan.needed + sum(in_update.values())
    sampled = sum(phases(plan.memory, made)["rollout"].values())
    return dataclasses.replace(plan, rollout=made, needed=max(beside, sampled))


def _own_devices(run: "Run", topology: Topology) -> list[Any]:
    """The devices of the first process, where a real run has one on each host; none where one
    drives all."""
    devices = [*run.mesh.devices.flat]
    own = [device for device in devices if device.process_index == devices[0].process_index]
    alone = topology.name == "here" or run.cfg.runtime == "pathways" or len(own) == len(devices)
    return [] if alone else own


def _of_engine(topology: Topology, engine: "Run") -> Topology:
    """The hardware of one engine: all of it, or that of a process."""
    if engine.mesh.size == topology.size:
        return topology
    chips = engine.mesh.size // (topology.chip.devices if topology.chip else 1)
    sides = (1,) * (len(topology.sides) - 1) + (chips,)
    return dataclasses.replace(topology, sides=sides, slices=1)


def cache_bytes(run: "Run") -> dict[str, int]:
    """Bytes of one device that a run's engine takes for its cache as soon as it is made."""
    rollout = run.cfg.rollout
    if not rollout:
        return {}
    engine, limits, _ = engine_run(run, rollout.prompts * rollout.samples)
    platform = run.mesh.devices.flat[0].platform
    layout = Layout.of(engine.cfg.decoder, engine.cfg.serve, platform)
    return {"cache": _cache(engine, layout, limits)}


def _cache(engine: "Run", layout: Layout, limits: Limits) -> int:
    return capacity.cache_bytes(layout.on(engine.cfg.mesh, engine.mesh.shape), limits)


def _memory(
    run: "Run", engine: "Run", layout: Layout, limits: Limits
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of one device that the engine takes by part, while a step is computed and while samples
    are made."""
    rollout = run.cfg.rollout
    assert rollout
    cache = {"cache": _cache(engine, layout, limits)}
    step = round(capacity.step_bytes(engine.cfg, dict(engine.mesh.shape)))
    works = {"engine's weights": copied_bytes(engine), "engine's step": step}
    whole = shard_bytes(run.abstract.params)
    if rollout.ahead and run.mesh.size == 1:  # beside training, which takes the weights themselves
        held = {**cache, **works, "copies for it": rollout.ahead * whole}
        return held, held | {"copies for it": (1 + rollout.ahead) * whole}
    if engine.mesh.size < run.mesh.size:  # every device has all of them on the way
        moved = count(run.abstract.params)[1] + shard_bytes(engine.abstract.params)
    else:
        moved = _moved(run.abstract.params, engine.abstract.params)
    return cache, {**cache, **works, "weights moved to it": moved}


def copied_bytes(engine: "Run") -> int:
    """Bytes of one device that weights take as the engine's steps read them, without those that it
    reads where they lie."""
    state, cfg, makers = engine.weights.rewrite.state, engine.cfg, {}
    if engine.mesh.size == 1 and engine.mesh.devices.flat[0].platform == "cpu":
        matrices = with_cpu_matrices(engine.graph, state)[1]
        makers = {path: matrix.convert for path, matrix in matrices.items()}
    params, original = engine.abstract.params, original_paths(engine)
    read = functools.partial(
        prepare_weights, state, makers=makers, original=original, dtype=cfg.model.dtype, keep=True
    )
    made, total = flat(jax.eval_shape(read, params)), 0
    for path, leaf in flat(params).items():
        kept = made[f"{path}/kept" if path in makers else path]
        if isinstance(kept, tuple) or path in makers or kept.dtype != leaf.dtype:
            size = sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(kept))
            total += size * math.prod(leaf.sharding.shard_shape(leaf.shape)) // leaf.size
    return total


def _moved(ours: Any, theirs: Any) -> int:
    """Bytes on one device of arrays of the second tree that lie otherwise than in the first."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return sum(
        shard_bytes(other)
        for leaf, other in pairs
        if not leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim)
    )


def _moving(moved: float, topology: Topology, sizes: Mapping[str, int]) -> dict[str, Least]:
    """Time of weights that move to where the engine wants them, so many bytes to each device at its
    link's bandwidth."""
    axes = tuple(axis for axis, size in sizes.items() if size > 1)
    if not (moved and axes):
        return {}
    link = groups(topology, tuple(sizes.values()))(axes)
    seconds = moved / link.bandwidth if link.bandwidth else 0.0
    return {"weights to the engine": Least(seconds, link.kind)}


def _before(run: "Run", topology: Topology) -> dict[str, Least]:
    """Time of the log-probabilities that several steps of a rollout compare with: forward passes
    over its samples."""
    rollout, wanted = run.cfg.rollout, run.objective.annotations
    assert rollout
    if not wanted:
        return {}
    sizes = dict(run.mesh.shape)
    tokens = rollout.minibatches * run.cfg.train.batch_size * run.cfg.data.seq_len
    models = [run] * (1 + ("reference_logps" in wanted))
    if "teacher_logps" in wanted:
        models.append(run.others["teacher"])
    seconds = 0.0
    for each in models:
        device = Device.of(each.cfg, topology, sizes)
        flops = forward_flops(
            each.cfg,
            0,
            min(rollout.room(run.cfg.train.batch_size, run.cfg.data.seq_len), run.cfg.data.seq_len),
        )
        seconds += device.compute(flops) * tokens / device.replicas if device else 0.0
    return {"log-probabilities before": Least(seconds, "compute")}


@dataclasses.dataclass(frozen=True)
class _Times:
    """Least times of the engine's work on one replica."""

    cfg: "Config"
    layout: Layout
    limits: Limits
    device: Device
    lengths: Lengths

    def prompts(self, number: float, samples: int) -> Least:
        """So many prompts: each once, where its samples share its pages."""
        times = 1 if self.limits.prefix_cache else samples
        rows, tokens = self.limits.rows, number * times * self.lengths.prompt
        speed = self._speed(0, self.lengths.prompt, rows, 1)
        return Least(max(1.0, tokens / rows) * speed.seconds, speed.limit)

    def answers(self, number: int) -> Least:
        """So many answers, as many at a time as requests and rows of a step allow: a token a step
        of each, or more where all guesses are right."""
        guessed, lengths = 1 + self.cfg.serve.speculate, self.lengths
        most = max(1, min(number, self.limits.requests, self.limits.rows // guessed))
        steps = max(lengths.answer - 1, 1) / guessed  # the prompt's last row gives the first token
        waves = [most] * (number // most) + [number % most] * (number % most > 0)
        speeds = [
            self._speed(lengths.prompt, lengths.prompt + lengths.answer, wave * guessed, wave)
            for wave in waves
        ]
        return Least(steps * sum(speed.seconds for speed in speeds), speeds[0].limit)

    def _speed(self, start: int, end: int, rows: int, requests: int) -> Speed:
        """The bound of a step of so many rows at positions `start` to `end - 1` on average, which
        reads the cache of so many requests."""
        cache = self.layout.on(self.cfg.mesh, self.device.sizes)
        read = capacity.read_bytes(self.layout, cache, start, end)
        return self.device.speed(rows, forward_flops(self.cfg, start, end), requests * read)
