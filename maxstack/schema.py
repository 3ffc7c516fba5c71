"""The root of the configuration: a table of contents. Each component's section stands in its own
package."""

import dataclasses
import logging
import os
import re
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import Field

from maxstack import hub, rules
from maxstack.checkpoint.config import CheckpointConfig
from maxstack.config import (
    ConfigError,
    Node,
    Readers,
    Section,
    fault,
    faults,
    plain,
    shortened,
    supply,
)
from maxstack.data.config import DataConfig, holds_text
from maxstack.faults.config import FaultsConfig
from maxstack.foreign import equivalent
from maxstack.lora.config import LoraConfig
from maxstack.models.config import DecoderConfig
from maxstack.optim import OptimizerConfig
from maxstack.quantize.config import QuantizationConfig
from maxstack.sharding import MeshConfig

log = logging.getLogger(__name__)


class RunConfig(Section):
    """Where the run lives."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
    """The run's folder inside output_dir; the same name resumes."""
    output_dir: str = Field("runs", max_length=1024)
    """The folder that holds runs. With several hosts it must be one that all of them see."""
    virtual_devices: int | None = Field(None, ge=1)
    """Split the CPU into this many devices, to try a mesh; null: the real devices."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    executable: str | None = None
    """A compiled step to load instead of compiling, as `maxstack plan --save-executable` writes it;
    null: compile."""
    tuned: str | None = "~/.cache/maxstack/tuned.json"
    """Table of kernels' block sizes that `maxstack tune` writes and that goes before those that
    ship; it need not exist. null: none."""
    compilation_cache: str | None = "~/.cache/maxstack/xla"
    """Folder that keeps compiled programs between runs; null: none."""


class DistributedConfig(Section):
    """Several processes of one run; each is started with the same configuration and its own
    number."""

    coordinator: str = Field(pattern=r"^.+:[0-9]+$")
    """host:port on the host of process 0; the port is free there, and all processes reach it."""
    processes: int = Field(ge=1)
    """How many."""
    process: int = Field(ge=0)
    """The number of this one, from 0."""


class ProfileConfig(Section):
    """A jax profiler trace of some steps."""

    start: int = Field(10, ge=1)
    """First step in the trace."""
    steps: int = Field(3, ge=1)
    """How many."""


class TrainConfig(Section):
    """The loop."""

    steps: int = Field(1000, ge=1)
    """Optimizer steps in the whole run. A run may be given more; where that moves the learning rate
    of its next step, the log says from what to what."""
    batch_size: int = Field(8, ge=1)
    """Rows in a step, over all devices and accumulation."""
    accumulate: int = Field(1, ge=1)
    """Microbatches a step is split into, one after the other; the update is that of the whole
    batch."""
    seed: int = 0
    """Of the initial weights."""
    profile: ProfileConfig | None = None
    """Write a profiler trace into the run's folder; null: none."""


class ObjectiveConfig(Section):
    """What is minimised."""

    kind: Literal["next_token"] = "next_token"
    """Cross-entropy of the next token."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared log-partition (PaLM, arXiv:2204.02311, section 5)."""


class XlaConfig(Section):
    """Options of the compiler. None is needed for a correct run."""

    platform: Literal["cpu", "gpu", "tpu"] | None = None
    """Where the flags count; elsewhere they are left out, and the log says so. null: everywhere."""
    flags: dict[str, bool | int | float | str] = {}
    """Of XLA, by name without dashes, for the step and for evaluation; the log shows them. One that
    this XLA does not know is an error."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "XlaConfig":
        for name in self.flags:
            if not re.fullmatch(r"\w+", name):
                raise fault(
                    f"flags.{name}",
                    "is no flag's name; write it without dashes, as "
                    f"{name.strip('-').replace('-', '_')}",
                )
            owner = re.match(r"xla_(cpu|gpu|tpu)_", name)
            if owner and owner[1] != self.platform:
                raise fault(
                    f"flags.{name}",
                    f"is a flag for {owner[1]}, and xla.platform is "
                    f"{self.platform or 'null, for all'}; "
                    f"set xla.platform: {owner[1]}",
                )
        return self


class EvalConfig(Section):
    """Loss and bits per byte on held-out documents: at the start, during and at the end of
    training. The bytes are those of the documents as UTF-8, whatever a tokenizer makes of them."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0: none at all, not even at start and end."""
    steps: int | None = Field(None, ge=1)
    """Batches of an evaluation at most; null: all held-out documents."""
    batch_size: int | None = Field(None, ge=1)
    """Rows in a batch; null: as in training."""
    data: DataConfig | None = None
    """Documents to evaluate on, with data.tokenizer unless another is given; null: what
    data.sources hold out."""
    baselines: bool = False
    """At the end, print what gzip -9 and an order-2 byte model reach on the same documents."""


def _file(where: str) -> str:
    return where.rsplit(":", 1)[0]


