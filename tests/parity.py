"""A golden model folder against our decoder: logits and gradients as transformers computed them
(scripts/make_goldens.py)."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from maxstack.hf.contents import Contents
from maxstack.hf.reader import load_params
from maxstack.kernels.cross_entropy import cross_entropy
from maxstack.models.model import abstract
from maxstack.schema.decoder import DecoderConfig

GOLDENS = Path(__file__).parent / "goldens"
FAMILIES = sorted(path.name for path in GOLDENS.iterdir() if (path / "golden.npz").exists())
LOGITS, GRADIENT = 2e-4, 1e-3
"""Largest errors: of logits scaled to unit deviation, and of the embedding's gradient relative to
its largest value."""


@dataclasses.dataclass(frozen=True)
class Parity:
    """How near a family is to transformers."""

    parameters: int
    logits: float
    """Largest absolute difference of logits at real tokens, over their standard deviation."""
    argmax: bool
    """The likeliest token is the same everywhere."""
    gradient: float
    """Largest difference of the mean NLL's gradient for the embedding, over its largest value."""


def model_and_params(folder: Path) -> tuple[DecoderConfig, object, object]:
    """The architecture in float32, its graph and the folder's weights."""
    contents = Contents(folder)
    cfg = contents.model.model_copy(update={"dtype": "float32"})
    graph, state = abstract(cfg)
    return cfg, graph, loaded(contents, nnx.to_pure_dict(state))


def poisoned(folder: Path, out: Path, value: float, file: str = "model.safetensors") -> str:
    """Copy a folder, with `value` at one place of one tensor; the tensor's name."""
    shutil.copytree(folder, out)
    tensors = safetensors.numpy.load_file(out / file)
    name = sorted(tensors)[-2]
    tensors[name].reshape(-1)[1] = value
    safetensors.numpy.save_file(tensors, out / file, {"format": "pt"})
    return name


def loaded(contents: Contents | Path, abstract: Any) -> Any:
    """The weights of a folder in the shape of nested dicts."""
    wanted = nnx.traversals.flatten_mapping(abstract, sep="/")
    contents = Contents(contents) if isinstance(contents, Path) else contents
    return nnx.traversals.unflatten_mapping(
        dict(load_params(contents, wanted, progress=False)), sep="/"
    )


def measure(folder: Path) -> Parity:
    """Run the model of a golden folder and compare."""
    golden = np.load(folder / "golden.npz")
    tokens, lengths = jnp.asarray(golden["tokens"]), jnp.asarray(golden["lengths"])
    _, graph, params = model_and_params(folder)
    places = jnp.arange(tokens.shape[1])
    real = places < lengths[:, None]
    batch = {
        "tokens": tokens,
        "positions": jnp.where(real, places, 0),
        "segments": real.astype(jnp.int32),
    }

    def mean_nll(params: object) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, nnx.State(params))
        logits = model.logits(model.hidden(batch))
        nll, _ = cross_entropy(logits[:, :-1], tokens[:, 1:])
        return jnp.where(real[:, 1:], nll, 0).sum() / real[:, 1:].sum(), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(mean_nll, has_aux=True))(params)
    ours, theirs = np.asarray(logits)[np.asarray(real)], golden["logits"][np.asarray(real)]
    gradient, wanted = np.asarray(grads["embed"]), golden["embed_grad"]
    return Parity(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        logits=float(np.abs(ours - theirs).max() / theirs.std()),
        argmax=bool((ours.argmax(-1) == theirs.argmax(-1)).all()),
        gradient=float(np.abs(gradient - wanted).max() / np.abs(wanted).max()),
    )


def export_again(folder: Path, out: Path) -> None:
    """Import a folder as a run, and export the run."""
    from maxstack.commands.convert import export_model, import_model

    run = out.with_name(f"{out.name}-run")
    import_model([str(folder), "--out", str(run)])
    export_model([str(run), "--out", str(out)])
