"""Searches for the fastest mesh, remat policy and batch size (`maxstack plan --search`), and for
the largest batch (`--batch max`).

The search estimates every mesh that the model divides over (estimate.py), drops those far beyond
the memory, and compiles the rest in the order of estimated speed until enough of them fit. A
candidate that needs more memory than one that did not fit is skipped. The largest batch is found by
secant steps, since memory grows almost linearly with rows."""

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

from maxstack.errors import ConfigError
from maxstack.plan.estimate import SLACK, Estimate, Shapes, estimate
from maxstack.plan.topology import Topology, links
from maxstack.schema import mesh_rules, parallel_rules, rules
from maxstack.schema.mesh import AXES
from maxstack.schema.stack import REMAT

if TYPE_CHECKING:
    from maxstack.plan.report import Plan
    from maxstack.schema.config import Config

MOST_TENSOR = 64
MOST_CONTEXT = 64
MOST_COMPILED = 24
LEAST_FOR_CONTEXT = 16384
"""Tokens of a sequence from which context parallelism is tried."""
LEAST_FOR_STAGES = 512
"""Devices of a slice from which pipeline stages are tried."""

Compile = Callable[["Config"], "Plan"]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration on a mesh of `sizes`, with its estimate."""

    cfg: "Config"
    sizes: dict[str, int]
    estimate: Estimate

    @property
    def label(self) -> str:
        """Mesh, remat policy and batch size."""
        return (
            f"{mesh_rules.product_of(self.sizes)}, remat {self.cfg.model.remat.policy}, "
            f"batch {self.cfg.train.batch_size}"
        )

    @property
    def rate(self) -> float:
        """Estimated tokens/s."""
        return self.cfg.train.batch_size * self.cfg.data.seq_len / self.estimate.seconds


def search(
    cfg: "Config", topology: Topology, make: Compile, finalists: int
) -> list[tuple[Candidate, "Plan"]]:
    """Return the candidates that were compiled and fit, the fastest first. The given configuration
    is compiled too if it divides over the devices. ConfigError if none fits."""
    chip = topology.chip
    if chip is None:
        raise ConfigError(
            f"--search: needs the chip's figures, and {topology.name} has none in chips.yml; give "
            "--topology"
        )
    shapes = Shapes.of(cfg)
    limit = chip.for_programs
    # Links depend on the mesh alone, which remat policies and batch sizes share.
    over = functools.cache(lambda shape: links(topology, shape))
    candidates = [
        Candidate(each, sizes, estimate(shapes, each, sizes, chip, over(tuple(sizes.values()))))
        for each, sizes in tqdm(
            list(_candidates(cfg, topology)), desc="estimating", unit=" candidates", disable=None
        )
    ]
    # The given configuration is compiled whatever the estimate says of it: the others are compared
    # with it.
    unchanged = [x for x in candidates if x.cfg == cfg]
    likely = [x for x in candidates if x.cfg != cfg and x.estimate.memory <= SLACK * limit]
    likely.sort(key=lambda x: -x.rate)
    # One more finalist for it, so that it takes no place from a candidate.
    return _compiled([*unchanged, *likely], make, finalists + len(unchanged))


def _compiled(
    queue: Sequence[Candidate], make: Compile, wanted: int
) -> list[tuple[Candidate, "Plan"]]:
    """Compile the queue until `wanted` fit; return these by predicted speed."""
    fits: list[tuple[Candidate, Plan]] = []
    too_large: list[float] = []
    nearest: Plan | None = None
    with tqdm(total=wanted, desc="compiling", unit=" finalists", disable=None) as bar:
        for candidate in queue:
            if len(fits) == wanted or len(fits) + len(too_large) == MOST_COMPILED:
                break
            # What is estimated to need more than a candidate that failed is taken to fail too: each
            # compilation takes up to minutes.
            if candidate.estimate.memory >= min(too_large, default=math.inf):
                continue
            bar.set_postfix_str(candidate.label)
            plan = make(candidate.cfg)
            if plan.fits:
                fits.append((candidate, plan))
                bar.update()
                continue
            too_large.append(candidate.estimate.memory)
            if nearest is None or plan.needed < nearest.needed:
                nearest = plan
    if not fits:
        least = ""
        if nearest:
            has = (nearest.usable or 0) / 2**30
            least = f"; the smallest needs {nearest.needed / 2**30:.2f} of {has:.2f} GiB a device"
        raise ConfigError(
            f"--search: nothing fits: compiled {len(too_large)} of {len(queue)} candidates{least}; "
            "use "
            "more devices, a smaller train.batch_size, or mesh.offload"
        )
    return sorted(fits, key=lambda pair: -(pair[1].tokens_per_second or 0.0))


def _candidates(cfg: "Config", topology: Topology) -> Iterator[tuple["Config", dict[str, int]]]:
    """Yield every mesh that the model divides over, with every remat policy, at one, two and four
    times the given batch size."""
    own_sizes = mesh_rules.mesh_sizes(cfg, topology.size)
    # The given mesh may leave axes to be computed; the same mesh written out must not be compiled
    # twice.
    resolved = _changed(cfg, own_sizes, cfg.model.remat.policy, cfg.train.batch_size)
    searched = [name for name, policy in REMAT.items() if policy.searched]
    policies = dict.fromkeys([cfg.model.remat.policy, *searched])
    batches = [cfg.train.batch_size * factor for factor in (1, 2, 4)]
    fills = math.prod(own_sizes.values()) == topology.size
    if fills and not rules.device_faults(cfg, topology.size):
        yield cfg, own_sizes
    for sizes, policy, batch in itertools.product(_meshes(cfg, topology), policies, batches):
        changed = _changed(cfg, sizes, policy, batch)
        # model_copy does not validate, which keeps candidates cheap, so the rules are asked here.
        if changed != resolved and not rules.faults(changed):
            yield changed, sizes


def _meshes(cfg: "Config", topology: Topology) -> Iterator[dict[str, int]]:
    experts = any(block.experts for block in cfg.model.blocks.values())
    inside = topology.size // topology.slices
    for tensor, context, expert, stage in itertools.product(
        _divisors(inside, MOST_TENSOR),
        _divisors(inside, MOST_CONTEXT),
        _divisors(inside, inside if experts else 1),
        _divisors(inside, cfg.model.layers),
    ):
        rest, remainder = divmod(inside, tensor * context * expert * stage)
        too_short = context > 1 and cfg.data.seq_len < LEAST_FOR_CONTEXT
        too_few = stage > 1 and inside < LEAST_FOR_STAGES
        if remainder or too_short or too_few:
            continue
        for fsdp in _divisors(rest, rest):
            sizes = {
                "slices": topology.slices,
                "stage": stage,
                # What fsdp leaves goes to data: each mesh fills the devices exactly.
                "data": rest // fsdp,
                "fsdp": fsdp,
                "expert": expert,
                "context": context,
                "tensor": tensor,
            }
            yield {axis: sizes[axis] for axis in AXES}


def _divisors(number: int, most: int) -> list[int]:
    return [
        size
        for size in range(1, min(number, most) + 1)
        # Powers of two, and the whole: with every divisor on four axes there would be many times as
        # many candidates.
        if number % size == 0 and (size & (size - 1) == 0 or size == number)
    ]


def _changed(cfg: "Config", sizes: dict[str, int], policy: str, batch: int) -> "Config":
    # Names of tensors to save belong to the given policy.
    names = cfg.model.remat.names if policy == cfg.model.remat.policy else ()
    remat = cfg.model.remat.model_copy(update={"policy": policy, "names": names})
    # Rules refuse microbatches and rounds without stages, so a given pipeline must not keep other
    # meshes from being tried.
    pipeline = {} if sizes["stage"] > 1 else {"microbatches": None, "rounds": 1}
    return cfg.model_copy(
        update={
            "mesh": cfg.mesh.model_copy(update=sizes | pipeline),
            "model": cfg.model.model_copy(update={"remat": remat}),
            "train": cfg.train.model_copy(update={"batch_size": batch}),
        }
    )


def largest_batch(cfg: "Config", topology: Topology, make: Compile) -> tuple["Config", "Plan"]:
    """Return the configuration with the largest batch that fits, and its plan. ConfigError if one
    row per device does not fit."""
    sizes = mesh_rules.mesh_sizes(cfg, topology.size)
    # Batch sizes between whole units do not divide over the mesh.
    unit = parallel_rules.batch_unit(cfg, sizes)
    tried: dict[int, Plan] = {}

    def at(rows: int) -> "Plan":
        # Compiling takes up to minutes; the ends of the interval are asked for again and again.
        if rows not in tried:
            print(f"compiling with train.batch_size={rows * unit}", file=sys.stderr, flush=True)
            tried[rows] = make(_changed(cfg, sizes, cfg.model.remat.policy, rows * unit))
        return tried[rows]

    if at(1).usable is None:
        raise ConfigError("--batch max: the device's memory is unknown; give --topology")
    if not at(1).fits:
        needed = at(1).needed / 2**30
        has = (at(1).usable or 0) / 2**30
        raise ConfigError(
            f"--batch max: not even batch_size={unit} fits: it needs {needed:.2f} of "
            f"{has:.2f} GiB a device"
        )
    fits = 1
    over = math.inf
    while over - fits > 1:
        guess = _next(tried, fits, over)
        if at(guess).fits:
            fits = guess
        else:
            over = guess
    return _changed(cfg, sizes, cfg.model.remat.policy, fits * unit), at(fits)


def _next(tried: Mapping[int, "Plan"], fits: int, over: float) -> int:
    """Choose the rows to try next: first twice as many, then where the line through the two nearest
    sizes meets the limit. Once a size did not fit, every other guess is the middle, because a
    compiler that saves memory near the limit bends the line."""
    bounded = over < math.inf
    if fits == 1 and not bounded:
        return 2
    # The middle keeps the number of compilations logarithmic even where the line misleads.
    if bounded and len(tried) % 2:
        return (fits + int(over)) // 2
    other = int(over) if bounded else max(rows for rows in tried if rows < fits)
    # Beyond the measured sizes the line is trusted for a factor of eight only.
    most = other - 1 if bounded else 8 * fits
    plan = tried[fits]
    slope = (tried[other].needed - plan.needed) / (other - fits)
    guess = int(fits + ((plan.usable or 0) - plan.needed) / slope) if slope > 0 else 8 * fits
    return min(max(guess, fits + 1), most)
