"""Adapters in PEFT's format, both ways: adapter_config.json and adapter_model.safetensors, a pair
of matrices for each linear module, and tables beside them, whole or some rows.

A tensor of a family that holds several weights of ours has one adapter, which is theirs side by
side: A's rows one below the other, B's blocks on a diagonal. Shapes: I inputs  O outputs of a
module  R rank.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import einops
import numpy as np
from safetensors.numpy import save_file

from maxstack.config.writer import inline
from maxstack.data.copies import local_folder
from maxstack.errors import ConfigError, DataError, quoted, shortened
from maxstack.hf.binding import BoundTensor, Target, bind
from maxstack.hf.contents import HEAD
from maxstack.hf.families import ALL
from maxstack.hf.rows import Shape, axes_in
from maxstack.hf.safetensors_file import SafetensorsFile
from maxstack.hf.table import Mismatch
from maxstack.hf.tensors import check_finite
from maxstack.hf.writer import Read, write_json
from maxstack.schema.lora import LoraConfig
from maxstack.schema.stack import StackConfig
from maxstack.strict_json import read_object

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
OUTER = "base_model.model."
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
REFUSED = """
    lora_bias layer_replication megatron_config target_parameters alora_invocation_tokens
    use_qalora use_bdlora arrow_config kasa_config monteclora_config
    """.split()
"""Settings of PEFT that are not supported; null, false or an empty list leaves them off."""
REWRITING = ("pissa", "corda", "olora", "loftq")
"""Beginnings of values of init_lora_weights for which peft takes something out of the base's
weights whenever it loads the adapter."""
SAVED, INDICES = "modules_to_save", "trainable_token_indices"
TABLE = re.compile(
    r"(?!.*\.lora_)(.+?)(?:(?:\.modules_to_save|\.original_module|(?:\.token_adapter)?\.base_layer)?"
    r"\.weight|\.token_adapter\.(trainable_tokens_delta))"
)
"""Names of weights that are saved whole, the last in their order the trained one, and of rows."""
FUSED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
TINY = 1e-12
LARGEST = float(np.finfo(np.float32).max)
SETTINGS = {
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "rslora": "use_rslora",
    "dora": "use_dora",
}
"""Keys of a LoraConfig -> those of PEFT."""


class Adapter:
    """A folder in PEFT's format, at a path or URL, checked.

    ConfigError where it is none, or has settings that are not supported.

    DataError for a tensor with NaN or infinities, if `finite`.
    """

    def __init__(self, path: str | Path, *, finite: bool = True):
        folder = self.folder = local_folder(str(path), (CONFIG, TENSORS))
        if not folder.is_dir():
            raise ConfigError(
                f"{folder}: no such folder; give one in PEFT's format, with {CONFIG} and {TENSORS}"
            )
        try:
            self.said, file = read_object(folder / CONFIG), SafetensorsFile(folder / TENSORS)
        except DataError as error:
            raise ConfigError(
                f"{folder}: cannot be read as an adapter of PEFT ({CONFIG} and {TENSORS}): {error}"
            ) from error
        self._check_settings()
        self.tensors = {}
        for name in file.entries:
            tensor = file.array(name)
            if finite:
                check_finite(tensor, f"{file.path}: tensor {name}")
            self.tensors[name.removeprefix(OUTER)] = tensor.astype(np.float32)
        self.modules = {
            name.removesuffix(f".{A}") for name in self.tensors if name.endswith(f".{A}")
        }
        self.tables, self.rows = dict[str, np.ndarray](), dict[str, np.ndarray]()
        """Weights that are saved whole, and rows of weights, by module."""
        for name in sorted(self.tensors):
            if found := TABLE.fullmatch(name):
                held = self.rows if found[2] else self.tables
                held[found[1]] = self.tensors.pop(name)
        said = map(self.said.get, (SAVED, INDICES))
        self.has_tables = any((self.tables, self.rows, *said))
        self.lora: dict[str, Any] = {
            key: self.said.get(theirs) or LoraConfig.model_fields[key].default
            for key, theirs in SETTINGS.items()
        }
        """The mapping of a LoraConfig, without targets."""
        self.dora = bool(self.lora["dora"])
        self.parts = A, B, *([MAGNITUDE] if self.dora else [])
        self._check_tensors()

    def _check_settings(self) -> None:
        said: Any = self.said
        where = f"in {CONFIG}"
        if said.get("peft_type") != "LORA":
            kind = shortened(str(said.get("peft_type")))
            raise ConfigError(f"{self.folder}: peft_type {kind} is not LORA")
        refused = {key: said.get(key) for key in REFUSED}
        if said.get("bias") != "none":
            refused["bias"] = said.get("bias")
        for key, value in refused.items():
            if value not in (None, [], False):
                raise ConfigError(f"{self.folder}: {key}={quoted(value)} {where} is not supported")
        if str(init := said.get("init_lora_weights")).lower().startswith(REWRITING):
            raise ConfigError(
                f"{self.folder}: init_lora_weights={quoted(init)} {where} means that peft changes "
                "the base's weights when it loads the adapter, which is not supported; let peft "
                "save it as plain LoRA first (path_initial_model_for_weight_conversion)"
            )

        def need(key: str, value: Any, valid: bool, kind: str) -> None:
            if not valid:
                raise ConfigError(
                    f"{self.folder}: {key}={quoted(value)} {where} is not {kind}; "
                    "save the adapter with peft again"
                )

        rank, dropout = said.get("r"), said.get("lora_dropout") or 0.0
        need("r", rank, type(rank) is int and rank >= 1, "a whole number of at least 1")
        patterns = said.get("alpha_pattern") or {}
        alphas = {f"alpha_pattern.{key}": value for key, value in patterns.items()}
        for key, value in ({"lora_alpha": said.get("lora_alpha")} | alphas).items():
            valid = type(value) in (int, float) and 0 < value <= LARGEST
            need(key, value, valid, "a number of more than 0 that float32 holds")
        need(SAVED, saved := said.get(SAVED) or [], isinstance(saved, list), "a list of names")
        valid = type(dropout) in (int, float) and 0 <= dropout < 1
        need("lora_dropout", dropout, valid, "a number of at least 0 and less than 1")

    def _check_tensors(self) -> None:
        if not self.modules:
            instead = next(iter(sorted(self.tensors)), "nothing")
            raise ConfigError(
                f"{self.folder}: {TENSORS} holds no pairs lora_A.weight and lora_B.weight, but "
                f"{instead}; save the adapter with peft (save_pretrained), and merge one of an "
                "embedding with peft too (merge_and_unload)"
            )
        targets = self.said.get("target_modules")
        if isinstance(targets, list) and (
            odd := sorted(name for name in self.modules if not _listed(name, targets))
        ):
            raise ConfigError(
                f"{self.folder}: holds an adapter of {odd[0]}, which target_modules={targets} in "
                f"{CONFIG} does not name, so that peft passes it over; mend one of them"
            )
        parts = {f"{module}.{part}" for module in self.modules for part in self.parts}
        if odd := sorted(self.tensors.keys() - parts):
            raise ConfigError(
                f"{self.folder}: holds {odd[0]}, which is no part of an adapter of a linear module "
                f"as {CONFIG} describes it"
            )
        for module in sorted(self.modules):
            for name in self.parts:
                if f"{module}.{name}" not in self.tensors:
                    raise ConfigError(
                        f"{self.folder}: {TENSORS} has no {module}.{name}; save the adapter with "
                        "peft again"
                    )
            a, b = self.tensors[f"{module}.{A}"].shape, self.tensors[f"{module}.{B}"].shape
            if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
                raise ConfigError(
                    f"{self.folder}: lora_A {[*a]} and lora_B {[*b]} of {module} are no "
                    "pair of matrices [rank, inputs] and [outputs, rank]"
                )
            if a[0] != (rank := self._of_module("rank_pattern", module, "r")):
                raise ConfigError(
                    f"{self.folder}: lora_A of {module} has {a[0]} rows, and {CONFIG} says rank "
                    f"{rank}; save the adapter with peft again"
                )

    def check_sizes(
        self, module: str, inputs_first: bool, wanted: Sequence[int], where: str
    ) -> None:
        """ConfigError where a module is not that of a weight of the shape `wanted`, which begins
        with the inputs or the outputs whatever fan_in_fan_out says: peft, too, follows the model.
        """
        outputs = self.tensors[f"{module}.{B}"].shape[0]
        inputs = self.tensors[f"{module}.{A}"].shape[1]
        lengths = self.tensors[f"{module}.{MAGNITUDE}"].size if self.dora else outputs
        if lengths != outputs:
            raise ConfigError(
                f"{self.folder}: has {lengths} lengths of columns for {module}, which has "
                f"{outputs} outputs; save it with peft again"
            )
        change = [inputs, outputs] if inputs_first else [outputs, inputs]
        if change != [*wanted]:
            raise ConfigError(
                f"{self.folder}: is of another model: its change of {module} is {change}, "
                f"and in {where} that is {[*wanted]}"
            )

    def merged(self, module: str, weight: np.ndarray, inputs_first: bool, sign: int) -> np.ndarray:
        """The weight and sign x scale B A in float32, with DoRA its columns as long as they are to
        be. The weight is [I, O] or [O, I]."""
        with np.errstate(over="ignore", invalid="ignore"):  # which is told by the tensor's name
            change = self.tensors[f"{module}.{B}"] @ self.tensors[f"{module}.{A}"]
            change *= sign * self.scale(module)
        whole = weight.astype(np.float32) + (change.T if inputs_first else change)
        if self.dora:
            axis = 0 if inputs_first else 1
            lengths = self.tensors[f"{module}.{MAGNITUDE}"].reshape(-1)
            factor = lengths / np.maximum(np.linalg.norm(whole, axis=axis), TINY)
            whole *= np.expand_dims(factor, axis)
        return whole

    def table(self, module: str, base: np.ndarray, embed: str, tied: bool) -> np.ndarray:
        """A module's table [V, D] in place of its `base`. Where the head is the table of `embed`,
        it takes the rows that are saved of that; whole tables are each module's own, as in peft.

        ConfigError where what is saved does not fit the base or the settings.
        """
        source = embed if tied and module not in self.tables | self.rows else module
        said = self.said.get(INDICES) or {}
        by_name = said if isinstance(said, dict) else {embed: said}
        table = self.tables.get(module, base).astype(base.dtype)
        values = self.rows.get(source)
        wrong = f"holds {module} as {[*table.shape]}, and the model has {[*base.shape]}"
        try:
            if table.shape[1:] != base.shape[1:]:
                raise ValueError
            wrong = f"{INDICES}={quoted(said)} in {CONFIG} are no rows of {source}"
            if values is not None:
                named = (
                    rows
                    for own in (source, embed)
                    for name, rows in by_name.items()
                    if _listed(own, [name])
                )
                indices = np.array(next(named, None), np.uint64)
                if np.unique(indices).size != indices.size:
                    wrong = f"{INDICES}={quoted(said)} in {CONFIG} name a row twice"
                    raise ValueError
                table[indices] = values.reshape(indices.size, -1)
            elif module not in self.tables and _listed(
                module, [*(self.said.get(SAVED) or ()), *by_name]
            ):
                wrong = f"{CONFIG} says that {module} is saved, and {TENSORS} has nothing of it"
                raise ValueError
        except (IndexError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.folder}: {wrong}; save the adapter with peft again, of this model, with "
                "save_embedding_layers=True where its vocabulary was resized"
            ) from error
        return table

    def scale(self, module: str) -> float:
        """Factor of B A x."""
        rank = self.tensors[f"{module}.{A}"].shape[0]
        alpha = self._of_module("alpha_pattern", module, "lora_alpha")
        return alpha / (rank**0.5 if self.lora["rslora"] else rank)

    def _of_module(self, patterns: str, module: str, key: str) -> Any:
        """What the first of some patterns that names a module gives it; else the key's value."""
        for name, value in (self.said.get(patterns) or {}).items():
            if re.fullmatch(rf"(.*\.)?({name})", module):
                return value
        return self.said[key]

    def check_whole(self, names: Iterable[str]) -> None:
        """ConfigError where modules of a base, by their `names`, have no adapter though
        target_modules lists their last names, as peft reads them."""
        targets, layers = self.said.get("target_modules"), self.said.get("layers_to_transform")
        excluded = self.said.get("exclude_modules") or ()
        if not isinstance(targets, list) or layers is not None or isinstance(excluded, str):
            return
        stacks = {_stack(module) for module in self.modules}
        absent = [
            name
            for name in names
            if _stack(name) in stacks
            and _listed(name, targets)
            and not _listed(name, excluded)
            and ".experts." not in name  # whose modules peft knows by other names
            and name not in self.modules
        ]
        if absent:
            raise ConfigError(
                f"{self.folder}: {TENSORS} has no adapter of {absent[0]}, though target_modules in "
                f"{CONFIG} names it ({len(absent)} are missing); save it with peft again"
            )

    def settings(self, adapted: Sequence[str]) -> dict[str, Any]:
        """The mapping of a LoraConfig that starts from it, for weights of these paths."""
        targets = [re.escape(path) for path in adapted]
        return self.lora | {"targets": targets, "adapter": str(self.folder)}


