"""The root of the configuration: a table of contents. Each component's section stands in its own
package."""

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
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    SizeInt,
)
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
    PreferenceConfig,
    RewardConfig,
    SFTConfig,
    UnpairedConfig,
)
from maxstack.schema.optimizer import OptimizerConfig
from maxstack.schema.policy import PolicyGradientConfig
from maxstack.schema.quantization import QuantizationConfig
from maxstack.schema.rewards import AnyReward
from maxstack.schema.rollout import RolloutConfig
from maxstack.schema.serve import ServeConfig
from maxstack.schema.stages import StageConfig, Stages

log = logging.getLogger(__name__)


class RunConfig(Section):
    """Name and folders of the run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
    """The run's folder inside output_dir; the same name resumes."""
    output_dir: str = Field("runs", max_length=1024)
    """The folder that holds runs, local or mounted. With several hosts it must be one that all of
    them see."""
    virtual_devices: CountInt | None = None
    """Split the CPU into this many devices, to try a mesh; null: the real devices."""
    trackers: Items[Literal["tensorboard", "trackio", "wandb", "mlflow"]] = ("tensorboard",)
    """Trackers that get metrics, texts and images beside metrics.jsonl, each in the run's folder
    unless its own variables of the environment say otherwise (docs/REPORT.md)."""
    executable: str | None = None
    """A compiled step to load instead of compiling, as `maxstack plan --save-executable` writes it;
    null: compile."""
    tuned: str | None = "~/.cache/maxstack/tuned.json"
    """Table of kernels' block sizes that `maxstack tune` writes and that goes before those that
    ship; it need not exist. null: none."""
    compilation_cache: str | None = "~/.cache/maxstack/xla"
    """Folder that keeps compiled programs between runs; null: none. The default is this user's
    alone, and refused where others may write to it; of another you know who may."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_trackers(cls, data: Any) -> Any:
        """`tensorboard: true` or `false`, as it was written once, puts it among `trackers` or takes
        it out."""
        if not isinstance(data, Mapping) or not isinstance(data.get("tensorboard"), bool):
            return data
        own = {key: value for key, value in data.items() if key != "tensorboard"}
        given = own.get("trackers", ())
        if isinstance(given, list | tuple):
            others = [name for name in given if name != "tensorboard"]
            own["trackers"] = ["tensorboard"] * data["tensorboard"] + others
        return own


class DistributedConfig(Section):
    """Several processes of one run; each is started with the same configuration and its own
    number."""

    coordinator: str = Field(pattern=r"^.+:[0-9]+$")
    """host:port on the host of process 0; the port is free there, and all processes reach it."""
    processes: PositiveInt
    """Number of processes."""
    process: NonNegativeInt
    """The number of this one, from 0."""


class ProfileConfig(Section):
    """A trace of some steps by jax's profiler, with the text of the step's program, for `maxstack
    profile`."""

    start: PositiveInt = 10
    """First step in the trace."""
    steps: PositiveInt = 3
    """Number of steps in the trace."""


class StopEarlyConfig(Section):
    """An end of the run where evaluations get no better."""

    metric: str = "eval_loss"
    """A figure of evaluation, as in tasks/pairs/acc. A sign says which way is better where the name
    does not: -eval_x."""
    patience: PositiveInt = 3
    """Evaluations in a row without a better one, after which the run ends."""
    min_delta: NonNegativeFloat = 0.0
    """A better one is better by more than this."""

    def own_faults(self) -> Iterator[Fault]:
        if wrong := direction_fault(self.metric):
            yield "metric", wrong


class TrainConfig(Section):
    """The loop."""

    steps: int = Field(1000, ge=1, le=2**31 - 1)
    """Optimizer steps in the whole run. A run may be given more; where that moves the learning rate
    of its next step, the log says from what to what."""
    epochs: PositiveFloat | None = None
    """Passes over every source that says none itself; train.steps follows from them, counted when
    the run begins: it reads all documents once, for their lengths, and shares them out so that all
    rows of the batch come to the end together. null: train.steps."""
    batch_size: SizeInt = 8
    """Rows in a step, over all devices and accumulation."""
    stages: Items[StageConfig] = ()
    """Fewer or shorter rows from a step on: a ramp of the batch size, a curriculum of lengths. The
    order of the data stays. A step is compiled for each shape, at the first step that has it."""
    accumulate: CountInt = 1
    """Microbatches a step is split into, one after the other; the update is that of the whole
    batch."""
    seed: int = 0
    """Seed of the initial weights and of all random numbers in steps."""
    profile: ProfileConfig | None = None
    """Write a trace into the run's folder; null: none, but `maxstack profile --live` takes one of a
    running job."""
    stop_early: StopEarlyConfig | None = None
    """End before train.steps where evaluations get no better; null: never."""


class XlaConfig(Section):
    """Options of the compiler. None is needed for a correct run."""

    platform: Literal["cpu", "gpu", "tpu"] | None = None
    """Platform for which the flags count; elsewhere they are left out, and the log says so. null:
    all."""
    flags: dict[str, bool | int | float | str] = {}
    """Flags of XLA, by name without dashes, for the step and for evaluation; the log shows them.
    One that this XLA does not know is an error."""

    def own_faults(self) -> Iterator[Fault]:
        for name in self.flags:
            if not re.fullmatch(r"\w+", name):
                yield (
                    f"flags.{name}",
                    "is no flag's name; write it without dashes, as "
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
    """Texts that a model writes, or images that it draws, while it is trained."""

    prompts: Items[str] = ()
    """How the texts begin."""
    tokens: PositiveInt = 64
    """Tokens of each, after its prompt."""
    temperature: NonNegativeFloat = 0.8
    """Divides the logits; 0: the likeliest token."""
    count: PositiveInt = 40
    """Images, of all classes in turn."""
    steps: PositiveInt = 20
    """Euler's steps of an image."""
    guidance: float = 1.0
    """Of images: without class + guidance x (with class - without)."""


