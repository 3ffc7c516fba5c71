"""Rules between the objective and the model, the data, rollouts and rewards; each yields (key, what
is wrong and what to do)."""

from collections.abc import Callable, Iterator
from typing import Any

from maxstack.config import Fault
from maxstack.schema.config import Config
from maxstack.schema.data import BYTE_IDS, SyntheticSource
from maxstack.schema.objective import (
    DistillConfig,
    FlowConfig,
    MaskedDiffusionConfig,
    ReferenceConfig,
    RewardConfig,
)
from maxstack.schema.policy_gradient import PolicyGradientConfig
from maxstack.schema.rollout import RolloutConfig


def faults(cfg: Config) -> Iterator[Fault]:
    """A model, data, rollouts or rewards that do not fit the objective."""
    objective, kind = cfg.objective, cfg.objective.kind
    if cfg.model.kind not in objective.MODELS:
        yield (
            "objective.kind",
            f"{kind} is for model.kind={' or '.join(objective.MODELS)}, and this is "
            f"{cfg.model.kind}; use {cfg.model.OBJECTIVE}",
        )
        return
    if objective.FORWARD:
        yield from _causal(cfg)
    if cfg.teacher and not objective.TEACHER:
        yield "teacher", f"objective.kind={kind} has no teacher; use distill, or drop it"
    if cfg.rollout and objective.ROLLOUTS == "never":
        yield (
            "rollout",
            f"objective.kind={kind} learns from data, not from samples; use policy_gradient, or "
            "leave it out",
        )
    if not cfg.rollout and objective.ROLLOUTS == "always":
        yield "rollout", f"objective.kind={kind} learns from samples: set rollout.prompts"
    if cfg.rollout:
        yield from _rollout(cfg.rollout, cfg)
    if cfg.rewards and not cfg.rollout:
        yield "rewards", "are for samples: set rollout.prompts, or leave them out"
    if objective.SCORES and not cfg.decoder.head.scores:
        yield (
            "model.head.scores",
            f"objective.kind={kind} needs a score: set model.head.scores=true",
        )
    yield from _records(cfg)
    yield from _OF_KIND.get(kind, _none)(objective, cfg)


def record_kinds(cfg: Config) -> tuple[str | None, ...]:
    """Kinds of records that the objective learns from; None: text."""
    return ("prompts",) if cfg.rollout else cfg.objective.RECORDS


def makes_latents(cfg: Config) -> bool:
    """Whether what a flow generates are latents: a picture has 1 or 3 channels."""
    return cfg.data.has_latents or getattr(cfg.model, "channels", 1) not in (1, 3)


def _records(cfg: Config) -> Iterator[Fault]:
    kinds = record_kinds(cfg)
    wanted = " or ".join(f"{{kind: {name}}}" for name in kinds if name)
    for key, data in cfg.data_sections.items():
        for index, source in enumerate(data.sources):
            if source.holds not in kinds and not isinstance(source, SyntheticSource):
                yield (
                    f"{key}.sources.{index}.record",
                    f"objective.kind={cfg.objective.kind} learns from "
                    + (f"records: set {wanted}" if wanted else "text: leave it out"),
                )
        # Objectives tell the segments of a row apart by their number.
        if len(mixed := sorted({source.holds for source in data.sources if source.holds})) > 1:
            yield (
                f"{key}.sources",
                f"{' and '.join(mixed)} are in one mixture; give records of one kind",
            )


def _causal(cfg: Config) -> Iterator[Fault]:
    for name, block in cfg.model.blocks.items():
        if block.mixer.two_sided:
            yield (
                f"model.blocks.{name}.mixer.causal",
                "without a causal mask a position sees the token that "
                f"{cfg.objective.kind} predicts; use causal: true, or "
                "objective.kind=masked_diffusion",
            )


def _rollout(rollout: RolloutConfig, cfg: Config) -> Iterator[Fault]:
    rows, seq_len = cfg.train.batch_size, cfg.data.seq_len
    prompts = rollout.prompts // rollout.minibatches
    samples = prompts * rollout.samples
    if (prompts % rows and rows % prompts) or samples % rows:
        yield (
            "train.batch_size",
            f"{rows} rows cannot share the {prompts} prompts ({samples} samples) of a step evenly; "
            f"use a divisor of {prompts}, or a multiple of it that divides {samples}",
        )
        return
    room = rollout.room(rows, seq_len)
    if room <= rollout.max_tokens:
        yield (
            "data.seq_len",
            f"a row holds {samples // rows} samples, each of at most {room} tokens, and "
            f"rollout.max_tokens={rollout.max_tokens} leaves none for a prompt; raise data.seq_len "
            "or train.batch_size",
        )
    for key, data in cfg.data_sections.items():
        if data.overlong == "cut":
            yield f"{key}.overlong", "cuts the end of a prompt, which matters most; use drop"
        if data.packing != "fit":
            yield f"{key}.packing", "samples are packed whole: set packing: fit"
    if rollout.on_policy < 1 and (rollout.environment or cfg.objective.kind != "distill"):
        yield (
            "rollout.on_policy",
            "answers of records are for objective.kind=distill without an environment; leave it "
            "out",
        )
    if cfg.eval.every and not cfg.rewards and not rollout.environment:
        yield "eval.every", "samples are evaluated by rewards: give some, or set it to 0"
    names = [reward.label for reward in cfg.rewards]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f"rewards.{index}.name", f"{name} is taken; give another name"


