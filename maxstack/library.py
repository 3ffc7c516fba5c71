"""Functions of docs/PYTHON.md that open a trained model, its data or its figures in a script."""

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from maxstack.data.dataset import Batches
    from maxstack.data.tokenizers import Tokenizer
    from maxstack.plan.report import Plan
    from maxstack.plan.topology import Topology
    from maxstack.rollouts.capacity import Lengths
    from maxstack.run import Run
    from maxstack.schema.config import Config


class Model(NamedTuple):
    """A trained model."""

    module: Any
    """The NNX module with its weights: module(tokens int32 [B, T]) -> float32 logits [B, T, V]."""
    tokenizer: "Tokenizer | None"
    """encode(bytes) -> int32 ids, decode(ids) -> bytes; None where the model has none."""
    run: "Run"
    """Its configuration, shapes and shardings."""


def model(name: str | Path, *overrides: str) -> Model:
    """Open a run, a checkpoint, a Hugging Face folder, a GGUF file or a model of the hub.
    ConfigError or DataError where it cannot be read."""
    from flax import nnx

    from maxstack.inference.engine_setup import model_files, open_model_tokenizer
    from maxstack.inference.trained_model import assemble_model, read_weights

    run, own = assemble_model(str(name), overrides)
    module = nnx.merge(run.graph, nnx.State(read_weights(str(name), run, own)))
    tokenizer, cfg = None, run.cfg
    if cfg.model.tokens is None:  # a language model
        tokenizer, _ = open_model_tokenizer(cfg, own, model_files(cfg, own))
    return Model(module, tokenizer, run)


def dataset(
    cfg: "Config", *, process: int = 0, processes: int = 1, evaluation: bool = False
) -> "Batches":
    """The batches that a run trains on, a grain.IterDataset without end; with `evaluation` those of
    its held-out documents, once. Number `process` of `processes` gets its share of the rows."""
    from maxstack.data.dataset import Batches

    return Batches(cfg, process=process, processes=processes, evaluation=evaluation)


def evaluate(run: str | Path, *overrides: str) -> dict[str, float]:
    """Evaluate a run by its own objective on its held-out data, and on its tasks -> figures by
    name, as in metrics.jsonl. ConfigError for a model that is no run."""
    from maxstack import startup
    from maxstack.inference.trained_model import assemble_model, read_weights
    from maxstack.load import run_folder
    from maxstack.report.log import Log
    from maxstack.report.metrics import Writer

    own = run_folder(str(run))
    if own is None:
        raise ConfigError(
            f"{run}: is not a run, so it has no held-out data; give --tasks, or evaluate a run "
            "that starts from it"
        )
    assembled, _ = assemble_model(str(run), ["eval.every=1", *overrides], trains=True)
    with contextlib.ExitStack() as ending:
        _, maker = startup.open_feed(assembled, own, ending)
        silent = Log(own, assembled.cfg.train.steps, False), Writer(own, first=False)
        evaluation = startup.evaluator(assembled, *silent, startup.frozen_weights(assembled), maker)
        assert evaluation
        return evaluation.figures(0, read_weights(str(run), assembled, own))


def plan(config: "Config | str | Path", topology: str = "here", *, exact: bool = False) -> "Plan":
    """`maxstack.plan`."""
    from maxstack.rollouts.capacity import Lengths

    name = "the run"
    if isinstance(config, str | Path):
        name, config = str(config), load_for(topology, config)
    cfg = largest_stage(config)
    hardware = topology_of(topology, cfg)
    lengths = Lengths.of(cfg, None, None) if cfg.rollout else None
    return plan_apart(name, cfg, hardware, exact, lengths)


def load_for(topology: str, config: str | Path, overrides: Sequence[str] = ()) -> "Config":
    """Load a configuration, without virtual devices unless the topology is this machine."""
    from maxstack.load import load

    elsewhere = [] if topology == "here" else ["run.virtual_devices=null"]
    return load(config, [*overrides, *elsewhere])


def topology_of(name: str, cfg: "Config") -> "Topology":
    """Return the hardware that --topology names. From here on jax may be imported."""
    from maxstack.hardware import devices
    from maxstack.plan import topology

    devices.environment(cfg.run.virtual_devices)
    return topology.parse(name)


def largest_stage(cfg: "Config") -> "Config":
    """Return the configuration of the stage with the most tokens per step, if there are stages."""
    if not cfg.train.stages:
        return cfg
    shapes = cfg.stages.shapes
    rows, length = max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
    listed = ", ".join(f"{rows:,} x {length:,}" for rows, length in shapes)
    print(
        f"train.stages: training compiles steps of {len(shapes)} shapes, {listed}; this is the "
        f"plan of {rows:,} x {length:,}",
        flush=True,
    )
    return cfg.of_shape(rows, length)


def plan_apart(
    name: str, cfg: "Config", topology: "Topology", exact: bool, lengths: "Lengths | None"
) -> "Plan":
    """Run `_make` in a process of its own, since a compiler may abort, and does not give back its
    memory. If it aborts, run it again with full optimization."""
    import concurrent.futures
    import multiprocessing

    from maxstack.plan import step

    step.check_mesh(cfg, topology)
    if topology.name == "here":  # accelerators belong to one process
        return _make(name, cfg, topology, exact, lengths)
    spawn = multiprocessing.get_context("spawn")
    for effort in dict.fromkeys((exact, True)):
        try:
            with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
                return pool.submit(_make, name, cfg, topology, effort, lengths).result()
        except concurrent.futures.process.BrokenProcessPool:
            again = "" if effort else "; retrying with full optimization"
            print(f"the compiler aborted{again}", file=sys.stderr, flush=True)
    raise ConfigError(
        f"--topology {topology.name}: the compiler aborts on this program, by a bug of its own or "
        "for lack of memory on this machine; try another mesh or remat policy"
    )


def _make(
    name: str, cfg: "Config", topology: "Topology", exact: bool, lengths: "Lengths | None"
) -> "Plan":
    from maxstack.plan import report, step

    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        compiled = step.compile_step(cfg, topology, exact=exact, dump=dump)
        plan = report.read(name, cfg, topology, compiled, dump)
    if lengths is None:
        return plan
    from maxstack.rollouts.capacity import with_rollouts

    return with_rollouts(plan, compiled.run, topology, lengths)
