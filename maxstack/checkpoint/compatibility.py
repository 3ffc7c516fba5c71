"""The part of a configuration that a checkpoint binds, and the errors where a run's differs."""

import contextlib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pydantic

from maxstack import config
from maxstack.config.spelling import did_you_mean
from maxstack.config.writer import inline
from maxstack.errors import ConfigError
from maxstack.schema.quantization import RuleConfig

if TYPE_CHECKING:
    from maxstack.schema.config import Config

BOUND = (
    *("model", "quantization", "lora", "data", "objective", "rollout", "rewards"),
    "train.batch_size",
)
FREE = (
    "model.dtype",
    "model.weights",
    "model.remat",
    "model.unroll",
    "model.blocks.*.slack",
    "model.*.backend",
    "data.workers",
    "data.prefetch",
    "data.quarantine",
    "data.sources.*.partial",
    "data.sources.*.max_bytes",
    "objective.eval_times",
    "lora.dropout",
    "lora.adapter",
    *(
        f"rollout.{key}"
        for key in ("workers", "sandbox", "record", "show", "tensor", "eval_temperature")
    ),
    *(f"rollout.environment.{key}" for key in ("timeout", "memory", "failure")),
    *(f"rewards.*.{key}" for key in ("timeout", "memory", "failure", "name")),
)
"""Keys below those of BOUND that may change nevertheless."""
HARMLESS: dict[str, list[tuple[Any, Any]]] = {
    "data.sources.*.encoding_errors": [
        (config.ABSENT, "keep"),
        ("refuse", "keep"),
        ("refuse", "replace"),
    ],
}
"""Changes, (old, new), that leave the model and every document that was read before as they were;
ABSENT: older checkpoints lack the key. A key that they lack has its default too."""


KINDS = re.compile(r"optimizer\.(groups\.\d+\.)?chain\.\d+\.kind: ")
"""Changes of what the optimizer's state means."""
SAID = ("run", "distributed", "checkpoint", "data.sources")
"""Sections whose changes change no step, or are told elsewhere."""


def check_forced(keys: Sequence[str], cfg: "Config") -> None:
    """ConfigError where one of the keys of --force-config is none that can be forced."""
    for key in keys:
        if not under(key, BOUND):
            raise ConfigError(
                f"--force-config {key}: no key that a checkpoint binds; those are "
                f"{', '.join(BOUND)} and what is below them"
            )
        _check_exists(key, cfg.model_dump(mode="json"))
        if key == "train.batch_size":
            raise ConfigError(
                "--force-config train.batch_size: cannot be forced, because each row of a batch "
                "has its own place in the data; start a new run with another run.name"
            )


def under(key: str, prefixes: Sequence[str]) -> bool:
    """True for a key that is one of the prefixes, or below it; they may hold wildcards."""
    return any(
        fnmatch.fnmatchcase(key, pattern)
        for prefix in prefixes
        for pattern in (prefix, f"{prefix}.*")
    )


