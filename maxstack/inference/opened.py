"""A trained model opened for use: a run, one of its checkpoints, or a Hugging Face folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack import sharding
from maxstack.config import storage
from maxstack.data import hub
from maxstack.errors import ConfigError, shortened
from maxstack.load import check_no_run_beside, described, load, model_of_folder
from maxstack.schema.mesh import AXES
from maxstack.state import flat, tree

if TYPE_CHECKING:
    from maxstack.run import Run
    from maxstack.schema.config import Config


def adapted_run(run: "Run", folder: str) -> "Run":
    """The run with adapters as a folder in PEFT's format has them; ConfigError where that is no
    adapter of this model."""
    from maxstack.hf.peft import Adapter
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
        for tensor in run.weights.bound(adapter)
        if tensor.name.removesuffix(".weight") in adapter.modules
    )
    paths = sorted({target.path for tensor in tensors for target in tensor.targets})
    adapted = assemble(
        run.cfg.model_copy(update={"lora": LoraConfig.model_validate(adapter.settings(paths))}),
        run.mesh,
        trains=False,
    )
    adapted.weights.adapter(folder)
    return adapted


def with_adapter(adapted: "Run", params: Any, folder: str) -> Any:
    """Weights of the run without adapters, which are shared, with the adapter of a folder beside
    them."""

    return tree(adapted.weights.with_adapter(adapted.weights.beside(flat(params)), folder))


def open_model(model: str, overrides: Sequence[str]) -> tuple["Run", Any]:
    """A run's folder, one of its checkpoints, or a Hugging Face folder -> the assembled run and its
    weights, spread over all devices (fsdp)."""
    run, own = assembled(model, overrides)
    return run, read_weights(model, run, own)


def assembled(model: str, overrides: Sequence[str]) -> tuple["Run", Path | None]:
    """The run of a model over all devices, and its folder, None for a Hugging Face folder."""
    placed = [f"mesh.{axis}=1" for axis in AXES]
    cfg, own = config_of(model, ["run.virtual_devices=null", *placed, "mesh.fsdp=-1", *overrides])
    import jax

    from maxstack.run import assemble

    return assemble(cfg, sharding.make_mesh(cfg.mesh, jax.devices()), trains=False), own


def read_weights(model: str, run: "Run", own: Path | None, average: bool = False) -> Any:
    """The weights of an assembled run, or their moving average."""
    from maxstack.checkpoint.weights import WeightsReader
    from maxstack.hf.contents import opened
    from maxstack.hf.reader import load_params

    if own is not None:
        reader = WeightsReader(Path(model), average)
        return tree(reader.load(run.weights.shapes, run.weights.sources))
    assert run.cfg.model.weights
    finite = not run.cfg.checkpoint.allow_nonfinite
    contents = opened(run.cfg.model.weights)
    return tree(
        run.weights.rewritten(
            load_params(contents, run.weights.original, model=run.cfg.model, finite=finite)
        )
    )


def config_of(model: str, overrides: Sequence[str]) -> tuple["Config", Path | None]:
    """The configuration of a model, and the run's folder, None for a Hugging Face folder."""

    kind = storage.kind(model)
    if kind is None:
        check_no_run_beside(model)
    if kind != "directory" and not hub.named(model):
        raise ConfigError(
            f"{shortened(model, 200)}: {hub.NOWHERE}; give a run's folder, one of its checkpoints, "
            "a Hugging Face folder, or such a name"
        )
    folder = Path(model)
    if (folder / "hf/source.json").is_file() and not (folder / "config.yml").is_file():
        raise ConfigError(
            f"{model}: an import that was not finished; give the same `maxstack import` again"
        )
    for own in (folder, folder.parent, folder.parent.parent) if folder.is_dir() else ():
        if (own / "config.yml").is_file():
            return load(own / "config.yml", overrides), own
    _, section = model_of_folder(model, model)
    data = {"sources": [{"kind": "synthetic", "vocab": 2}], "seq_len": 1}  # rows are as given
    if (images := described(section)).tokens:
        data = images.placeholder(1)
    return load({"model": section, "data": data}, overrides), None