def _reference(objective: ReferenceConfig, cfg: Config) -> Iterator[Fault]:
    if objective.reference != "adapter_off":
        return
    if not cfg.lora:
        yield (
            "objective.reference",
            "adapter_off is the model without its adapter, and there is no lora; use start",
        )
    elif cfg.lora.modules_to_save:
        yield (
            "objective.reference",
            "adapter_off keeps lora.modules_to_save as they are trained; use start",
        )


def _flow(objective: FlowConfig, cfg: Config) -> Iterator[Fault]:
    if cfg.eval.samples and makes_latents(cfg):
        yield "eval.samples", "latents are not pictures; leave it out"


def _reward(objective: RewardConfig, cfg: Config) -> Iterator[Fault]:
    for key, data in cfg.data_sections.items():
        if data.overlong == "cut":
            yield f"{key}.overlong", "a score is of a whole answer, whose end cut drops; use drop"


def _distill(objective: DistillConfig, cfg: Config) -> Iterator[Fault]:
    if bool(objective.top) == bool(cfg.teacher):
        yield (
            "teacher",
            "is not used where objective.top reads stored probabilities; leave one out"
            if objective.top
            else "objective.kind=distill needs a teacher: teacher.from=FOLDER, or objective.top "
            "with records that hold its probabilities",
        )
    sources = [source for data in cfg.data_sections.values() for source in data.sources]
    if objective.top and not all(source.record for source in sources):
        yield "objective.top", "probabilities are stored in records; a source has none"


def _masked_diffusion(objective: MaskedDiffusionConfig, cfg: Config) -> Iterator[Fault]:
    for name, block in cfg.model.blocks.items():
        if not block.mixer.two_sided:
            yield (
                f"model.blocks.{name}.mixer.causal",
                "masked_diffusion predicts a hidden token from both sides; "
                + (
                    f"set model.blocks.{name}.mixer.causal=false"
                    if "causal" in type(block.mixer).model_fields
                    else f"{block.mixer.kind} sees one side alone: use another mixer"
                ),
            )
    if cfg.decoder.mtp:
        yield "model.mtp", "predicts further tokens, which masked_diffusion has none of; drop it"
    token, vocab = objective.mask_token, cfg.decoder.vocab
    if token is None:
        return
    if token < BYTE_IDS and any(data.cut_into_bytes for data in cfg.data_sections.values()):
        yield (
            "objective.mask_token",
            f"mask_token={token} is an id of data.tokenizer kind bytes; use {BYTE_IDS} or more, or "
            "null: the last row of the model's table",
        )
    if token >= vocab:
        yield (
            "objective.mask_token",
            f"mask_token={token} is not a row of model.vocab={vocab}; use {vocab - 1} or less",
        )


def _policy_gradient(objective: PolicyGradientConfig, cfg: Config) -> Iterator[Fault]:
    yield from _reference(objective, cfg)
    if bool(objective.distil) != bool(cfg.teacher):
        yield (
            "teacher",
            "objective.distil needs a teacher: teacher.from=FOLDER"
            if objective.distil
            else "is not used where objective.distil is 0; set it, or leave teacher out",
        )
    rewarded = cfg.rewards or (cfg.rollout and cfg.rollout.environment)
    if not rewarded and not objective.distil:
        yield "rewards", "policy_gradient learns from rewards: give at least one"
    if objective.has_values != cfg.decoder.head.value:
        yield (
            "model.head.value",
            "advantage.baseline=value needs an estimate: set model.head.value=true"
            if objective.has_values
            else "is used by objective.advantage.baseline=value alone; leave it out",
        )
    samples, advantage = cfg.rollout.samples if cfg.rollout else 2, objective.advantage
    by_group = advantage.baseline in ("mean", "others") or advantage.scale == "group"
    if samples < 2 and by_group and not objective.has_values:
        yield (
            "rollout.samples",
            "one sample has no group to compare with; give 2 or more, or set "
            "objective.advantage.baseline=none and scale=none",
        )


def _none(objective: Any, cfg: Config) -> Iterator[Fault]:
    yield from ()


_OF_KIND: dict[str, Callable[[Any, Config], Iterator[Fault]]] = {
    "flow": _flow,
    "preference": _reference,
    "unpaired": _reference,
    "reward": _reward,
    "distill": _distill,
    "masked_diffusion": _masked_diffusion,
    "policy_gradient": _policy_gradient,
}
