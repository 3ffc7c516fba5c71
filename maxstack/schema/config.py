"""The root of the configuration: its sections. Each component has a file of its own."""

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from maxstack.config import (
    CountInt,
    Fault,
    Items,
    NameMap,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    SizeInt,
)
from maxstack.config.own_kinds import Open, OwnName
from maxstack.errors import ConfigError
from maxstack.schema.checkpoint import CheckpointConfig
from maxstack.schema.data import DataConfig
from maxstack.schema.decoder import DecoderConfig
from maxstack.schema.dit import DiTConfig
from maxstack.schema.encoder import EncoderConfig
from maxstack.schema.faults import FaultsConfig
from maxstack.schema.foreign import equivalent
from maxstack.schema.lora import LoraConfig
from maxstack.schema.mesh import MeshConfig
from maxstack.schema.metrics import direction_fault
from maxstack.schema.objective import (
    ClassifyConfig,
    DistillConfig,
    FlowConfig,
    MaskedDiffusionConfig,
    NextTokenConfig,
    ObjectivePart,
    PreferenceConfig,
    RewardConfig,
    SFTConfig,
    UnpairedConfig,
)
from maxstack.schema.optimizer import OptimizerConfig
from maxstack.schema.policy_gradient import PolicyGradientConfig
from maxstack.schema.quantization import QuantizationConfig
from maxstack.schema.rewards import AnyReward
from maxstack.schema.rollout import RolloutConfig
from maxstack.schema.sampling import Temperature
from maxstack.schema.serve import ServeConfig
from maxstack.schema.stack import StackConfig
from maxstack.schema.stages import StageConfig, Stages

log = logging.getLogger(__name__)


class RunConfig(Section):
    """Name and folders of the run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
    """Name of the run, and of its folder inside output_dir; the same name resumes it."""
    output_dir: str = Field("runs", max_length=1024)
    """Folder that contains the folders of runs, local or mounted; with several hosts it must be
    shared by all."""
    virtual_devices: CountInt | None = None
    """Split the CPU into this many devices, to try out a mesh; null: the real devices."""
    trackers: Items[Literal["tensorboard", "trackio", "wandb", "mlflow"] | OwnName] = (
        "tensorboard",
    )
    """Trackers that receive metrics, texts and images in addition to metrics.jsonl; each writes to
    the run's folder unless its own environment variables say otherwise (docs/REPORT.md).
    module:Class: a tracker of your own (docs/EXTENDING.md)."""
    kinds: Names = Field(default_factory=NameMap)
    """Kinds of your own (`kind: module:Name`) that the run uses, and the version and hash of their
    code; whatever you set is replaced (docs/EXTENDING.md)."""
    executable: str | None = None
    """Compiled step to load, as written by `maxstack plan --save-executable`; null: compile."""
    tuned: str | None = "~/.cache/maxstack/tuned.json"
    """Table of kernel block sizes, written by `maxstack tune`, which takes precedence over the
    shipped ones; the file may be missing. null: none."""
    compilation_cache: str | None = "~/.cache/maxstack/xla"
    """Folder for compiled programs, reused between runs; null: none. The default folder belongs to
    the current user, and is refused if others can write to it; a folder that you set yourself is
    trusted."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_trackers(cls, data: Any) -> Any:
        """Accept `tensorboard: true` or `false`, as old configurations have it, for `trackers`."""
        if not isinstance(data, Mapping) or not isinstance(data.get("tensorboard"), bool):
            return data
        own = {key: value for key, value in data.items() if key != "tensorboard"}
        given = own.get("trackers", ())
        if isinstance(given, list | tuple):
            others = [name for name in given if name != "tensorboard"]
            own["trackers"] = ["tensorboard"] * data["tensorboard"] + others
        return own


class DistributedConfig(Section):
    """A run of several processes, each started with the same configuration and its own number."""

    coordinator: str = Field(pattern=r"^.+:[0-9]+$")
    """host:port on the host of process 0; the port must be free, and all processes must reach
    it."""
    processes: PositiveInt
    """Number of processes."""
    process: NonNegativeInt
    """Number of this process, from 0."""


class ProfileConfig(Section):
    """A trace of some steps by jax's profiler, with the text of the compiled step, for `maxstack
    profile`."""

    start: PositiveInt = 10
    """First step of the trace."""
    steps: PositiveInt = 3
    """Number of steps in the trace."""


