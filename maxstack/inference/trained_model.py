"""A trained model that is opened for use: a run, one of its checkpoints, or a Hugging Face
folder."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack import sharding
from maxstack.config import Fault, storage
from maxstack.data import hub
from maxstack.errors import ConfigError, shortened
from maxstack.load import check_no_run_beside, load, load_record, model_of_folder, parse_model
from maxstack.schema.mesh import AXES
from maxstack.state import flat, tree

if TYPE_CHECKING:
    from maxstack.hf.layer_reader import Kept
    from maxstack.run import Run
    from maxstack.schema.config import Config


log = logging.getLogger(__name__)
PLACED = (["mesh.fsdp=-1"], ["mesh.fsdp=-1", "mesh.rules.vocab=null"], ["mesh.data=-1"])
"""Meshes of all devices; the first that divides a model's sizes is used."""


def adapt_run(run: "Run", folder: str) -> "Run":
    """Return the run with adapters as in a folder in PEFT's format; ConfigError where that is no
    adapter of this model."""
    from maxstack.hf.adapter import Adapter
    from maxstack.run import assemble
    from maxstack.schema.lora import LoraConfig

    if run.cfg.lora:
        raise ConfigError(
            f"adapter {folder}: the run has adapters of its own; merge them first: maxstack "
            "export RUN --out FOLDER"
        )
    adapter = Adapter(folder, finite=not run.cfg.checkpoint.allow_nonfinite)
    tensors = (
        tensor
        for tensor in run.weights.bind(adapter)
        if tensor.name.removesuffix(".weight") in adapter.modules
    )
    paths = sorted({target.path for tensor in tensors for target in tensor.targets})
    adapted = assemble(
        run.cfg.model_copy(update={"lora": LoraConfig.model_validate(adapter.settings(paths))}),
        run.mesh,
        trains=False,
    )
    adapted.weights.read_adapter(folder)
    return adapted


def add_adapter(adapted: "Run", params: Any, folder: str) -> Any:
    """Return the weights of the run without adapters, which are shared, and the adapter of a folder
    beside them."""

    return tree(adapted.weights.with_adapter(adapted.weights.add_adapters(flat(params)), folder))


def open_model(model: str, overrides: Sequence[str]) -> tuple["Run", Any]:
    """Open a run's folder, one of its checkpoints, or a Hugging Face folder -> the assembled run
    and its weights, sharded over all devices (fsdp)."""
    run, own = assemble_model(model, overrides)
    return run, read_weights(model, run, own)


def assemble_model(
    model: str, overrides: Sequence[str], trains: bool = False
) -> tuple["Run", Path | None]:
    """Assemble the run of a model over all devices -> it and its folder, None for a Hugging Face
    folder. Weights are sharded, except those that the devices do not divide. ConfigError where the
    overrides ask for a mesh that does not fit."""
    import jax

    from maxstack.run import assemble
    from maxstack.schema import rules

    faults: list[Fault] = []
    alone = [f"mesh.{axis}=1" for axis in AXES]
    # Sizes that do not divide are known only for a mesh, so try the meshes in turn.
    for more in PLACED:
        placed = ["run.virtual_devices=null", *alone, *more, *overrides]
        cfg, own = config_of(model, placed, runs_code=trains)
        mesh = sharding.make_mesh(cfg.mesh, jax.devices())
        wrong = [
            each for each in rules.device_faults(cfg, mesh.size) if each[0].startswith("model")
        ]
        if not wrong:
            if faults:
                log.warning("%s: so %s", faults[0][1].partition(";")[0], " ".join(more))
            return assemble(cfg, mesh, trains), own
        faults = faults or wrong
    raise ConfigError("\n".join(f"{key}: {message}" for key, message in faults))


def read_weights(model: str, run: "Run", own: Path | None) -> Any:
    """Read the weights of an assembled run; of a checkpoint those that checkpoint.weights names."""
    from maxstack.checkpoint.weights import load_newest
    from maxstack.hf.contents import open_contents
    from maxstack.hf.reader import load_params

    if own is not None:
        return tree(load_newest(model, run, run.cfg.checkpoint.weights))
    assert run.cfg.model.weights
    finite = not run.cfg.checkpoint.allow_nonfinite
    contents = open_contents(run.cfg.model.weights)
    return tree(
        run.weights.from_original(
            load_params(contents, run.weights.original, model=run.cfg.model, finite=finite)
        )
    )


def read_layers(run: "Run", kept: "dict[str, Kept]") -> dict[str, Any]:
    """Read the weights of an assembled run on one device, from its Hugging Face folder, as
    `Programs.kept` describes them."""
    from jax.sharding import NamedSharding, PartitionSpec

    from maxstack.hf.contents import open_contents
    from maxstack.hf.layer_reader import load_layers

    assert run.cfg.model.weights
    sharding = NamedSharding(run.mesh, PartitionSpec())
    finite = not run.cfg.checkpoint.allow_nonfinite
    contents = open_contents(run.cfg.model.weights)
    return load_layers(contents, kept, sharding, model=run.cfg.model, finite=finite)


def config_of(
    model: str, overrides: Sequence[str], runs_code: bool = False
) -> tuple["Config", Path | None]:
    """Read the configuration of a model -> it and the run's folder, None for a Hugging Face folder.
    `runs_code`: the run's data and rewards are used too, so their code must be trusted."""
    kind, beside = storage.kind(model), Path("runs") / model
    if kind is None and not (beside / "config.yml").is_file():
        check_no_run_beside(model)
    is_file = kind == "file" and hub.is_gguf(model)
    if kind != "directory" and not is_file and not hub.is_model_name(model):
        hint = f"; did you mean {beside}?" if (beside / "config.yml").is_file() else ""
        raise ConfigError(
            f"{shortened(model, 200)}: {hub.NOWHERE}; give a run's folder, one of its checkpoints, "
            f"a Hugging Face folder, a .gguf file, or such a name{hint}"
        )
    folder = Path(model)
    if (folder / "hf/source.json").is_file() and not (folder / "config.yml").is_file():
        raise ConfigError(
            f"{model}: an import that was not finished; give the same `maxstack import` again"
        )
    # A run's folder itself, or checkpoints/STEP in it.
    for own in (folder, folder.parent, folder.parent.parent) if folder.is_dir() else ():
        if (own / "config.yml").is_file():
            return load_record(own, overrides, runs_code), own
    _, section = model_of_folder(model, model)
    # A configuration needs data; nothing reads these, since the rows are given.
    data = {"sources": [{"kind": "synthetic", "vocab": 2}], "seq_len": 1}
    if (images := parse_model(section)).tokens:
        data = images.placeholder(1)
    return load({"model": section, "data": data}, overrides), None