def _with_tokenizer(tree: Node) -> Node:
    """With the tokenizer of model.weights, or of the import that checkpoint.restore names."""
    folder, given = tree.at("model", "weights"), tree.at("data", "tokenizer")
    restored, sources = tree.at("checkpoint", "restore"), tree.at("data", "sources")
    if (folder is None or folder.value is None) and restored and not given:
        beside = Path(f"{restored.value}").expanduser() / "hf"
        folder = dataclasses.replace(restored, value=str(beside)) if beside.is_dir() else None
    own = ("override", _file(folder.where)) if folder else ()
    if not folder or not isinstance(folder.value, str) or (given and _file(given.where) in own):
        return tree
    from maxstack.checkpoint.hf.tokenizer import tokenizer_of, unread

    of_hub = hub.named(folder.value)
    place = hub.snapshot(folder.value, weights=False) if of_hub else Path(folder.value)
    if found := tokenizer_of(place):
        if of_hub:
            found["path"] = f"{folder.value}/{Path(found['path']).name}"
        if given:
            log.warning(
                "data.tokenizer: that of %s, in place of the one at %s", folder.value, given.where
            )
        return supply(tree, ("data", "tokenizer"), found, folder.value)
    listed = sources.value if sources and isinstance(sources.value, list) else []
    if any(holds_text(plain(source)) for source in listed if source.mapping):
        raise ConfigError(f"{folder.where}: {unread(place)}")
    return tree


def model_of_folder(path: str, name: str) -> tuple[str, dict[str, Any]]:
    """What `model: {from: name}` means, and the folder at `path`, or else the model of the hub,
    pinned, that it names: the architecture that its config.json says, computed in float32 if its
    weights are that and in bfloat16 if not, and its weights to start from."""
    from maxstack.checkpoint.hf.contents import Contents

    of_hub = hub.NAME.fullmatch(name) is not None and not os.path.exists(path)
    if not of_hub and not os.path.exists(path):
        raise ConfigError(f"{shortened(path, 200)}: {hub.NOWHERE}")
    where = hub.pinned(name) if of_hub else path
    contents = Contents(where, weights=not of_hub)
    return where, contents.mapping | {
        "weights": where,
        "dtype": "float32" if contents.dtype == "float32" else "bfloat16",
    }


class Config(Section):
    """A whole run."""

    PRESETS: ClassVar[dict[str, tuple[str, ...]]] = {
        "": ("recipes", "."),
        "model": ("models",),
        "mesh": ("meshes",),
        "xla": ("xla",),
        "quantization": ("quantization",),
        "optimizer": ("optimizers",),
    }

    READERS: ClassVar[Readers] = {"model": model_of_folder}

    run: RunConfig = RunConfig()
    """Names and folders."""
    distributed: DistributedConfig | None = None
    """Several processes; null: as the launcher says, or this one alone."""
    runtime: Literal["jax", "pathways"] = "jax"
    """jax: each process drives the devices of its host. pathways: this process drives all devices,
    through the proxy at JAX_BACKEND_TARGET."""
    model: DecoderConfig
    """The architecture: a preset's name, or a mapping that may hold `preset:`, or `from:` a Hugging
    Face folder, or Org/Name of the hub."""
    mesh: MeshConfig = MeshConfig()
    """How devices are arranged and tensors spread over them: a preset's name or a mapping."""
    xla: XlaConfig = XlaConfig()
    """Options of the compiler: a preset's name or a mapping."""
    quantization: QuantizationConfig = QuantizationConfig()
    """Matmuls in low precision: a preset's name or a mapping."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and nothing else; null: train the weights."""
    data: DataConfig
    """What is read."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What is minimised."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How: a preset's name or a mapping."""
    train: TrainConfig = TrainConfig()
    """The loop."""
    eval: EvalConfig = EvalConfig()
    """Evaluation inside training."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    faults: FaultsConfig = FaultsConfig()
    """What is done about values that are not finite, and about spikes."""

    @classmethod
    def completed(cls, tree: Node) -> Node:
        """With the tokenizer of the folder that the weights come from, unless the same file or the
        command line gives another, and with that for eval.data too. ConfigError where the folder
        has none to be read and there is text: tokens of another would spoil the weights."""
        tree = _with_tokenizer(tree)
        tokenizer, evaluated = tree.at("data", "tokenizer"), tree.at("eval", "data")
        if (
            tokenizer is None
            or tokenizer.mapping is None
            or evaluated is None
            or evaluated.at("tokenizer")
        ):
            return tree
        return supply(tree, ("eval", "data", "tokenizer"), plain(tokenizer), tokenizer.where)

    @classmethod
    def foreign(cls, path: str) -> str:
        """What another framework's key is called here."""
        return equivalent(path)

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Config":
        if found := rules.check(self):
            raise faults(found)
        return self
