"""Image models beside transformers and diffusers.

Each golden folder is imported and exported, tensor by tensor, and the other library loads the
export and computes the golden's output. A diffusion transformer with one condition for all blocks
is trained on 8 virtual devices first.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import parity
import torch
import transformers
from flax import nnx
from golden.vision import FAMILIES
from oracle import ROOT, maxstack, same_tensors

from maxstack.inference.images import Sampler
from maxstack.inference.trained_model import open_model

LIMIT = 1e-5
"""Largest difference of outputs, over their deviation."""
TRAINED = (
    "data.sources=[{kind: synthetic, vocab: 10, length: 1}]",
    "train.steps=5",
    "run.virtual_devices=8",
    "mesh.fsdp=4",
    "eval.every=0",
    "checkpoint.every=5",
)


def compare(only: list[str] | None) -> list[str]:
    """Print how far outputs are off -> the models that are not at par."""
    bad = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for family in only or FAMILIES:
            exact, off = round_trip(folder, family)
            print(f"{family:16} {'bit for bit' if exact else 'DIFFERS'}, output off by {off:.1e}")
            bad += [] if exact and off <= LIMIT else [family]
        others = {} if only else {"ddim": (ddim, 1e-4), "shared condition": (shared, LIMIT)}
        for name, (measure, limit) in others.items():
            off = measure(folder)
            print(f"{name:16} output off by {off:.1e}")
            bad += [] if off <= limit else [name]
    return bad


def round_trip(folder: Path, family: str) -> tuple[bool, float]:
    """Whether the export holds the golden's bits, and how far the other library's output is off."""
    run, out = folder / family, folder / f"{family}-out"
    settings = ("objective.prediction=eps", "objective.path=vp") if family == "dit" else ()
    maxstack("import", parity.GOLDENS / family, "--out", run, *settings)
    maxstack("export", run, "--out", out)
    (golden,) = parity.GOLDENS.joinpath(family).glob("*.npz")
    return same_tensors(parity.GOLDENS / family, out), distance(out, dict(np.load(golden)))


def distance(folder: Path, wanted: Mapping[str, np.ndarray]) -> float:
    """Largest difference of the other library's output from `output`, over its deviation."""
    pixels = torch.from_numpy(wanted["pixels"]).permute(0, 3, 1, 2)
    model = load(folder)
    with torch.no_grad():
        if "time" in wanted:
            time, label = (torch.from_numpy(wanted[name]) for name in ("time", "label"))
            made = model(pixels, timestep=time, class_labels=label).sample.permute(0, 2, 3, 1)
        else:
            outputs = model(pixels)
            made = outputs.logits if "logits" in outputs else outputs.pooler_output
    return float(np.abs(made.numpy() - wanted["output"]).max() / wanted["output"].std())


def load(folder: Path) -> Any:
    """The other library's model; SystemExit unless it takes every tensor, and no other."""
    if (folder / "diffusion_pytorch_model.safetensors").exists():
        model, report = diffusers.DiTTransformer2DModel.from_pretrained(
            folder, output_loading_info=True
        )
    else:
        (name,) = transformers.AutoConfig.from_pretrained(folder).architectures
        model, report = getattr(transformers, name).from_pretrained(
            folder, output_loading_info=True
        )
    kinds = "missing_keys", "unexpected_keys", "mismatched_keys"
    left = [key for kind in kinds for key in report.get(kind, ()) if "pooler" not in key]
    if left:
        raise SystemExit(f"{folder}: not loaded: {left}")
    return model.float().eval()


def ddim(folder: Path) -> float:
    """The distance of an image by diffusers' DDIM from the imported run's, over its deviation."""
    run, params = open_model(str(folder / "dit"), ["model.dtype=float32"])
    sampler = Sampler(run, params, 10, "euler", 1.0)
    number, label = np.array([0], np.uint32), np.array([3], np.int32)
    x = run.within(sampler._noise)(number, 0)
    scheduler = diffusers.DDIMScheduler(
        beta_end=0.02, timestep_spacing="trailing", clip_sample=False, set_alpha_to_one=True
    )
    scheduler.set_timesteps(10)
    model = load(folder / "dit-out")
    theirs = torch.from_numpy(np.array(x)).permute(0, 3, 1, 2)
    for time in scheduler.timesteps:
        with torch.no_grad():
            made = model(theirs, timestep=time[None], class_labels=torch.tensor([3])).sample
        theirs = scheduler.step(made[:, : theirs.shape[1]], time, theirs).prev_sample
    for now, after in zip(sampler._times, sampler._times[1:], strict=False):
        x = run.within(sampler._euler)(params, x, label, now, after)
    wanted = theirs.permute(0, 2, 3, 1).numpy()
    return float(np.abs(np.asarray(x) - wanted).max() / wanted.std())


def shared(folder: Path) -> float:
    """The distance of a model of ours with one condition for all blocks."""
    words = f"run.output_dir={folder}", "run.name=shared", "run.trackers=[]", *TRAINED
    maxstack("train", ROOT / "configs/recipes/dit-digits.yml", *words)
    maxstack("export", folder / "shared", "--out", folder / "shared-out")
    run, params = open_model(str(folder / "shared"), [])
    wanted = {
        "pixels": np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype(np.float32),
        "time": np.array([10, 500, 999]),
        "label": np.array([1, 10, 7]),
    }
    given = {**wanted, "time": wanted["time"].astype(np.float32)}
    made, _ = nnx.merge(run.graph, nnx.State(params))(given)
    return distance(folder / "shared-out", wanted | {"output": np.asarray(made)})