class StopEarlyConfig(Section):
    """Early stopping by a metric of the evaluations."""

    metric: str = "eval_loss"
    """Evaluation metric, such as tasks/pairs/acc. If its name does not tell which direction is
    better, prefix it with + (higher) or - (lower): -eval_x."""
    patience: PositiveInt = 3
    """Number of evaluations in a row without improvement after which the run stops."""
    min_delta: NonNegativeFloat = 0.0
    """Smallest change that counts as an improvement."""

    def own_faults(self) -> Iterator[Fault]:
        if wrong := direction_fault(self.metric):
            yield "metric", wrong


class TrainConfig(Section):
    """The training loop."""

    steps: int = Field(1000, ge=1, le=2**31 - 1)
    """Number of optimizer steps of the whole run. It may be raised later; where that changes the
    learning rate of the next step, the log shows both values."""
    epochs: PositiveFloat | None = None
    """Number of passes over every source that does not set its own `epochs`. train.steps is then
    computed at the start, by reading all documents once for their lengths and distributing them so
    that all rows of the batch end together. null: use train.steps."""
    batch_size: SizeInt = 8
    """Rows per step, over all devices and microbatches."""
    stages: Items[StageConfig] = ()
    """Stages of training with fewer or shorter rows, for a batch size ramp or a length curriculum.
    The order of the data stays the same. The training step is compiled for each shape when it is
    first needed."""
    accumulate: CountInt = 1
    """Number of microbatches per step, computed one after the other; the update is that of the
    whole batch."""
    seed: int = 0
    """Seed for the initial weights and for all random numbers in training steps."""
    profile: ProfileConfig | None = None
    """Write a trace into the run's folder; null: none, though `maxstack profile --live` can trace a
    running job."""
    stop_early: StopEarlyConfig | None = None
    """Stop before train.steps if evaluations stop improving; null: never."""
    callback_failure: Literal["end", "drop"] = "end"
    """What to do if a callback (docs/PYTHON.md) raises an exception. end: end the run; drop: go on
    without it, with a warning in the log."""


class XlaConfig(Section):
    """Compiler options. A run is correct without any."""

    platform: Literal["cpu", "gpu", "tpu"] | None = None
    """Platform that the flags are for; on others they are ignored, with a note in the log. null:
    all platforms."""
    flags: dict[str, bool | int | float | str] = {}
    """XLA flags, by name without dashes, for the training step and evaluation; the log shows them.
    An unknown flag is an error."""

    def own_faults(self) -> Iterator[Fault]:
        for name in self.flags:
            if not re.fullmatch(r"\w+", name):
                yield (
                    f"flags.{name}",
                    "is not a flag name; write it without dashes, as "
                    f"{name.strip('-').replace('-', '_')}",
                )
            owner = re.match(r"xla_(cpu|gpu|tpu)_", name)
            if owner and owner[1] != self.platform:
                yield (
                    f"flags.{name}",
                    f"is a flag for {owner[1]}, and xla.platform is "
                    f"{self.platform or 'null, for all'}; set xla.platform: {owner[1]}",
                )


class SamplesConfig(Section):
    """Texts or images that the model generates during training."""

    prompts: Items[str] = ()
    """Prompts to generate texts from."""
    tokens: PositiveInt = 64
    """Tokens to generate after each prompt."""
    temperature: Temperature = 0.8
    """Sampling temperature; 0: greedy."""
    count: PositiveInt = 40
    """Number of images to generate, cycling through all classes."""
    steps: PositiveInt = 20
    """Euler steps per image."""
    guidance: float = 1.0
    """Classifier-free guidance scale of images."""


class EvalConfig(Section):
    """Loss and bits per byte on held-out documents, at the start, during and at the end of
    training. Bytes are those of the documents in UTF-8, whatever the tokenizer."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0: no evaluation, not even at start and end."""
    steps: PositiveInt | None = None
    """Maximum number of batches of an evaluation, for each source; null: all held-out documents."""
    batch_size: SizeInt | None = None
    """Rows per batch; null: as in training."""
    data: DataConfig | None = None
    """Documents to evaluate on, with data.tokenizer unless it sets another; null: those that
    data.sources hold out."""
    baselines: bool = False
    """At the end, print the scores of gzip -9 and an order-2 byte model on the same documents."""
    tasks: Items[str] = ()
    """Tasks to run at each evaluation: names of shipped ones (pairs, cloze), or files in the format
    of lm-evaluation-harness."""
    samples: SamplesConfig | None = None
    """Samples to generate at each evaluation: texts go to the log, metrics.jsonl and run.trackers;
    images go as a grid to samples/ in the run's folder and to trackers. null: none."""


