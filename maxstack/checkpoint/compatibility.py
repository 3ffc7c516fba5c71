"""The part of a configuration that a checkpoint binds, and the errors where a run's differs.

Architecture, data, objective and batch size must be as they were, and the optimizer's state must
have the same shapes and kinds. Compute dtype, remat, workers, the mesh and other keys that change
no learned value may change, and so may a key that an older checkpoint lacks, where it has its
default.
"""

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

# Rollouts and rewards too: a rollout that was interrupted is made again, and must come out the
# same.
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
"""Keys below those of BOUND that may change all the same."""
HARMLESS: dict[str, list[tuple[Any, Any]]] = {
    "data.sources.*.encoding_errors": [
        (config.ABSENT, "keep"),
        ("refuse", "keep"),
        ("refuse", "replace"),
    ],
}
"""Changes, (old, new), that leave every document that was read before as it was; ABSENT: older
checkpoints lack the key."""
KINDS = re.compile(r"optimizer\.(groups\.\d+\.)?chain\.\d+\.kind: ")
"""Changes of the meaning of the optimizer's state."""
ANEW = "let it begin anew (checkpoint.restore_parts=[params, data, step])"
TOLD_ELSEWHERE = ("run", "distributed", "checkpoint", "data.sources")
"""Sections whose changes affect no step, or are told elsewhere."""


def check_forced(keys: Sequence[str], cfg: "Config") -> None:
    """ConfigError where a key of --force-config cannot be forced."""
    for key in keys:
        if not under(key, BOUND):
            raise ConfigError(
                f"--force-config {key}: a checkpoint does not bind this key; it binds "
                f"{', '.join(BOUND)} and the keys below them"
            )
        _check_exists(key, cfg.model_dump(mode="json"))
        if key == "train.batch_size":
            raise ConfigError(
                "--force-config train.batch_size: cannot be forced, since each row of a batch has "
                "its own position in the data; start a new run with another run.name"
            )


def under(key: str, prefixes: Sequence[str]) -> bool:
    """True for a key that is one of the prefixes or below one; they may hold wildcards."""
    return any(
        # fnmatch's * matches dots as well: a pattern holds for keys at any depth.
        fnmatch.fnmatchcase(key, prefix) or fnmatch.fnmatchcase(key, f"{prefix}.*")
        for prefix in prefixes
    )


class Compatibility(NamedTuple):
    """A checkpoint and the run that is to resume from it."""

    where: str
    """The step's path."""
    saved: dict[str, Any]
    """Its configuration."""
    cfg: "Config"
    elsewhere: bool
    """True for another run's checkpoint."""

    @property
    def remedy(self) -> str:
        """What to do other than undo a change; another run's weights may be taken alone."""
        if self.elsewhere:
            return (
                f"start from its weights alone (maxstack export {self.where} --out FOLDER, then "
                "model.from=FOLDER)"
            )
        return "start a new run with another run.name"

    def refuse_changes(self, free: Sequence[str]) -> None:
        """ConfigError that lists bound keys that changed and are not `free`."""
        if changed := self.changed(BOUND, free):
            force = "data" if all(line.startswith("data.") for line in changed) else "KEY"
            raise ConfigError(
                f"{self.where} was written by another configuration (checkpoint -> now):\n"
                + "\n".join(f"  {line}" for line in changed)
                + f"\n  Put these back, {self.remedy}, or, where no array "
                f"changes its shape, --force-config {force}."
            )

    def refuse_shapes(self, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """ConfigError where the arrays of two states have other names or shapes. It lists the
        changed keys of the optimizer, or of a model that was forced; the arrays where no key
        changed, as after an update of Optax."""
        old = {key: tuple(leaf.shape) for key, leaf in saved.items()}
        new = {key: tuple(leaf.shape) for key, leaf in wanted.items()}
        arrays = [
            f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
            for key in sorted({*old, *new})
            if old.get(key) != new.get(key)
        ]
        if not arrays:
            return
        of_model = any(line.startswith("params/") for line in arrays)
        what = "weights of another model" if of_model else "the state of another optimizer"
        key, anew = ("model", "") if of_model else ("optimizer", f"{ANEW}, ")
        lines = self.changed((key,)) or arrays
        more = f"\n  and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise ConfigError(
            f"{self.where} holds {what} (checkpoint -> now):\n"
            + "\n".join(f"  {line}" for line in lines[:10])
            + more
            + f"\n  Arrays of other shapes cannot be forced: put the {key} back, {anew}or "
            f"{self.remedy}."
        )

    def refuse_optimizer(self) -> None:
        """ConfigError where another kind of optimizer wrote the state. Its arrays may have the same
        shapes: adam's second moments are not yogi's."""
        if kinds := [line for line in self.changed(("optimizer",)) if KINDS.match(line)]:
            raise ConfigError(
                f"{self.where} holds the state of another optimizer (checkpoint -> now):\n"
                + "\n".join(f"  {line}" for line in kinds)
                + f"\n  Put it back, {ANEW}, or {self.remedy}."
            )

    def changed(self, keys: Sequence[str], free: Sequence[str] = ()) -> list[str]:
        """List `key: old -> new` for each difference below some keys."""
        now = self.cfg.model_dump(mode="json")
        different = list(config.difference(self.saved, now))
        # A key that the checkpoint lacks is no change where it has its default now; where it has
        # another value the completed configuration differs there too.
        added = {key for key, old, _ in different if old == config.ABSENT}
        added -= {key for key, *_ in config.difference(self._completed, now)}
        return [
            f"{key}: {_show(key, old)} -> {_show(key, new)}"
            for key, old, new in different
            if under(key, keys)
            and not under(key, free)
            and key not in added
            and not _harmless(key, old, new)
        ]

    @property
    def _completed(self) -> dict[str, Any]:
        """The saved configuration with the defaults of keys that it lacks; unchanged where it has
        keys that no longer exist."""
        with contextlib.suppress(pydantic.ValidationError):
            return type(self.cfg).model_validate(self.saved).model_dump(mode="json")
        return self.saved


def _harmless(key: str, old: Any, new: Any) -> bool:
    return any(
        (old, new) in changes
        for pattern, changes in HARMLESS.items()
        if fnmatch.fnmatchcase(key, pattern)
    )


def _show(key: str, value: Any) -> str:
    """Write a value in YAML's flow style; rules of a recipe without their defaults."""
    if key == "quantization.rules" and isinstance(value, list):
        fields = RuleConfig.model_fields
        defaults = {name: field.get_default() for name, field in fields.items()}

        def shorten(rule: dict[str, Any]) -> dict[str, Any]:
            return {k: item for k, item in rule.items() if item not in (defaults.get(k), [])}

        value = [*map(shorten, value)]
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
