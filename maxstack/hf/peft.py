"""Adapters in PEFT's format, both ways: adapter_config.json and adapter_model.safetensors, a pair
of matrices for each linear module.

Where a tensor of a family holds several weights of ours, its one adapter is theirs side by side:
A's rows one below the other, B's blocks on a diagonal. Shapes: I inputs  O outputs of a module  R
rank.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import einops
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from maxstack.config import ConfigError, quoted, shortened
from maxstack.config.writer import inline
from maxstack.hf.binding import Bound, Target, bind
from maxstack.hf.families import ALL
from maxstack.hf.rows import Part, Shape, axes_in
from maxstack.hf.table import Mismatch
from maxstack.hf.tensors import check_finite
from maxstack.schema.decoder import DecoderConfig
from maxstack.schema.lora import LoraConfig

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
OUTER = "base_model.model."
REFUSED = {
    "bias": "none",
    "modules_to_save": None,
    "lora_bias": False,
    "layer_replication": None,
    "megatron_config": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
}
"""Settings of PEFT that say more than we know, and what they must be."""
REWRITING = ("pissa", "corda", "olora", "loftq")
"""How values of init_lora_weights begin for which peft takes something out of the base's weights
whenever it loads the adapter."""
FUSED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
LARGEST = float(np.finfo(np.float32).max)
Read = Callable[[str], np.ndarray]


class Adapter:
    """A folder in PEFT's format, checked; ConfigError for what it is not, or we do not know.

    DataError for a tensor with NaN or infinities, if `finite`.
    """

    def __init__(self, folder: Path, *, finite: bool = True):
        self.folder = folder
        if not folder.is_dir():
            raise ConfigError(
                f"{folder}: no such folder; give one in PEFT's format, with {CONFIG} and {TENSORS}"
            )
        try:
            self.said, tensors = (
                json.loads((folder / CONFIG).read_text()),
                load_file(folder / TENSORS),
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(
                f"{folder}: cannot be read as an adapter of PEFT ({CONFIG} and {TENSORS}): {error}"
            ) from error
        self._check_said()
        for name, array in tensors.items() if finite else ():
            check_finite(array, f"{folder / TENSORS}: tensor {name}")
        self.tensors = {
            name.removeprefix(OUTER): array.astype(np.float32) for name, array in tensors.items()
        }
        self.modules = {
            name.removesuffix(".lora_A.weight")
            for name in self.tensors
            if name.endswith(".lora_A.weight")
        }
        if odd := [
            name for name in self.tensors if name.rpartition(".lora_")[0] not in self.modules
        ]:
            raise ConfigError(
                f"{folder}: holds {odd[0]}, which is no part of an adapter of a linear module"
            )
        self.dora, self.rslora = bool(self.said.get("use_dora")), bool(self.said.get("use_rslora"))
        self.inputs_first = bool(self.said.get("fan_in_fan_out"))
        self._check_tensors()

    def _check_said(self) -> None:
        said, where = self.said, f"in {CONFIG}"
        if not isinstance(said, dict) or said.get("peft_type") != "LORA":
            raise ConfigError(
                f"{self.folder}: peft_type "
                f"{shortened(str(said.get('peft_type'))) if isinstance(said, dict) else None} "
                "is not LORA"
            )
        for key, must in REFUSED.items():
            if said.get(key, must) not in (must, None, [], False):
                raise ConfigError(
                    f"{self.folder}: {key}={quoted(said[key])} {where} is not supported"
                )
        if str(init := said.get("init_lora_weights")).lower().startswith(REWRITING):
            raise ConfigError(
                f"{self.folder}: init_lora_weights={quoted(init)} {where} means that "
                "peft changes the base's weights when it loads the "
                "adapter, which is not supported; let peft save it as plain LoRA first "
                "(path_initial_model_for_weight_conversion)"
            )
        if type(said.get("r")) is not int or said["r"] < 1:
            raise ConfigError(
                f"{self.folder}: r={quoted(said.get('r'))} {where} is not a whole number "
                "of at least 1; "
                "save the adapter with peft again"
            )
        alphas = {
            "lora_alpha": said.get("lora_alpha"),
            **{
                f"alpha_pattern.{key}": value
                for key, value in (said.get("alpha_pattern") or {}).items()
            },
        }
        for key, value in alphas.items():
            if type(value) not in (int, float) or not 0 < value <= LARGEST:
                raise ConfigError(
                    f"{self.folder}: {key}={quoted(value)} {where} is not a number of "
                    "more than 0 that float32 holds; "
                    "save the adapter with peft again"
                )
        dropout = said.get("lora_dropout") or 0.0
        if type(dropout) not in (int, float) or not 0 <= dropout < 1:
            raise ConfigError(
                f"{self.folder}: lora_dropout={quoted(dropout)} {where} is not a number "
                "of at least 0 and less than 1; "
                "save the adapter with peft again"
            )

    def _check_tensors(self) -> None:
        if not self.modules:
            raise ConfigError(f"{self.folder}: {TENSORS} holds no adapter")
        for module in sorted(self.modules):
            leaves = (
                "lora_A.weight",
                "lora_B.weight",
                *(("lora_magnitude_vector",) if self.dora else ()),
            )
            if missing := [leaf for leaf in leaves if f"{module}.{leaf}" not in self.tensors]:
                raise ConfigError(
                    f"{self.folder}: {TENSORS} has no {module}.{missing[0]}; save the "
                    "adapter with peft again"
                )
            a, b = (self.tensors[f"{module}.{leaf}"].shape for leaf in leaves[:2])
            if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
                raise ConfigError(
                    f"{self.folder}: lora_A {[*a]} and lora_B {[*b]} of {module} are no "
                    "pair of matrices [rank, inputs] and "
                    "[outputs, rank]"
                )

    def change(self, module: str) -> tuple[np.ndarray, np.ndarray | None]:
        """scale B A [O, I], and with DoRA the lengths [O] that columns are to have."""
        a, b = self.tensors[f"{module}.lora_A.weight"], self.tensors[f"{module}.lora_B.weight"]
        return self.scale(module) * (b @ a), self.tensors[
            f"{module}.lora_magnitude_vector"
        ].reshape(-1) if self.dora else None

    def scale(self, module: str) -> float:
        """What B A x is multiplied by."""
        rank, patterns = (
            self.tensors[f"{module}.lora_A.weight"].shape[0],
            self.said.get("alpha_pattern") or {},
        )
        alpha = next(
            (
                value
                for name, value in patterns.items()
                if re.fullmatch(rf"(.*\.)?({name})", module)
            ),
            self.said["lora_alpha"],
        )
        return alpha / (rank**0.5 if self.rslora else rank)

    def settings(self, adapted: Sequence[str]) -> dict[str, Any]:
        """The mapping of a LoraConfig that starts from it, for weights of these paths."""
        return {
            "rank": self.said["r"],
            "alpha": float(self.said["lora_alpha"]),
            "dropout": float(self.said.get("lora_dropout") or 0.0),
            "rslora": self.rslora,
            "dora": self.dora,
            "targets": [re.escape(path) for path in adapted],
            "adapter": str(self.folder),
        }


def write(
    out: Path,
    lora: LoraConfig,
    adapted: Mapping[str, int],
    bound: Sequence[Bound],
    read: Read,
    base: Read,
    source: str | None,
) -> int:
    """Write the folder; the number of modules. `adapted` says of each weight with an adapter how
    many dimensions it contracts, `read` gives a leaf of it by path, `base` a weight without its
    adapter; `source` is where PEFT finds the model."""
    tensors: dict[str, np.ndarray] = {}
    modules = [
        (tensor, _module(tensor))
        for tensor in bound
        if not tensor.row.copy and any(target.path in adapted for target in tensor.targets)
    ]
    _refuse_taken_for_experts([module for _, module in modules], bound)
    counts, flat = {}, set()
    for tensor, module in modules:
        mine = [target for target in tensor.targets if target.path in adapted]
        contract = adapted[mine[0].path]
        a = np.concatenate(
            [
                _rows_of_a(
                    tensor, target.part, read(f"{target.path}/lora_a")[target.lead], contract
                )
                for target in mine
            ]
        )
        blocks = {
            target: _padded(read(f"{target.path}/lora_b")[target.lead], i, len(mine))
            for i, target in enumerate(mine)
        }
        b = _placed(tensor, contract, lora.rank * len(mine), blocks)
        tensors |= {f"{OUTER}{module}.lora_A.weight": a, f"{OUTER}{module}.lora_B.weight": b}
        if lora.dora:
            lengths = {
                target: _lengths(target, contract, adapted, read, base)[None]
                for target in tensor.targets
            }
            tensors[f"{OUTER}{module}.lora_magnitude_vector"] = _placed(
                tensor, contract, 1, lengths
            )[:, 0]
        if len(mine) > 1:
            counts[module] = len(mine)
        flat.add(_inputs_first(tensor, mine[0].part, contract))
    assert len(flat) == 1, "one family has one order of dimensions"
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": lora.rank,
        "lora_alpha": _whole(lora.alpha),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": flat.pop(),
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {module: lora.rank * count for module, count in counts.items()},
        "alpha_pattern": {
            module: _whole(lora.alpha * (count**0.5 if lora.rslora else count))
            for module, count in counts.items()
        },
        "target_modules": _named([module for _, module in modules], bound),
    }
    (out / CONFIG).write_text(json.dumps(said, indent=2) + "\n")
    save_file(
        {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()},
        out / TENSORS,
        {"format": "pt"},
    )
    return len(modules)


def read(
    adapter: Adapter,
    lora: LoraConfig,
    adapted: Mapping[str, int],
    bound: Sequence[Bound],
    shapes: Mapping[str, Shape],
    where: str = "this model",
) -> dict[str, np.ndarray]:
    """The leaves of our adapters by path, float32, of `shapes`. ConfigError where the folder's
    adapter is another than `lora` says, or of another model than `where`."""
    tensors, folder = adapter.tensors, adapter.folder
    _refuse_others(adapter, lora, adapted, bound)
    found = {path: np.zeros(shape, np.float32) for path, shape in shapes.items()}
    for tensor in bound:
        for target in () if tensor.row.copy else tensor.targets:
            if target.path not in adapted:
                continue
            module, contract = _module(tensor), adapted[target.path]
            a, b, m = (
                tensors.get(f"{module}.{name}")
                for name in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
            )
            if a is None or b is None or (lora.dora and m is None):
                raise ConfigError(
                    f"lora.adapter: {folder} has no adapter for {module}, which "
                    f"lora.targets names ({target.path}); narrow it"
                )
            _check_sizes(adapter, tensor, target.part, contract, where)
            mine = [other for other in tensor.targets if other.path in adapted]
            if len(mine) > 1 and a.shape[0] == lora.rank * len(mine):
                a, b = _own(tensor, target, mine, contract, a, b, lora.rank)
            if a.shape[0] != lora.rank:
                anew = (
                    ", or train the weights that this tensor holds together anew"
                    if len(tensor.targets) > 1
                    else ""
                )
                raise ConfigError(
                    f"lora.adapter: {folder} has rank {a.shape[0]} for {module}, and "
                    f"lora one rank for all, {lora.rank}; merge it "
                    f"instead: maxstack lora merge{anew}"
                )
            if abs(adapter.scale(module) - lora.scale) > 1e-6:
                raise ConfigError(
                    f"lora.adapter: {folder} multiplies {module} by "
                    f"{adapter.scale(module):g}, and lora by {lora.scale:g}; merge it "
                    "instead: maxstack lora merge"
                )
            found[f"{target.path}/lora_a"][target.lead] = _a_of_rows(
                tensor, target.part, a, contract
            )
            found[f"{target.path}/lora_b"][target.lead] = _taken(tensor, target, contract, b)
            if m is not None and lora.dora:
                found[f"{target.path}/magnitude"][target.lead] = _taken(
                    tensor, target, contract, m.reshape(-1, 1)
                )[0]
    return found


def bound_to(adapter: Adapter, model: DecoderConfig, shapes: Mapping[str, Shape]) -> list[Bound]:
    """The tensors of our model in the first family that has the adapter's modules. ConfigError
    where none has."""
    for family in ALL:
        try:
            family.write(model)
            bound = bind(family, model, shapes)
        except (Mismatch, ConfigError, ValueError):
            continue
        if adapter.modules <= {_module(tensor) for tensor in bound}:
            return bound
    raise ConfigError(
        f"{adapter.folder}: is of another model: no family of ours that is this one has "
        f"{min(adapter.modules)}"
    )


def _refuse_others(
    adapter: Adapter, lora: LoraConfig, adapted: Mapping[str, int], bound: Sequence[Bound]
) -> None:
    """ConfigError with all that the adapter and `lora` say differently."""
    theirs = {
        "rank": adapter.said["r"],
        "alpha": adapter.said["lora_alpha"],
        "rslora": adapter.rslora,
        "dora": adapter.dora,
    }
    wrong = {key: value for key, value in theirs.items() if getattr(lora, key) != value}
    paths = [
        {target.path for target in tensor.targets}
        for tensor in bound
        if _module(tensor) in adapter.modules
    ]
    if not all(held & adapted.keys() for held in paths) or not adapted.keys() <= set().union(
        *paths
    ):
        wrong["targets"] = sorted(
            {path for held in paths for path in held & adapted.keys() or held}
        )
    if wrong:
        said = ", ".join(f"lora.{key}={inline(value)}" for key, value in wrong.items())
        raise ConfigError(f"lora.adapter: {adapter.folder} was trained otherwise; set {said}")


def _check_sizes(adapter: Adapter, tensor: Bound, part: Part, contract: int, where: str) -> None:
    """ConfigError where a module of the adapter has not the inputs and outputs of the tensor."""
    module, wanted = _module(tensor), [*tensor.row.shape(tensor.sizes)]
    change = [
        adapter.tensors[f"{module}.lora_B.weight"].shape[0],
        adapter.tensors[f"{module}.lora_A.weight"].shape[1],
    ]
    lengths = adapter.tensors[f"{module}.lora_magnitude_vector"].size if adapter.dora else change[0]
    if lengths != change[0]:
        raise ConfigError(
            f"{adapter.folder}: has {lengths} lengths of columns for {module}, which has "
            f"{change[0]} outputs; save it with peft again"
        )
    if _inputs_first(tensor, part, contract):
        change.reverse()
    if change != wanted:
        raise ConfigError(
            f"{adapter.folder}: is of another model: its change of {module} is {change}, "
            f"and in {where} that is {wanted}"
        )


def _module(tensor: Bound) -> str:
    return tensor.name.removesuffix(".weight")


def _whole(number: float) -> float | int:
    return int(number) if number == int(number) else number


def _named(modules: Sequence[str], bound: Sequence[Bound]) -> list[str]:
    """Last names, as is usual, where these mean no other module; else whole names."""
    last = {module.rpartition(".")[2] for module in modules}
    clear = {_module(tensor) for tensor in bound if _module(tensor).rpartition(".")[2] in last} == {
        *modules
    }
    return sorted(last if clear else modules)


def _refuse_taken_for_experts(modules: Sequence[str], bound: Sequence[Bound]) -> None:
    """ConfigError for modules beside experts that peft (0.21) would not adapt: in models whose
    experts transformers fuses, it takes their names for those of the experts."""
    odd = (
        [module for module in modules if module.rpartition(".")[2] in FUSED]
        if any(tensor.row.experts for tensor in bound)
        else []
    )
    if odd:
        raise ConfigError(
            f"cannot be exported for peft, which takes an adapter of {odd[0]} for one of "
            "the experts; merge it instead (maxstack "
            "export), or train with lora.targets that leave MLPs out"
        )


def _inputs(part: Part, contract: int) -> set[str]:
    """Names of the axes that are inputs of a weight."""
    return {name for axis in axes_in(part.ours)[:contract] for name in axis}


def _inputs_first(tensor: Bound, part: Part, contract: int) -> bool:
    """Whether the tensor is [I, O]; modules of torch are [O, I]."""
    return set(axes_in(tensor.row.theirs)[0]) <= _inputs(part, contract)


def _in_their_order(tensor: Bound, part: Part, contract: int) -> list[str]:
    inputs = _inputs(part, contract)
    return [name for axis in axes_in(tensor.row.theirs) for name in axis if name in inputs]


def _layouts_of_a(tensor: Bound, part: Part, contract: int) -> tuple[str, str, dict[str, int]]:
    """Ours [inputs..., R] and theirs [R, I] for einops, and the sizes of their axes."""
    names = _in_their_order(tensor, part, contract)
    ours = " ".join(f"({' '.join(axis)})" for axis in axes_in(part.ours)[:contract])
    return f"{ours} rank", f"rank ({' '.join(names)})", {name: tensor.sizes[name] for name in names}


def _rows_of_a(tensor: Bound, part: Part, a: np.ndarray, contract: int) -> np.ndarray:
    """[inputs..., R] -> [R, I]."""
    ours, theirs, sizes = _layouts_of_a(tensor, part, contract)
    return einops.rearrange(a, f"{ours} -> {theirs}", **sizes)


def _a_of_rows(tensor: Bound, part: Part, a: np.ndarray, contract: int) -> np.ndarray:
    """[R, I] -> [inputs..., R]."""
    ours, theirs, sizes = _layouts_of_a(tensor, part, contract)
    return einops.rearrange(a, f"{theirs} -> {ours}", **sizes)


def _padded(b: np.ndarray, place: int, count: int) -> np.ndarray:
    """[R, outputs...] -> [count R, outputs...], zero but at one place."""
    return np.concatenate([b if i == place else np.zeros_like(b) for i in range(count)])


def _own(
    tensor: Bound,
    target: Target,
    mine: Sequence[Target],
    contract: int,
    a: np.ndarray,
    b: np.ndarray,
    rank: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of A and columns of B that are a part's own, as `write` lays them; all of them where
    other parts have some of these too."""
    own = slice(mine.index(target) * rank, (mine.index(target) + 1) * rank)
    others = [_taken(tensor, other, contract, b)[own] for other in mine if other != target]
    return (a, b) if any(other.any() for other in others) else (a[own], b[:, own])


