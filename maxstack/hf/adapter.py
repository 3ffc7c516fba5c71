"""An adapter in PEFT's format: adapter_config.json and adapter_model.safetensors, checked against
each other, and its change of a weight. A hub full of adapters holds settings that change the
arithmetic (pissa, aLoRA, rank patterns), so each that is not computed here is refused by name."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxstack.data.copies import local_folder
from maxstack.errors import ConfigError, DataError, quoted, shortened
from maxstack.hf.safetensors_file import SafetensorsFile
from maxstack.hf.tensors import check_finite
from maxstack.schema.lora import LoraConfig
from maxstack.strict_json import read_object

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
OUTER = "base_model.model."
A, B = "lora_A.weight", "lora_B.weight"
MAGNITUDE = "lora_magnitude_vector"
TINY = 1e-12
LARGEST = float(np.finfo(np.float32).max)
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
SETTINGS = {
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "rslora": "use_rslora",
    "dora": "use_dora",
}
"""Keys of a LoraConfig -> those of PEFT."""
AGAIN = "save the adapter with peft again"


class Adapter:
    """A folder in PEFT's format, at a path or URL, checked.

    ConfigError where it is none, or has settings that are not supported. DataError for a tensor
    with NaN or infinities, if `finite`.
    """

    def __init__(self, path: str | Path, *, finite: bool = True):
        folder = self.folder = local_folder(str(path), (CONFIG, TENSORS))
        if not folder.is_dir():
            raise self._fail(
                f"no such folder; give one in PEFT's format, with {CONFIG} and {TENSORS}"
            )
        try:
            self.said: Any = read_object(folder / CONFIG)
            file = SafetensorsFile(folder / TENSORS)
        except DataError as error:
            raise self._fail(
                f"cannot be read as an adapter of PEFT ({CONFIG} and {TENSORS}): {error}"
            ) from error
        # Before the tensors: what is not supported is told without reading them.
        self._check_settings()
        self.tensors: dict[str, np.ndarray] = {}
        for name in file.entries:
            tensor = file.array(name)
            if finite:
                check_finite(tensor, f"{file.path}: tensor {name}")
            # The sum with the base is in float32 whatever the adapter was saved in.
            self.tensors[name.removeprefix(OUTER)] = tensor.astype(np.float32)
        pairs = [name for name in self.tensors if name.endswith(f".{A}")]
        self.modules = {name.removesuffix(f".{A}") for name in pairs}
        self.tables: dict[str, np.ndarray] = {}
        """Weights that are saved whole, by module."""
        self.rows: dict[str, np.ndarray] = {}
        """Rows of weights, by module."""
        # Several tensors of one module end with the one that is kept; see TABLE.
        for name in sorted(self.tensors):
            if found := TABLE.fullmatch(name):
                held = self.rows if found[2] else self.tables
                held[found[1]] = self.tensors.pop(name)
        said = self.said.get(SAVED), self.said.get(INDICES)
        self.has_tables = any((self.tables, self.rows, *said))
        self.lora: dict[str, Any] = {
            # null and false leave a setting at its default.
            key: self.said.get(theirs) or LoraConfig.model_fields[key].default
            for key, theirs in SETTINGS.items()
        }
        """The mapping of a LoraConfig, without targets."""
        self.dora = bool(self.lora["dora"])
        self.parts = A, B, *([MAGNITUDE] if self.dora else [])
        self._check_tensors()

    def _fail(self, message: str) -> ConfigError:
        return ConfigError(f"{self.folder}: {message}")

    def _check_settings(self) -> None:
        said = self.said
        if said.get("peft_type") != "LORA":
            raise self._fail(f"peft_type {shortened(str(said.get('peft_type')))} is not LORA")
        refused = {key: said.get(key) for key in REFUSED}
        refused["bias"] = said.get("bias")
        for key, value in refused.items():
            if value not in (None, [], False, "none"):
                raise self._fail(f"{key}={quoted(value)} in {CONFIG} is not supported")
        if str(init := said.get("init_lora_weights")).lower().startswith(REWRITING):
            raise self._fail(
                f"init_lora_weights={quoted(init)} in {CONFIG} means that peft changes the base's "
                "weights when it loads the adapter, which is not supported; let peft save it as "
                "plain LoRA first (path_initial_model_for_weight_conversion)"
            )
        rank = said.get("r")
        self._need("r", rank, type(rank) is int and rank >= 1, "a whole number of at least 1")
        alphas = {"lora_alpha": said.get("lora_alpha")}
        for name, alpha in (said.get("alpha_pattern") or {}).items():
            alphas[f"alpha_pattern.{name}"] = alpha
        for key, alpha in alphas.items():
            valid = type(alpha) in (int, float) and 0 < alpha <= LARGEST
            self._need(key, alpha, valid, "a number of more than 0 that float32 holds")
        saved, dropout = said.get(SAVED) or [], said.get("lora_dropout") or 0.0
        self._need(SAVED, saved, isinstance(saved, list), "a list of names")
        valid = type(dropout) in (int, float) and 0 <= dropout < 1
        self._need("lora_dropout", dropout, valid, "a number of at least 0 and less than 1")

    def _need(self, key: str, value: Any, valid: bool, kind: str) -> None:
        if not valid:
            raise self._fail(f"{key}={quoted(value)} in {CONFIG} is not {kind}; {AGAIN}")

    def _check_tensors(self) -> None:
        if not self.modules:
            raise self._fail(
                f"{TENSORS} holds no pairs lora_A.weight and lora_B.weight, but "
                f"{min(self.tensors, default='nothing')}; save the adapter with peft "
                "(save_pretrained), and merge one of an embedding with peft too (merge_and_unload)"
            )
        targets = self.said.get("target_modules")
        odd = sorted(name for name in self.modules if not _listed(name, targets or ()))
        if odd and isinstance(targets, list):
            raise self._fail(
                f"holds an adapter of {odd[0]}, which target_modules={targets} in {CONFIG} does "
                "not name, so that peft passes it over; mend one of them"
            )
        parts = {f"{module}.{part}" for module in self.modules for part in self.parts}
        if odd := sorted(self.tensors.keys() - parts):
            raise self._fail(
                f"holds {odd[0]}, which is no part of an adapter of a linear module as {CONFIG} "
                "describes it"
            )
        if missing := sorted(parts - self.tensors.keys()):
            raise self._fail(f"{TENSORS} has no {missing[0]}; {AGAIN}")
        for module in sorted(self.modules):
            a, b = self.tensors[f"{module}.{A}"].shape, self.tensors[f"{module}.{B}"].shape
            if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
                raise self._fail(
                    f"lora_A {[*a]} and lora_B {[*b]} of {module} are no pair of matrices "
                    "[rank, inputs] and [outputs, rank]"
                )
            # Settings that contradict the tensors were passed over once.
            if a[0] != (rank := self._of_module("rank_pattern", module, "r")):
                raise self._fail(
                    f"lora_A of {module} has {a[0]} rows, and {CONFIG} says rank {rank}; {AGAIN}"
                )

    def check_sizes(
        self, module: str, inputs_first: bool, wanted: Sequence[int], where: str
    ) -> None:
        """ConfigError where a module's change does not have the shape `wanted`, which begins with
        the inputs or the outputs whatever fan_in_fan_out says: peft, too, follows the model."""
        outputs = self.tensors[f"{module}.{B}"].shape[0]
        inputs = self.tensors[f"{module}.{A}"].shape[1]
        norms = self.tensors[f"{module}.{MAGNITUDE}"].size if self.dora else outputs
        if norms != outputs:
            raise self._fail(
                f"has {norms} norms of columns for {module}, which has {outputs} outputs; {AGAIN}"
            )
        # By the family's row: a square matrix (GPT-2's attn.c_proj) would fit both ways, and
        # fan_in_fan_out led to a transposed change in silence.
        change = [inputs, outputs] if inputs_first else [outputs, inputs]
        if change != [*wanted]:
            raise self._fail(
                f"is of another model: its change of {module} is {change}, and in {where} that is "
                f"{[*wanted]}"
            )

    def merged(self, module: str, weight: np.ndarray, inputs_first: bool, sign: int) -> np.ndarray:
        """Return the weight, [I, O] or [O, I], plus sign x scale B A in float32; with DoRA scaled
        to the trained norms of its columns."""
        with np.errstate(over="ignore", invalid="ignore"):  # reported by the tensor's name
            change = self.tensors[f"{module}.{B}"] @ self.tensors[f"{module}.{A}"]
            change *= sign * self.scale(module)
        whole = weight.astype(np.float32) + (change.T if inputs_first else change)
        if self.dora:
            axis = 0 if inputs_first else 1
            norms = self.tensors[f"{module}.{MAGNITUDE}"].reshape(-1)
            # A column of zeros stays zero.
            factor = norms / np.maximum(np.linalg.norm(whole, axis=axis), TINY)
            whole *= np.expand_dims(factor, axis)
        return whole

    def table(self, module: str, base: np.ndarray, embed: str, tied: bool) -> np.ndarray:
        """Return a module's table [V, D] in place of its `base`. Where the head is the table of
        `embed`, it takes the rows that are saved of that; whole tables are each module's own, as in
        peft. ConfigError where what is saved does not fit the base or the settings."""
        source = embed if tied and module not in self.tables | self.rows else module
        said = self.said.get(INDICES) or {}
        # A list without names is of the embedding.
        by_name = said if isinstance(said, dict) else {embed: said}
        # astype copies, so that rows are not written into the view of the file.
        table = self.tables.get(module, base).astype(base.dtype)
        try:
            # The number of rows may differ: the vocabulary was resized.
            if table.shape[1:] != base.shape[1:]:
                wrong = f"holds {module} as {[*table.shape]}, and the model has {[*base.shape]}"
                raise ValueError
            wrong = f"{INDICES}={quoted(said)} in {CONFIG} are no rows of {source}"
            if source in self.rows:
                # Unsigned, so that -1 is an error and not the last row.
                indices = np.array(_rows_of((source, embed), by_name), np.uint64)
                # The last one would win in silence.
                if np.unique(indices).size != indices.size:
                    wrong = f"{INDICES}={quoted(said)} in {CONFIG} name a row twice"
                    raise ValueError
                table[indices] = self.rows[source].reshape(indices.size, -1)
            elif module not in self.tables:
                wrong = f"{CONFIG} says that {module} is saved, and {TENSORS} has nothing of it"
                if _listed(module, [*(self.said.get(SAVED) or ()), *by_name]):
                    raise ValueError
        except (IndexError, OverflowError, TypeError, ValueError) as error:
            raise self._fail(
                f"{wrong}; {AGAIN}, of this model, with save_embedding_layers=True where its "
                "vocabulary was resized"
            ) from error
        return table

    def scale(self, module: str) -> float:
        """Return the factor of B A x."""
        rank = self.tensors[f"{module}.{A}"].shape[0]
        alpha = self._of_module("alpha_pattern", module, "lora_alpha")
        return alpha / (rank**0.5 if self.lora["rslora"] else rank)

    def _of_module(self, patterns: str, module: str, key: str) -> Any:
        """Return the value of the first pattern that matches a module, else the key's value."""
        for name, value in (self.said.get(patterns) or {}).items():
            # As peft matches: the name is a regular expression for the end of a module's name.
            if re.fullmatch(rf"(.*\.)?({name})", module):
                return value
        return self.said[key]

    def check_whole(self, names: Iterable[str]) -> None:
        """ConfigError where one of a base's modules has no adapter though target_modules lists its
        last name, as peft reads that."""
        targets, layers = self.said.get("target_modules"), self.said.get("layers_to_transform")
        excluded = self.said.get("exclude_modules") or ()
        # A pattern, or layers, say what peft adapts by other rules than last names.
        if not isinstance(targets, list) or layers is not None or isinstance(excluded, str):
            return
        # Other stacks of the model may have modules of the same last names, and no adapter.
        stacks = {_stack(module) for module in self.modules}
        absent = [
            name
            for name in names
            if name not in self.modules
            and _stack(name) in stacks
            and _listed(name, targets)
            and not _listed(name, excluded)
            and ".experts." not in name  # peft knows experts by other names
        ]
        if absent:
            raise self._fail(
                f"{TENSORS} has no adapter of {absent[0]}, though target_modules in {CONFIG} names "
                f"it ({len(absent)} are missing); {AGAIN}"
            )

    def settings(self, adapted: Sequence[str]) -> dict[str, Any]:
        """Return the mapping of a LoraConfig that starts from it, for weights of these paths."""
        targets = [re.escape(path) for path in adapted]
        return self.lora | {"targets": targets, "adapter": str(self.folder)}


def _stack(module: str) -> str:
    """Return a module's name up to the number of its layer."""
    return re.split(r"\d", module, maxsplit=1)[0]


def _listed(module: str, names: Iterable[str]) -> bool:
    return any(f".{module}".endswith(f".{name}") for name in names)


def _rows_of(modules: Iterable[str], by_name: Mapping[str, Any]) -> Any:
    """Return the row numbers of the first module that has some."""
    for module in modules:
        for name, rows in by_name.items():
            if _listed(module, [name]):
                return rows
    return None
