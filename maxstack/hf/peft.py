"""Adapters in PEFT's format, both ways: adapter_config.json and adapter_model.safetensors, a pair
of matrices for each linear module, and tables beside them, whole or some rows.

A tensor of a family may hold several weights of ours (a fused qkv), each with its own adapter. PEFT
has one adapter for each module, so the adapters are joined: the rows of their A one below the
other, their B as blocks on a diagonal, with a rank and an alpha for all together. Reading takes
such a pair apart again if each block belongs to one weight.
Shapes: I inputs  O outputs of a module  R rank.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import einops
import numpy as np
from safetensors.numpy import save_file

from maxstack.config.writer import inline
from maxstack.errors import ConfigError
from maxstack.hf.adapter import CONFIG, MAGNITUDE, OUTER, SAVED, SETTINGS, TENSORS, A, Adapter, B
from maxstack.hf.binding import BoundTensor, Target, bind
from maxstack.hf.contents import HEAD
from maxstack.hf.families import ALL
from maxstack.hf.rows import Shape, axes_in
from maxstack.hf.table import Mismatch
from maxstack.hf.writer import Read, write_json
from maxstack.schema.lora import LoraConfig
from maxstack.schema.stack import StackConfig

FUSED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


class _Module:
    """A tensor of a family as a linear module of PEFT. `adapted`: path of a weight with an adapter
    -> number of its leading dimensions that are inputs."""

    def __init__(self, tensor: BoundTensor, adapted: Mapping[str, int]):
        self.tensor, self.name = tensor, _name(tensor)
        self.targets = [target for target in tensor.targets if target.path in adapted]
        """Our weights in the tensor that have adapters."""
        self.contract = adapted[self.targets[0].path]
        ours = axes_in(self.targets[0].part.ours)[: self.contract]
        # An input of ours may be several axes (heads, head_dim) that their tensor holds in one
        # dimension.
        names = {name for axis in ours for name in axis}
        self.inputs = [name for name in tensor.row.axes if name in names]
        """Names of the input axes, in the tensor's order."""
        self.inputs_first = tensor.row.inputs_first
        our_a = [f"({' '.join(axis)})" for axis in ours]
        self._our_a = " ".join([*our_a, "rank"])
        self._their_a = f"rank ({' '.join(self.inputs)})"

    def rows_of_a(self, a: np.ndarray) -> np.ndarray:
        """Convert [inputs..., R] to [R, I]."""
        return einops.rearrange(a, f"{self._our_a} -> {self._their_a}", **self._input_sizes)

    def our_a(self, a: np.ndarray) -> np.ndarray:
        """Convert [R, I] to [inputs..., R]."""
        return einops.rearrange(a, f"{self._their_a} -> {self._our_a}", **self._input_sizes)

    @property
    def _input_sizes(self) -> dict[str, int]:
        return {name: self.tensor.sizes[name] for name in self.inputs}

    def _sizes(self, rank: int) -> dict[str, int]:
        """Return the sizes of the tensor's axes with `rank` in place of the inputs."""
        first, *others = self.inputs
        # B has the shape of the tensor with the rank for its inputs, so the row that lays out the
        # tensor lays out B too.
        return {**self.tensor.sizes, **dict.fromkeys(others, 1), first: rank}

    def in_tensor(self, parts: Mapping[Target, np.ndarray]) -> np.ndarray:
        """Write [R, outputs...] of some parts into [O, R] of the tensor, zero elsewhere."""
        rank = next(iter(parts.values())).shape[0]
        sizes = self._sizes(rank)
        # The zeros keep the adapter of a part out of the other parts of the tensor.
        whole = np.zeros(self.tensor.row.shape(sizes), np.float32)
        for target, b in parts.items():
            inputs = axes_in(target.part.ours)[: self.contract]
            dims = [math.prod(map(sizes.__getitem__, axis)) for axis in inputs]
            self.tensor.row.write(target.part, b.reshape(*dims, *b.shape[1:]), whole, sizes)
        return whole.T if self.inputs_first else whole

    def of_part(self, target: Target, b: np.ndarray) -> np.ndarray:
        """Take [R, outputs...] of a part out of [O, R] of the tensor."""
        rank = b.shape[1]
        whole = np.ascontiguousarray(b.T if self.inputs_first else b)
        part = self.tensor.row.ours(target.part, whole, self._sizes(rank))
        return part.reshape(rank, *part.shape[self.contract :])

    def own(
        self, target: Target, a: np.ndarray, b: np.ndarray, rank: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of A and columns of B that are a part's own, as `write` places them; all
        of them where other parts use these too."""
        begin = self.targets.index(target) * rank
        own = slice(begin, begin + rank)
        # Rows of A that other parts use too are of one adapter, trained on the fused tensor.
        others = (self.of_part(other, b[:, own]) for other in self.targets if other != target)
        return (a, b) if any(other.any() for other in others) else (a[own], b[:, own])


def write(
    out: Path,
    lora: LoraConfig,
    adapted: Mapping[str, int],
    bound: Sequence[BoundTensor],
    read: Read,
    base: Read,
    source: str | None,
    tables: Collection[str] = (),
) -> int:
    """Write the folder, and return the number of modules.

    `adapted` has for each weight with an adapter how many dimensions it contracts, `read` gives a
    leaf of it by path, `base` a weight without its adapter; `source` is where PEFT finds the model.
    `tables` are embedding and head where they are written whole; tied ones under both names, since
    PEFT takes each for its own.
    """
    modules = _modules(bound, adapted)
    _refuse_taken_for_experts(modules, bound)
    tensors: dict[str, np.ndarray] = {}
    for module in modules:
        rows, columns = [], []
        for target in module.targets:
            rows.append(module.rows_of_a(read(f"{target.path}/lora_a")[target.lead]))
            b = read(f"{target.path}/lora_b")[target.lead]
            columns.append(module.in_tensor({target: b}))
        name = f"{OUTER}{module.name}"
        tensors[f"{name}.{A}"] = np.concatenate(rows)
        tensors[f"{name}.{B}"] = np.concatenate(columns, axis=1)
        if lora.dora:
            # PEFT has one vector of norms for the module: parts without an adapter get those of the
            # base, which change nothing.
            norms = {
                target: _norms(target, module.contract, adapted, read, base)[None]
                for target in module.tensor.targets
            }
            tensors[f"{name}.{MAGNITUDE}"] = module.in_tensor(norms)[:, 0]
    saved: dict[str, np.ndarray] = {}
    for tensor in bound:
        target = tensor.targets[0]
        if target.path in tables and not tensor.row.copy:
            saved[tensor.name] = np.zeros(tensor.shape, np.float32)
            tensor.row.write(target.part, base(target.path), saved[tensor.name], tensor.sizes)
    # A tied head has no tensor here, and in PEFT a table of its own.
    if tables and HEAD not in {tensor.name for tensor in bound}:
        saved[HEAD] = next(iter(saved.values()))
    tensors |= {f"{OUTER}{name}": table for name, table in saved.items()}
    # fan_in_fan_out is of the whole adapter, so all its modules must agree.
    (inputs_first,) = {module.inputs_first for module in modules}
    counts = {module.name: len(module.targets) for module in modules if len(module.targets) > 1}
    # The factor of B A stays what it was: alpha x count / (rank x count), and with rslora
    # alpha x sqrt(count) / sqrt(rank x count).
    alphas = {
        name: lora.alpha * (count**0.5 if lora.rslora else count) for name, count in counts.items()
    }
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        **{theirs: getattr(lora, key) for key, theirs in SETTINGS.items()},
        "lora_alpha": _whole(lora.alpha),
        "bias": "none",
        "fan_in_fan_out": inputs_first,
        "inference_mode": True,
        "init_lora_weights": True,
        # Tables that are there because the vocabulary grew are not named, as peft leaves them.
        SAVED: [name.split(".")[-2] for name in saved] if lora.modules_to_save else None,
        "rank_pattern": {name: lora.rank * count for name, count in counts.items()},
        "alpha_pattern": {name: _whole(alpha) for name, alpha in alphas.items()},
        "target_modules": _target_modules(modules, bound),
    }
    write_json(out / CONFIG, said)
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(contiguous, out / TENSORS, {"format": "pt"})
    return len(modules)


def read(
    adapter: Adapter,
    lora: LoraConfig,
    adapted: Mapping[str, int],
    bound: Sequence[BoundTensor],
    shapes: Mapping[str, Shape],
    where: str = "this model",
) -> dict[str, np.ndarray]:
    """Return the leaves of our adapters by path, float32, of `shapes`. ConfigError where the folder
    holds another adapter than `lora` describes, or that of another model than `where`."""
    folder = adapter.folder
    _refuse_others(adapter, lora, adapted, bound)
    leaves = {path: np.zeros(shape, np.float32) for path, shape in shapes.items()}
    for module in _modules(bound, adapted):
        name, count = module.name, len(module.targets)
        if name not in adapter.modules:
            raise ConfigError(
                f"lora.adapter: {folder} has no adapter for {name}, which "
                f"lora.targets names ({module.targets[0].path}); narrow it"
            )
        wanted = module.tensor.row.shape(module.tensor.sizes)
        adapter.check_sizes(name, module.inputs_first, wanted, where)
        for target in module.targets:
            a, b = adapter.tensors[f"{name}.{A}"], adapter.tensors[f"{name}.{B}"]
            # Joined by `write`. An adapter that peft trained on the fused tensor has one rank for
            # all its parts.
            if count > 1 and a.shape[0] == lora.rank * count:
                a, b = module.own(target, a, b, lora.rank)
            if a.shape[0] != lora.rank:
                anew = ", or train the weights that this tensor holds together anew"
                raise ConfigError(
                    f"lora.adapter: {folder} has rank {a.shape[0]} for {name}, and "
                    f"lora one rank for all, {lora.rank}; merge it instead: maxstack lora merge"
                    f"{anew if len(module.tensor.targets) > 1 else ''}"
                )
            # Equal up to rounding: both may divide by a square root.
            if abs(adapter.scale(name) - lora.scale) > 1e-6:
                raise ConfigError(
                    f"lora.adapter: {folder} multiplies {name} by {adapter.scale(name):g}, and "
                    f"lora by {lora.scale:g}; merge it instead: maxstack lora merge"
                )
            leaves[f"{target.path}/lora_a"][target.lead] = module.our_a(a)
            leaves[f"{target.path}/lora_b"][target.lead] = module.of_part(target, b)
            if lora.dora:
                norms = adapter.tensors[f"{name}.{MAGNITUDE}"].reshape(-1, 1)
                leaves[f"{target.path}/magnitude"][target.lead] = module.of_part(target, norms)[0]
    return leaves


def bind_adapter(
    adapter: Adapter, model: StackConfig, shapes: Mapping[str, Shape]
) -> list[BoundTensor]:
    """Return the tensors of our model in the first family that has the adapter's modules.
    ConfigError where none has."""
    if adapter.has_tables:
        raise ConfigError(
            f"{adapter.folder}: holds tables beside low-rank matrices; merge it into the model's "
            "folder (of a run: maxstack export), and use the merged one without it: maxstack lora "
            f"merge FOLDER --adapter {adapter.folder} --out MERGED"
        )
    # A configuration names no family, and an adapter only modules.
    for family in ALL:
        try:
            family.write(model)
            bound = bind(family, model, shapes)
        except (Mismatch, ConfigError, ValueError):
            continue
        # Several families may express the model; names of modules decide.
        if adapter.modules <= (names := {_name(tensor) for tensor in bound}):
            adapter.check_whole(sorted(names))
            return bound
    raise ConfigError(
        f"{adapter.folder}: is of another model: no family of ours that is this one has "
        f"{min(adapter.modules)}"
    )


def _modules(bound: Sequence[BoundTensor], adapted: Mapping[str, int]) -> list[_Module]:
    return [
        _Module(tensor, adapted)
        for tensor in bound
        if not tensor.row.copy and tensor.paths & adapted.keys()
    ]


def _refuse_others(
    adapter: Adapter, lora: LoraConfig, adapted: Mapping[str, int], bound: Sequence[BoundTensor]
) -> None:
    """ConfigError with all settings in which the adapter and `lora` differ."""
    wrong = {
        key: value
        for key, value in adapter.lora.items()
        # Dropout does not change what an adapter computes.
        if key != "dropout" and getattr(lora, key) != value
    }
    targets: set[str] = set()
    for tensor in bound:
        if _name(tensor) in adapter.modules:
            targets |= tensor.paths & adapted.keys() or tensor.paths
    if targets != adapted.keys():
        wrong["targets"] = sorted(targets)
    if wrong:
        said = ", ".join(f"lora.{key}={inline(value)}" for key, value in wrong.items())
        raise ConfigError(f"lora.adapter: {adapter.folder} was trained otherwise; set {said}")


def _name(tensor: BoundTensor) -> str:
    return tensor.name.removesuffix(".weight")


def _whole(number: float) -> float:
    """Return a whole number as an integer."""
    return int(number) if number.is_integer() else number


def _target_modules(modules: Sequence[_Module], bound: Sequence[BoundTensor]) -> list[str]:
    """Return last names, as is usual, where these match no other module; else whole names."""
    names = {module.name for module in modules}
    last = {name.rpartition(".")[2] for name in names}
    meant = {_name(tensor) for tensor in bound if _name(tensor).rpartition(".")[2] in last}
    # peft adapts every module whose last name is listed, also those that have no adapter here.
    return sorted(last if meant == names else names)


def _refuse_taken_for_experts(modules: Sequence[_Module], bound: Sequence[BoundTensor]) -> None:
    """ConfigError for modules beside experts that peft (0.21) would not adapt: in models whose
    experts transformers fuses, it takes their names for those of the experts."""
    if not any(tensor.row.experts for tensor in bound):
        return
    for module in modules:
        # Exported nevertheless, logits of qwen3_next were off by 1.4, with last names and with
        # whole ones.
        if module.name.rpartition(".")[2] in FUSED:
            raise ConfigError(
                f"cannot be exported for peft, which takes an adapter of {module.name} for one of "
                "the experts; merge it instead (maxstack export), or train with lora.targets that "
                "leave MLPs out"
            )


def _norms(
    target: Target, contract: int, adapted: Mapping[str, int], read: Read, base: Read
) -> np.ndarray:
    """Return the norms of columns: the trained ones, or those of a weight without an adapter."""
    if target.path in adapted:
        return read(f"{target.path}/magnitude")[target.lead]
    weight = np.asarray(base(target.path)[target.lead], np.float32)
    return np.sqrt(np.square(weight).sum(axis=tuple(range(contract))))