class EvalConfig(Section):
    """Loss and bits per byte on held-out documents: at the start, during and at the end of
    training. The bytes are those of the documents as UTF-8, whatever a tokenizer makes of them."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0: none at all, not even at start and end."""
    steps: PositiveInt | None = None
    """Batches of an evaluation at most, of each source; null: all held-out documents."""
    batch_size: SizeInt | None = None
    """Rows in a batch; null: as in training."""
    data: DataConfig | None = None
    """Documents to evaluate on, with data.tokenizer unless another is given; null: what
    data.sources hold out."""
    baselines: bool = False
    """At the end, print what gzip -9 and an order-2 byte model reach on the same documents."""
    tasks: Items[str] = ()
    """Tasks that the model is asked at each evaluation: names of shipped ones (pairs, cloze), or
    files in lm-evaluation-harness's format."""
    samples: SamplesConfig | None = None
    """What the model writes at each evaluation: texts to the log, metrics.jsonl and run.trackers;
    images as a grid to samples/ in the run's folder and to trackers. null: none."""


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
    Field(discriminator="kind"),
]

Model = Annotated[DecoderConfig | EncoderConfig | DiTConfig, Field(discriminator="kind")]


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
    """Names and folders."""
    distributed: DistributedConfig | None = None
    """Several processes; null: as the launcher says, or this one alone."""
    runtime: Literal["jax", "pathways"] = "jax"
    """jax: each process drives the devices of its host. pathways: this process drives all devices,
    through the proxy at JAX_BACKEND_TARGET."""
    model: Model
    """The architecture: a preset's name, or a mapping that may hold `preset:`, or `from:` a Hugging
    Face folder, Org/Name of the hub, or another run or one of its checkpoints."""
    teacher: DecoderConfig | None = None
    """The model that objective.kind=distill learns from, as `model:` names one; null: none."""
    mesh: MeshConfig = MeshConfig()
    """Arrangement of devices, and how tensors are spread over them: a preset's name or a
    mapping."""
    xla: XlaConfig = XlaConfig()
    """Options of the compiler: a preset's name or a mapping."""
    quantization: QuantizationConfig = QuantizationConfig()
    """Matmuls in low precision: a preset's name or a mapping."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and nothing else; null: train the weights."""
    data: DataConfig
    """Data that is read."""
    objective: Objective = NextTokenConfig(kind="next_token")
    """Loss that is minimised: a preset's name or a mapping."""
    rollout: RolloutConfig | None = None
    """Samples of the model itself that it learns from; null: it learns from data."""
    rewards: Items[AnyReward] = ()
    """What samples are worth: the sum of these, each times its weight."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How weights follow from gradients: a preset's name or a mapping."""
    train: TrainConfig = TrainConfig()
    """The loop."""
    eval: EvalConfig = EvalConfig()
    """Evaluation inside training."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    faults: FaultsConfig = FaultsConfig()
    """Reactions to values that are not finite, and about spikes."""
    serve: ServeConfig = ServeConfig()
    """Generation and the server."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_kinds(cls, data: Any) -> Any:
        """A model without a kind is a decoder, as all were once."""
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
        """The model, where it must be a language model. ConfigError where it is none."""
        if not isinstance(self.model, DecoderConfig):
            raise ConfigError(f"model.kind={self.model.kind}: no language model, which this needs")
        return self.model

    @property
    def data_sections(self) -> dict[str, DataConfig]:
        """Data for training, and for evaluation where it has data of its own, by key."""
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