Objective = Annotated[
    NextTokenConfig
    | SFTConfig
    | PreferenceConfig
    | UnpairedConfig
    | RewardConfig
    | DistillConfig
    | MaskedDiffusionConfig
    | ClassifyConfig
    | FlowConfig
    | PolicyGradientConfig,
    Open(ObjectivePart),
]

Model = Annotated[DecoderConfig | EncoderConfig | DiTConfig, Open(StackConfig)]


class Config(Section):
    """A whole run."""

    PRESETS = {
        "": ("recipes", "."),
        "model": ("models",),
        "teacher": ("models",),
        "mesh": ("meshes",),
        "xla": ("xla",),
        "quantization": ("quantization",),
        "optimizer": ("optimizers",),
        "objective": ("objectives",),
    }

    FROM = ("model", "teacher")

    run: RunConfig = RunConfig()
    """Name and folders of the run."""
    distributed: DistributedConfig | None = None
    """Settings for several processes; null: taken from the launcher, or a single process."""
    runtime: Literal["jax", "pathways"] = "jax"
    """jax: each process drives the devices of its host. pathways: this process drives all devices,
    through the proxy at JAX_BACKEND_TARGET."""
    model: Model
    """Architecture: a preset's name, or a mapping, which may hold `preset:`, or `from:` with a
    Hugging Face folder, Org/Name of the hub, another run or one of its checkpoints."""
    teacher: DecoderConfig | None = None
    """Model that objective.kind=distill, or policy_gradient with `distil`, learns from, given like
    `model:`; null: none."""
    mesh: MeshConfig = MeshConfig()
    """Device mesh, and how tensors are sharded over it: a preset's name or a mapping."""
    xla: XlaConfig = XlaConfig()
    """Compiler options: a preset's name or a mapping."""
    quantization: QuantizationConfig = QuantizationConfig()
    """Matmuls in low precision: a preset's name or a mapping."""
    lora: LoraConfig | None = None
    """Train low-rank adapters only; null: train the weights."""
    data: DataConfig
    """Training data."""
    objective: Objective = NextTokenConfig(kind="next_token")
    """Training loss: a preset's name or a mapping."""
    rollout: RolloutConfig | None = None
    """How to generate samples for the model to learn from; null: it learns from data."""
    rewards: Items[AnyReward] = ()
    """Rewards for samples, added up with their weights."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer: a preset's name or a mapping."""
    train: TrainConfig = TrainConfig()
    """Settings of the training loop."""
    eval: EvalConfig = EvalConfig()
    """Evaluation during training."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    faults: FaultsConfig = FaultsConfig()
    """Reactions to non-finite values, loss spikes, hangs and lost devices."""
    serve: ServeConfig = ServeConfig()
    """Settings of the generation engine and the server."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_kinds(cls, data: Any) -> Any:
        """Make a model without a kind a decoder, as old configurations mean it."""
        if not isinstance(data, Mapping):
            return data
        usual = {
            key: {"kind": "decoder", **data[key]}
            for key in cls.FROM
            if isinstance(data.get(key), Mapping)
        }
        return {**data, **usual}

    @property
    def decoder(self) -> DecoderConfig:
        """The model, where it must be a language model; ConfigError where it is not."""
        if not isinstance(self.model, DecoderConfig):
            raise ConfigError(f"model.kind={self.model.kind}: no language model, which this needs")
        return self.model

    @property
    def data_sections(self) -> dict[str, DataConfig]:
        """Data for training, and for evaluation where it has its own, by key."""
        return {"data": self.data} | ({"eval.data": self.eval.data} if self.eval.data else {})

    @property
    def stages(self) -> Stages:
        """Shapes of the batches, by step."""
        return Stages(self.train.stages, self.train.batch_size, self.data.seq_len)

    def of_shape(self, rows: int, length: int) -> "Config":
        """The configuration of a run whose batches all have this shape."""
        return self.model_copy(
            update={
                "train": self.train.model_copy(update={"batch_size": rows, "stages": ()}),
                "data": self.data.model_copy(update={"seq_len": length}),
            }
        )

    @classmethod
    def foreign(cls, path: str) -> str:
        """Our name for another framework's key."""
        return equivalent(path)
