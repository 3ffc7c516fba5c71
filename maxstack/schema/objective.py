"""The sections of the objectives."""

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from maxstack.config import (
    Fault,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from maxstack.config.annotations import listed
from maxstack.config.own_kinds import Kind
from maxstack.config.spelling import did_you_mean
from maxstack.errors import quoted


class RowField(NamedTuple):
    """One array of a batch."""

    axes: str
    """Logical axes, separated by spaces: `batch seq`, or `batch`."""
    dtype: str
    size: tuple[int, ...] = ()
    """Sizes of further dimensions."""
    below: int | None = None
    """Upper bound of its numbers, exclusive; None: not known."""
    lane: str = ""
    """module:class of the lane that makes it; empty: one of maxstack's."""


TEXTS = "maxstack.inference.samples:Samples"


class ObjectivePart(Kind, Section):
    """The section of a kind of objective."""

    PLACES = ("OBJECTIVE", "SAMPLES")

    kind: str
    OBJECTIVE: ClassVar[str] = ""
    """module:class of the implementation."""
    RANDOM: ClassVar[bool] = False
    """Whether every step draws random numbers."""
    MODELS: ClassVar[tuple[str, ...]] = ("decoder",)
    """Kinds of models that it can train."""
    RECORDS: ClassVar[tuple[str | None, ...]] = (None,)
    """Kinds of records that it learns from; None: text. Data are of one kind and of text."""
    FORWARD: ClassVar[bool] = True
    """Whether the model predicts, or scores, a token from those before it alone."""
    SAMPLES: ClassVar[str] = TEXTS
    """module:class that makes eval.samples; empty: none."""
    SCORES: ClassVar[bool] = False
    """Whether the model gives a score per position instead of logits."""
    TEACHER: ClassVar[bool] = False
    """Whether it may learn from a teacher."""
    ROLLOUTS: ClassVar[Literal["never", "may", "always"]] = "never"
    """Whether it learns from samples of the model."""

    @property
    def draws(self) -> bool:
        """Whether a step draws random numbers with these settings."""
        return self.RANDOM

    @property
    def extras(self) -> tuple[str, ...]:
        """Numbers per position beside its token, from data/examples.EXTRAS."""
        return ()

    @property
    def row_fields(self) -> dict[str, RowField]:
        """Arrays of rows beside those of tokens, by this section alone: `maxstack data show` reads
        them without the objective."""
        return {name: RowField("batch seq", "float32") for name in self.extras}

    def token_ids(self, vocab: int) -> int:
        """Number of token ids of a model's table that the tokenizer may use."""
        return vocab


class ClassifyConfig(ObjectivePart):
    """Cross-entropy of an image's class."""

    OBJECTIVE = "maxstack.objectives.classify:Classify"
    MODELS = ("encoder",)
    RECORDS = ("image",)
    FORWARD = False
    SAMPLES = ""

    kind: Literal["classify"]
    """Selects this objective."""
    smoothing: float = Field(0.0, ge=0, lt=1)
    """Label smoothing: fraction of the target that is spread over all classes (Szegedy et al. 2016,
    arXiv:1512.00567)."""
    mixup: NonNegativeFloat = 0.0
    """Parameter a of mixup's Beta(a, a): each image is mixed with another of the batch, and so are
    their classes (Zhang et al. 2018, arXiv:1710.09412); one ratio per step, as in big_vision. 0:
    none."""

    @property
    def draws(self) -> bool:
        return self.mixup > 0


class FlowConfig(ObjectivePart):
    """Flow matching (Lipman et al. 2023, arXiv:2210.02747; Liu et al. 2023, arXiv:2209.03003): on
    the line x_t = (1 - t) x + t e from an image x to noise e, the mean squared error of the
    prediction at a random t."""

    OBJECTIVE = "maxstack.objectives.flow:Flow"
    MODELS = ("dit",)
    RECORDS = ("image", "latents")
    FORWARD = False
    SAMPLES = "maxstack.inference.images:ImageSamples"
    RANDOM = True

    kind: Literal["flow"]
    """Selects this objective."""
    prediction: Literal["velocity", "x0", "eps"] = "velocity"
    """What the model predicts: e - x, x or e."""
    path: Literal["line", "vp"] = "line"
    """Path from image to noise. line: x_t as above; vp: sqrt(a) x + sqrt(1 - a) e, where a is the
    product of 1 - b over the steps up to 1000 t and b grows from 1e-4 to 0.02 (DDPM, Ho et al.
    2020, arXiv:2006.11239), as in the published DiT; the model's input is the index of the step."""
    times: Literal["uniform", "logit_normal"] = "uniform"
    """Distribution of t: uniform, or the logistic function of a normal variable (Esser et al. 2024,
    arXiv:2403.03206)."""
    shift: PositiveFloat = 1.0
    """Timestep shift s: t becomes s t / (1 + (s - 1) t), for more noise with larger images (Esser
    et al. 2024, section 5.3.2); used in training and sampling."""
    drop: float = Field(0.1, ge=0, le=1)
    """Class dropout probability, for classifier-free guidance (Ho & Salimans 2022,
    arXiv:2207.12598)."""
    eval_times: PositiveInt = 8
    """Number of fixed values of t, the midpoints of equal intervals, over which evaluation averages
    the loss; an image gets the same noise each time."""

    def own_faults(self) -> Iterator[Fault]:
        if self.path == "vp" and self.prediction == "velocity":
            yield "prediction", "velocity needs path: line; use eps or x0, or that path"


class NextTokenConfig(ObjectivePart):
    """Next-token cross-entropy."""

    OBJECTIVE = "maxstack.objectives.next_token:NextToken"

    kind: Literal["next_token"]
    """Selects this objective."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared log-partition (PaLM, arXiv:2204.02311, section 5)."""


class SFTConfig(NextTokenConfig):
    """Supervised fine-tuning: next-token cross-entropy on the answers in conversations, and on
    text."""

    OBJECTIVE = "maxstack.objectives.sft:SFT"
    RANDOM = True
    RECORDS = (None, "chat")

    kind: Literal["sft"]  # type: ignore[assignment]
    """Selects this objective."""
    weigh: Literal["token", "sequence"] = "token"
    """How the loss is averaged: over all counted tokens, or over sequences, each of which is the
    mean of its tokens."""
    dft: bool = False
    """Multiply each token's loss by its probability, without gradient (Dynamic Fine-Tuning, Wu et
    al. 2025, arXiv:2508.05629)."""
    neftune: NonNegativeFloat = 0.0
    """Noise added to embeddings in training, uniform in +-neftune / sqrt(tokens of the sequence x
    embed) (NEFTune, Jain et al. 2023, arXiv:2310.05914); 0: none."""
    statistics: bool = False
    """Log entropy and token_accuracy at each step, at the cost of one more forward pass of the
    head; evaluation always logs them."""


class PreferenceLoss(NamedTuple):
    """What the schema knows of a loss of pairs; its function is in objectives/preference.py, since
    the schema imports no jax."""

    source: str
    reads: str = "divergence reward_alpha"
    """Keys that it reads and some other losses do not, separated by spaces."""
    reference: bool = True
    """Whether it compares with the reference."""
    whole_batch: bool = False
    """Whether the loss of a pair depends on the other pairs of the batch."""


SMOOTHED = "smoothing divergence reward_alpha"
PREFERENCES = {
    "sigmoid": PreferenceLoss(
        "DPO (Rafailov et al. 2023, arXiv:2305.18290), with smoothing cDPO", SMOOTHED
    ),
    "hinge": PreferenceLoss("SLiC (Zhao et al. 2023, arXiv:2305.10425)"),
    "ipo": PreferenceLoss("IPO (Azar et al. 2023, arXiv:2310.12036), of means over tokens"),
    "sigmoid_norm": PreferenceLoss("DPO of means over tokens"),
    "robust": PreferenceLoss("rDPO (Chowdhury et al. 2024, arXiv:2403.00409)", SMOOTHED),
    "exo_pair": PreferenceLoss(
        "EXO (Ji et al. 2024, arXiv:2402.00856); needs smoothing above 0", SMOOTHED
    ),
    "nca_pair": PreferenceLoss("NCA (Chen et al. 2024, arXiv:2402.05369)"),
    "bco_pair": PreferenceLoss("BCO (Jung et al. 2024, arXiv:2404.04656) without a shift"),
    "sppo_hard": PreferenceLoss("SPPO (Wu et al. 2024, arXiv:2405.00675)"),
    "aot": PreferenceLoss(
        "AOT, paired (Melnyk et al. 2024, arXiv:2406.05882)", "smoothing", whole_batch=True
    ),
    "aot_unpaired": PreferenceLoss("AOT, unpaired", "smoothing reward_alpha", whole_batch=True),
    "apo_zero": PreferenceLoss(
        "APO-zero (D'Oosterlinck et al. 2024, arXiv:2408.06266)", "reward_alpha"
    ),
    "apo_down": PreferenceLoss("APO-down"),
    "discopop": PreferenceLoss(
        "DiscoPOP (Lu et al. 2024, arXiv:2406.08414)", "tau divergence reward_alpha"
    ),
    "simpo": PreferenceLoss(
        "SimPO (Meng et al. 2024, arXiv:2405.14734), of means over tokens",
        "gamma smoothing reward_alpha",
        reference=False,
    ),
    "orpo": PreferenceLoss(
        "the odds ratio of ORPO (Hong et al. 2024, arXiv:2403.07691), whose other part is sft",
        reads="",
        reference=False,
    ),
    "sft": PreferenceLoss(
        "mean over tokens of the chosen answers' negative log-likelihood",
        reads="sft_on",
        reference=False,
    ),
}
"""Preference losses by name."""


def unread_keys(
    section: Section, chosen: Iterable[str], reads: Mapping[str, str]
) -> Iterator[Fault]:
    """Keys with another value than their default that none of the `chosen` kinds reads. `reads`
    names, for each kind, the keys that it reads and some others do not."""
    read = " ".join(reads[name] for name in chosen).split()
    for key, field in type(section).model_fields.items():
        readers = [name for name, keys in reads.items() if key in keys.split()]
        # Not whether it was set: a run's own record sets all keys.
        if readers and key not in read and getattr(section, key) != field.default:
            yield (
                key,
                f"is not used by {' and '.join(chosen)}, only by {listed(readers)}; leave it out, "
                f"or set its default, {field.default}",
            )


class ReferenceConfig(ObjectivePart):
    """Keys shared by objectives that compare the model with a reference."""

    reference: Literal["start", "adapter_off", "stored", "none"] = "start"
    """The reference model. start: the weights that the run begins with, kept in memory;
    adapter_off: the model without its adapter, which takes no memory; stored (not for
    policy_gradient): log-probabilities in the records, written by `maxstack score --records`; none
    (for preference): probability 1 (CPO, Xu et al. 2024, arXiv:2401.08417)."""

    @property
    def extras(self) -> tuple[str, ...]:
        return ("reference",) if self.reference == "stored" else ()


class AnswersConfig(ReferenceConfig):
    """Keys shared by objectives that learn from given answers."""

    beta: PositiveFloat = 0.1
    """Weight of the log-ratios to the reference."""


class PreferenceConfig(AnswersConfig):
    """Preference optimization of pairs: a sum of losses on the log-probabilities of chosen and
    rejected answers under the model and a reference (docs/POSTTRAINING.md has the formulas)."""

    OBJECTIVE = "maxstack.objectives.preference:Preference"
    RECORDS = ("pairs",)

    kind: Literal["preference"]
    """Selects this objective."""
    loss: str | dict[str, NonNegativeFloat] = "sigmoid"
    """A loss, or several with their weights: {sigmoid: 0.8, bco_pair: 0.2, sft: 1}."""
    smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that a preference is flipped, for sigmoid, robust, exo_pair, aot, aot_unpaired
    and simpo."""
    divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = (
        "reverse_kl"
    )
    """Divergence from the reference (f-DPO, Wang et al. 2023, arXiv:2309.16240); not for aot,
    aot_unpaired, apo_zero and losses without a reference."""
    divergence_alpha: PositiveFloat = 0.5
    """Coefficient of alpha_divergence; it must not be 1."""
    gamma: NonNegativeFloat = 0.5
    """Margin of simpo."""
    tau: PositiveFloat = 0.05
    """Temperature of discopop, which divides z."""
    reward_alpha: NonNegativeFloat = 0.0
    """With losses without a reference, log-probabilities l become (1 - exp(-reward_alpha l)) /
    reward_alpha (AlphaPO, Gupta et al. 2025, arXiv:2501.03884); 0: unchanged."""
    desensitize: float | None = Field(None, ge=0, le=1)
    """Weight of tokens beyond the length of the pair's shorter answer (LD-DPO, Liu et al. 2024,
    arXiv:2409.06411); null: 1."""
    weigh: bool = False
    """Weight each pair by the probability of both answers under the model (WPO, Zhou et al. 2024,
    arXiv:2406.11827)."""
    sft_on: Literal["completion", "sequence"] = "completion"
    """Tokens that the loss sft counts. completion: the chosen answer; sequence: the prompt too (as
    in TRL's ORPO)."""

    @property
    def losses(self) -> dict[str, float]:
        """Weights by name of a loss."""
        return {self.loss: 1.0} if isinstance(self.loss, str) else dict(self.loss)

    @property
    def compares(self) -> bool:
        """Whether a reference is used."""
        return self.reference != "none" and any(PREFERENCES[name].reference for name in self.losses)

    @property
    def over_whole_batch(self) -> bool:
        """Whether the loss of a pair depends on the other pairs of the batch."""
        return any(PREFERENCES[name].whole_batch for name in self.losses)

    def own_faults(self) -> Iterator[Fault]:
        for name in self.losses:
            if name not in PREFERENCES:
                yield (
                    "loss",
                    f"{quoted(name)} is not a preference loss; allowed: {listed([*PREFERENCES])}"
                    f"{did_you_mean(name, PREFERENCES)}",
                )
        if not self.losses:
            yield "loss", "names no loss; give at least one"
        reads = {name: loss.reads for name, loss in PREFERENCES.items()}
        yield from unread_keys(self, self.losses, reads)
        if "exo_pair" in self.losses and not self.smoothing:
            yield "smoothing", "exo_pair needs it above 0; TRL uses 0.001"
        if self.divergence != "reverse_kl" and self.reference == "none":
            yield "divergence", "is from a reference, and reference is none; leave one out"
        alpha: dict[str, str] = {self.divergence: "", "alpha_divergence": "divergence_alpha"}
        yield from unread_keys(self, [self.divergence], alpha)
        if self.divergence == "alpha_divergence" and self.divergence_alpha == 1:
            yield "divergence_alpha", "must not be 1: use divergence: forward_kl"
        if self.weigh and self.over_whole_batch:
            yield "weigh", "weighs pairs, which aot sorts apart; leave one out"
        if self.reward_alpha and self.compares:
            yield (
                "reward_alpha",
                "is for losses without a reference; set reference: none, or loss: simpo",
            )
        if self.reference == "stored" and self.desensitize is not None:
            yield (
                "desensitize",
                "weighs tokens, and stored log-probabilities are of whole answers; use "
                "reference: start or adapter_off",
            )

    @property
    def extras(self) -> tuple[str, ...]:
        return super().extras if self.compares else ()


class UnpairedConfig(AnswersConfig):
    """Optimization of single answers that are labelled as wanted or not."""

    OBJECTIVE = "maxstack.objectives.unpaired:Unpaired"
    RECORDS = ("labelled",)

    kind: Literal["unpaired"]
    """Selects this objective."""
    loss: Literal["kto", "apo_zero", "bco"] = "kto"
    """kto (Ethayarajh et al. 2024, arXiv:2402.01306): estimates the divergence from the reference
    with answers to other prompts; apo_zero: without that estimate (D'Oosterlinck et al. 2024,
    arXiv:2408.06266); bco: rewards minus their mean over the batch (Jung et al. 2024,
    arXiv:2404.04656, which uses a moving mean)."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of wanted answers."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of unwanted answers."""

    def own_faults(self) -> Iterator[Fault]:
        if self.reference == "none":
            yield "reference", "unpaired compares with a reference; use start"
        if self.loss == "kto" and self.reference == "stored":
            yield (
                "reference",
                "kto also compares answers to other prompts, whose log-probabilities are not "
                "stored; use start or adapter_off, or loss: apo_zero",
            )

    @property
    def extras(self) -> tuple[str, ...]:
        mismatched = ("mismatched",) if self.loss == "kto" else ()
        return (*super().extras, "label", *mismatched)


class RewardConfig(ObjectivePart):
    """A reward model: the head scores every position, and the loss reads the last token of each
    answer, whose score is to be higher for chosen answers than for rejected ones
    (Bradley-Terry; Ouyang et al. 2022, arXiv:2203.02155, eq. 1)."""

    OBJECTIVE = "maxstack.objectives.reward:Reward"
    RECORDS = ("pairs",)
    SCORES = True

    kind: Literal["reward"]
    """Selects this objective."""
    centre: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores around 0 (Eisenstein et al.
    2023, arXiv:2312.09244)."""
    margins: bool = False
    """Require chosen answers to score higher by the records' `margin` (Touvron et al. 2023,
    arXiv:2307.09288, eq. 2)."""

    @property
    def extras(self) -> tuple[str, ...]:
        return ("ends", "margin") if self.margins else ("ends",)


class DistillConfig(ObjectivePart):
    """Distillation: the model learns the token distributions of a teacher, which `teacher:` names,
    or whose most likely tokens are stored in the records."""

    OBJECTIVE = "maxstack.objectives.distill:Distill"
    RECORDS = (None, "chat")
    TEACHER = True
    ROLLOUTS = "may"

    kind: Literal["distill"]
    """Selects this objective."""
    beta: float = Field(0.5, ge=0, le=1)
    """0: KL(teacher | student); 1: KL(student | teacher); between them the generalized
    Jensen-Shannon divergence (Agarwal et al. 2024, arXiv:2306.13649)."""
    temperature: PositiveFloat = 1.0
    """Temperature of both models' logits."""
    next_token: NonNegativeFloat = 0.0
    """Weight of the cross-entropy on the targets, which is added to the loss."""
    top: PositiveInt | None = None
    """Number of stored teacher probabilities per position, as written by `maxstack score --top`;
    all other tokens count as one. null: run the teacher."""

    def own_faults(self) -> Iterator[Fault]:
        if self.top and self.temperature != 1:
            yield (
                "temperature",
                "stored probabilities have the temperature that they were made with; leave it out",
            )

    @property
    def row_fields(self) -> dict[str, RowField]:
        if not self.top:
            return {}
        return {
            "teacher_tokens": RowField("batch seq", "int32", (self.top,)),
            "teacher_logps": RowField("batch seq", "float32", (self.top,)),
        }