def _sizes(tensor: Bound, contract: int, rank: int) -> dict[str, int]:
    """Of the axes, where the inputs are `rank` numbers."""
    names = _in_their_order(tensor, tensor.targets[0].part, contract)
    return {**tensor.sizes, **{name: rank if i == 0 else 1 for i, name in enumerate(names)}}


def _placed(
    tensor: Bound, contract: int, rank: int, parts: Mapping[Target, np.ndarray]
) -> np.ndarray:
    """[rank, outputs...] of each part -> [O, rank] of the tensor, zero where it has no part."""
    sizes = _sizes(tensor, contract, rank)
    whole = np.zeros(tensor.row.shape(sizes), np.float32)
    for target, b in parts.items():
        dims = [
            math.prod(sizes[name] for name in axis) for axis in axes_in(target.part.ours)[:contract]
        ]
        tensor.row.place(target.part, b.reshape(*dims, *b.shape[1:]), whole, sizes)
    return whole.T if _inputs_first(tensor, tensor.targets[0].part, contract) else whole


def _taken(tensor: Bound, target: Target, contract: int, b: np.ndarray) -> np.ndarray:
    """[O, R] of the tensor -> [R, outputs...] of a part."""
    rank = b.shape[1]
    whole = b.T if _inputs_first(tensor, target.part, contract) else b
    found = tensor.row.ours(
        target.part, np.ascontiguousarray(whole), _sizes(tensor, contract, rank)
    )
    return found.reshape(rank, *found.shape[contract:])


def _lengths(
    target: Target, contract: int, adapted: Mapping[str, int], read: Read, base: Read
) -> np.ndarray:
    """Of the columns: as they are trained, or of the weight where that has no adapter."""
    if target.path in adapted:
        return read(f"{target.path}/magnitude")[target.lead]
    weight = np.asarray(base(target.path)[target.lead], np.float32)
    return np.sqrt(np.square(weight).sum(axis=tuple(range(contract))))