class _Module:
    """A tensor of a family as a linear module of PEFT. `adapted`: path of a weight with an adapter
    -> how many of its first dimensions are inputs."""

    def __init__(self, tensor: BoundTensor, adapted: Mapping[str, int]):
        self.tensor, self.name = tensor, _name(tensor)
        self.targets = [target for target in tensor.targets if target.path in adapted]
        """Weights of ours in the tensor that have adapters."""
        self.contract = adapted[self.targets[0].path]
        ours = axes_in(self.targets[0].part.ours)[: self.contract]
        names = {name for axis in ours for name in axis}
        self.inputs = [name for name in tensor.row.axes if name in names]
        """Names of the axes of the inputs, in the tensor's order."""
        self.inputs_first = tensor.row.inputs_first
        self._our_a = " ".join(f"({' '.join(axis)})" for axis in ours) + " rank"
        self._their_a = f"rank ({' '.join(self.inputs)})"

    def rows_of_a(self, a: np.ndarray) -> np.ndarray:
        """[inputs..., R] -> [R, I]."""
        return einops.rearrange(a, f"{self._our_a} -> {self._their_a}", **self._input_sizes)

    def our_a(self, a: np.ndarray) -> np.ndarray:
        """[R, I] -> [inputs..., R]."""
        return einops.rearrange(a, f"{self._their_a} -> {self._our_a}", **self._input_sizes)

    @property
    def _input_sizes(self) -> dict[str, int]:
        return {name: self.tensor.sizes[name] for name in self.inputs}

    def _sizes(self, rank: int) -> dict[str, int]:
        """Sizes of the tensor's axes with `rank` numbers in place of the inputs."""
        first, *others = self.inputs
        return {**self.tensor.sizes, **dict.fromkeys(others, 1), first: rank}

    def in_tensor(self, parts: Mapping[Target, np.ndarray]) -> np.ndarray:
        """[R, outputs...] of some parts -> [O, R] of the tensor, zero elsewhere."""
        rank = next(iter(parts.values())).shape[0]
        sizes = self._sizes(rank)
        whole = np.zeros(self.tensor.row.shape(sizes), np.float32)
        for target, b in parts.items():
            inputs = axes_in(target.part.ours)[: self.contract]
            dims = [math.prod(sizes[name] for name in axis) for axis in inputs]
            self.tensor.row.write(target.part, b.reshape(*dims, *b.shape[1:]), whole, sizes)
        return whole.T if self.inputs_first else whole

    def of_part(self, target: Target, b: np.ndarray) -> np.ndarray:
        """[O, R] of the tensor -> [R, outputs...] of a part."""
        rank = b.shape[1]
        whole = np.ascontiguousarray(b.T if self.inputs_first else b)
        part = self.tensor.row.ours(target.part, whole, self._sizes(rank))
        return part.reshape(rank, *part.shape[self.contract :])

    def own(
        self, target: Target, a: np.ndarray, b: np.ndarray, rank: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rows of A and columns of B that are a part's own, as `write` lays them; all of them
        where other parts use these too."""
        begin = self.targets.index(target) * rank
        own = slice(begin, begin + rank)
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
    """Write the folder; the number of modules. `adapted` has, for each weight with an adapter, how
    many dimensions it contracts, `read` gives a leaf of it by path, `base` a weight without its
    adapter; `source` is where PEFT finds the model. Of the weights `tables`, embedding and head,
    both names are written where they are one, since PEFT takes each for its own."""
    modules = _modules(bound, adapted)
    _refuse_taken_for_experts(modules, bound)
    tensors: dict[str, np.ndarray] = {}
    for module in modules:
        rows = [
            module.rows_of_a(read(f"{target.path}/lora_a")[target.lead])
            for target in module.targets
        ]
        columns = [
            module.in_tensor({target: read(f"{target.path}/lora_b")[target.lead]})
            for target in module.targets
        ]
        name = f"{OUTER}{module.name}"
        tensors[f"{name}.{A}"] = np.concatenate(rows)
        tensors[f"{name}.{B}"] = np.concatenate(columns, axis=1)
        if lora.dora:
            lengths = {
                target: _lengths(target, module.contract, adapted, read, base)[None]
                for target in module.tensor.targets
            }
            tensors[f"{name}.{MAGNITUDE}"] = module.in_tensor(lengths)[:, 0]
    saved: dict[str, np.ndarray] = {}
    for tensor in bound:
        target, *_ = tensor.targets
        if target.path in tables and not tensor.row.copy:
            saved[tensor.name] = np.zeros(tensor.shape, np.float32)
            tensor.row.write(target.part, base(target.path), saved[tensor.name], tensor.sizes)
    if tables and HEAD not in {tensor.name for tensor in bound}:
        saved[HEAD] = next(iter(saved.values()))
    tensors |= {f"{OUTER}{name}": table for name, table in saved.items()}
    names = [name.split(".")[-2] for name in saved]
    (inputs_first,) = {module.inputs_first for module in modules}
    counts = {module.name: len(module.targets) for module in modules if len(module.targets) > 1}
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
        SAVED: names if lora.modules_to_save else None,
        "rank_pattern": {name: lora.rank * count for name, count in counts.items()},
        "alpha_pattern": {
            name: _whole(lora.alpha * (count**0.5 if lora.rslora else count))
            for name, count in counts.items()
        },
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
    """The leaves of our adapters by path, float32, of `shapes`. ConfigError where the folder's
    adapter is another than `lora` says, or of another model than `where`."""
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
            if count > 1 and a.shape[0] == lora.rank * count:
                a, b = module.own(target, a, b, lora.rank)
            if a.shape[0] != lora.rank:
                anew = ", or train the weights that this tensor holds together anew"
                raise ConfigError(
                    f"lora.adapter: {folder} has rank {a.shape[0]} for {name}, and "
                    f"lora one rank for all, {lora.rank}; merge it instead: maxstack lora merge"
                    f"{anew if len(module.tensor.targets) > 1 else ''}"
                )
            if abs(adapter.scale(name) - lora.scale) > 1e-6:
                raise ConfigError(
                    f"lora.adapter: {folder} multiplies {name} by {adapter.scale(name):g}, and "
                    f"lora by {lora.scale:g}; merge it instead: maxstack lora merge"
                )
            leaves[f"{target.path}/lora_a"][target.lead] = module.our_a(a)
            leaves[f"{target.path}/lora_b"][target.lead] = module.of_part(target, b)
            if lora.dora:
                lengths = adapter.tensors[f"{name}.{MAGNITUDE}"].reshape(-1, 1)
                leaves[f"{target.path}/magnitude"][target.lead] = module.of_part(target, lengths)[0]
    return leaves


def bind_adapter(
    adapter: Adapter, model: StackConfig, shapes: Mapping[str, Shape]
) -> list[BoundTensor]:
    """The tensors of our model in the first family that has the adapter's modules. ConfigError
    where none has."""
    if adapter.has_tables:
        raise ConfigError(
            f"{adapter.folder}: holds tables beside low-rank matrices; merge it into the model's "
            "folder (of a run: maxstack export), and use the merged one without it: maxstack lora "
            f"merge FOLDER --adapter {adapter.folder} --out MERGED"
        )
    for family in ALL:
        try:
            family.write(model)
            bound = bind(family, model, shapes)
        except (Mismatch, ConfigError, ValueError):
            continue
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
        if not tensor.row.copy and any(target.path in adapted for target in tensor.targets)
    ]


def _refuse_others(
    adapter: Adapter, lora: LoraConfig, adapted: Mapping[str, int], bound: Sequence[BoundTensor]
) -> None:
    """ConfigError with all settings in which the adapter and `lora` differ."""
    wrong = {
        key: value
        for key, value in adapter.lora.items()
        if key != "dropout" and getattr(lora, key) != value
    }
    targets: set[str] = set()
    for tensor in bound:
        if _name(tensor) in adapter.modules:
            paths = {target.path for target in tensor.targets}
            targets |= paths & adapted.keys() or paths
    if targets != adapted.keys():
        wrong["targets"] = sorted(targets)
    if wrong:
        said = ", ".join(f"lora.{key}={inline(value)}" for key, value in wrong.items())
        raise ConfigError(f"lora.adapter: {adapter.folder} was trained otherwise; set {said}")


def _name(tensor: BoundTensor) -> str:
    return tensor.name.removesuffix(".weight")


def _stack(module: str) -> str:
    """What stands before the number of a module's layer."""
    return re.split(r"\d", module, maxsplit=1)[0]


def _listed(module: str, names: Iterable[str]) -> bool:
    return any(f".{module}".endswith(f".{name}") for name in names)


def _whole(number: float) -> float:
    """A whole number as an integer."""
    return int(number) if number.is_integer() else number


def _target_modules(modules: Sequence[_Module], bound: Sequence[BoundTensor]) -> list[str]:
    """Last names, as is usual, where these mean no other module; else whole names."""
    names = {module.name for module in modules}
    last = {name.rpartition(".")[2] for name in names}
    meant = {_name(tensor) for tensor in bound if _name(tensor).rpartition(".")[2] in last}
    return sorted(last if meant == names else names)


def _refuse_taken_for_experts(modules: Sequence[_Module], bound: Sequence[BoundTensor]) -> None:
    """ConfigError for modules beside experts that peft (0.21) would not adapt: in models whose
    experts transformers fuses, it takes their names for those of the experts."""
    if not any(tensor.row.experts for tensor in bound):
        return
    for module in modules:
        if module.name.rpartition(".")[2] in FUSED:
            raise ConfigError(
                f"cannot be exported for peft, which takes an adapter of {module.name} for one of "
                "the experts; merge it instead (maxstack export), or train with lora.targets that "
                "leave MLPs out"
            )


def _lengths(
    target: Target, contract: int, adapted: Mapping[str, int], read: Read, base: Read
) -> np.ndarray:
    """Lengths of the columns: as they are trained, or of the weight where that has no adapter."""
    if target.path in adapted:
        return read(f"{target.path}/magnitude")[target.lead]
    weight = np.asarray(base(target.path)[target.lead], np.float32)
    return np.sqrt(np.square(weight).sum(axis=tuple(range(contract))))