class MaskedDiffusionConfig(ObjectivePart):
    """Masked diffusion (Sahoo et al. 2024, arXiv:2406.07524; Nie et al. 2025, arXiv:2502.09992):
    each token of a row is masked with the row's probability t, and masked tokens are predicted from
    both sides. The loss is a bound on the negative log-likelihood."""

    OBJECTIVE = "maxstack.objectives.masked_diffusion:MaskedDiffusion"
    FORWARD = False
    SAMPLES = ""
    RANDOM = True

    kind: Literal["masked_diffusion"]
    """Selects this objective."""
    mask_token: NonNegativeInt | None = None
    """Id of the mask token; null: the last row of the model's table. The tokenizer must not use
    it."""
    least: float = Field(1e-3, gt=0, lt=1)
    """Minimum t; t is uniform between it and 1, stratified over the rows of a batch."""
    shift: bool = False
    """Predict the token at i + 1 from position i, as an autoregressive model does (Dream 2025,
    arXiv:2508.15487), so that training can start from one."""
    eval_times: PositiveInt = 8
    """Number of fixed values of t, the midpoints of equal intervals, over which evaluation averages
    the bound."""

    def token_ids(self, vocab: int) -> int:
        """All ids but the mask token, where that is the last."""
        return vocab - 1 if self.mask_token in (None, vocab - 1) else vocab