class Compatibility(NamedTuple):
    """A checkpoint, and the run that is to go on from it."""

    where: str
    """The step's path."""
    saved: dict[str, Any]
    """The configuration that wrote it."""
    cfg: "Config"
    elsewhere: bool
    """It is another run's."""

    @property
    def remedy(self) -> str:
        """The other remedy than putting a change back: the weights of another run are free to use,
        whatever was trained on them."""
        if self.elsewhere:
            return (
                f"begin on its weights alone (maxstack export {self.where} --out FOLDER, "
                "then model.from=FOLDER)"
            )
        return "start a new run with another run.name"

    def refuse_changes(self, free: Sequence[str]) -> None:
        """ConfigError with the keys that changed and are not `free`."""
        if changed := self.changed(BOUND, free):
            force = "data" if all(line.startswith("data.") for line in changed) else "KEY"
            raise ConfigError(
                f"{self.where} was written by another configuration (checkpoint -> now):\n"
                + "\n".join(f"  {line}" for line in changed)
                + f"\n  Put these back, {self.remedy}, or, where no array "
                f"changes its shape, --force-config {force}."
            )

    def refuse_shapes(self, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """ConfigError where the arrays of two states have other names or shapes: with the keys of
        the optimizer that changed, or of a model that was forced; with the arrays, where no key
        changed, so a library must have."""
        old, new = (
            {key: tuple(leaf.shape) for key, leaf in tree.items()} for tree in (saved, wanted)
        )
        arrays = [
            f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
            for key in sorted({*old, *new})
            if old.get(key) != new.get(key)
        ]
        if not arrays:
            return
        what, key = "the state of another optimizer", "optimizer"
        if any(line.startswith("params/") for line in arrays):
            what, key = "weights of another model", "model"
        begins = "let it begin anew (checkpoint.restore_parts=[params, data, step]), "
        begins = begins if key == "optimizer" else ""
        lines = self.changed((key,)) or arrays
        more = f"\n  and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise ConfigError(
            f"{self.where} holds {what} (checkpoint -> now):\n"
            + "\n".join(f"  {line}" for line in lines[:10])
            + more
            + f"\n  Arrays of other shapes cannot be forced: put the {key} back, {begins}or "
            f"{self.remedy}."
        )

    def refuse_optimizer(self) -> None:
        """ConfigError where the optimizer's state was another kind's, whose arrays may be alike:
        adam's second moments are not yogi's."""
        if kinds := [line for line in self.changed(("optimizer",)) if KINDS.match(line)]:
            raise ConfigError(
                f"{self.where} holds the state of another optimizer (checkpoint -> now):\n"
                + "\n".join(f"  {line}" for line in kinds)
                + "\n  Put it back, let it begin anew (checkpoint.restore_parts=[params, data, "
                f"step]), or {self.remedy}."
            )

    def changed(self, keys: Sequence[str], free: Sequence[str] = ()) -> list[str]:
        """`key: old -> new` for each difference below some keys."""
        now = self.cfg.model_dump(mode="json")
        different = list(config.difference(self.saved, now))
        added = {key for key, old, _ in different if old == config.ABSENT}
        added -= {key for key, *_ in config.difference(self._completed, now)}
        return [
            f"{key}: {_shown(key, old)} -> {_shown(key, new)}"
            for key, old, new in different
            if under(key, keys)
            and not under(key, free)
            and key not in added
            and not _harmless(key, old, new)
        ]

    @property
    def _completed(self) -> dict[str, Any]:
        """The saved configuration with the defaults of keys that it lacks; as it is where it has
        keys that there are no more."""
        with contextlib.suppress(pydantic.ValidationError):
            return type(self.cfg).model_validate(self.saved).model_dump(mode="json")
        return self.saved


def _harmless(key: str, old: Any, new: Any) -> bool:
    return any(
        (old, new) in changes
        for pattern, changes in HARMLESS.items()
        if fnmatch.fnmatchcase(key, pattern)
    )


def _shown(key: str, value: Any) -> str:
    """A value in YAML's flow style; the rules of a recipe without what is their default."""
    if key == "quantization.rules" and isinstance(value, list):
        fields = RuleConfig.model_fields
        defaults = {name: field.get_default() for name, field in fields.items()}
        value = [
            {name: item for name, item in rule.items() if item not in (defaults.get(name), [])}
            for rule in value
        ]
    return value if value == config.ABSENT else inline(value)


def _check_exists(key: str, cfg: Any) -> None:
    """ConfigError where the configuration has no such key."""
    parts = key.split(".")
    for i, part in enumerate(parts):
        if isinstance(cfg, list):
            cfg = {f"{number}": item for number, item in enumerate(cfg)}
        names = [*cfg] if isinstance(cfg, dict) else []
        if part == "*":
            return
        if part not in names:
            raise ConfigError(
                f"--force-config {key}: unknown key "
                f"{'.'.join(parts[: i + 1])}{did_you_mean(part, names)}"
            )
        cfg = cfg[part]
