"""Checks models of images against transformers and diffusers: the goldens are made again and
compared, each folder is imported and exported, tensor by tensor, and the other library loads the
export and makes the golden's output of it; and that of a diffusion transformer with one condition,
trained on 8 virtual devices. Needs torch, transformers and diffusers: `make oracle` makes an
environment.

example: python scripts/oracle_vision.py
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from bench import arguments

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

import parity  # noqa: E402
from make_vision_goldens import FAMILIES  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

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


def main() -> int:
    """Check all; 1 if one is not at par."""
    import jax

    arguments.parser(__doc__).parse_args()
    jax.config.update("jax_platforms", "cpu")
    script = ROOT / "scripts/make_vision_goldens.py"
    subprocess.run([sys.executable, str(script), "--check"], check=True)
    bad = []
    with tempfile.TemporaryDirectory() as temporary:
        for family in FAMILIES:
            run, out = Path(temporary) / family, Path(temporary) / f"{family}-out"
            said = ("objective.prediction=eps", "objective.path=vp") if family == "dit" else ()
            maxstack("import", parity.GOLDENS / family, "--out", run, *said)
            maxstack("export", run, "--out", out)
            exact = same_tensors(parity.GOLDENS / family, out)
            (golden,) = parity.GOLDENS.joinpath(family).glob("*.npz")
            off = distance(out, dict(np.load(golden)))
            print(f"{family:16} {'bit for bit' if exact else 'DIFFERS'}, output off by {off:.1e}")
            bad += [] if exact and off <= LIMIT else [family]
        off = by_steps(Path(temporary))
        print(f"{'ddim':16} off by {off:.1e}")
        bad += [] if off <= 1e-4 else ["ddim"]
        off = shared(Path(temporary))
        print(f"{'shared condition':16} trained, output off by {off:.1e}")
        bad += [] if off <= LIMIT else ["shared condition"]
    return 1 if bad else 0


def maxstack(*words: object) -> None:
    """A command that succeeds."""
    command = [sys.executable, "-m", "maxstack.cli", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def same_tensors(folder: Path, out: Path) -> bool:
    """True where two folders hold the same bits."""
    ours, theirs = (load_file(next(path.glob("*.safetensors"))) for path in (out, folder))
    return ours.keys() == theirs.keys() and all(
        np.array_equal(ours[name], theirs[name]) for name in theirs
    )


def distance(folder: Path, wanted: Mapping[str, np.ndarray]) -> float:
    """Largest difference of the other library's output from `output`, over its deviation."""
    import torch

    pixels = torch.from_numpy(wanted["pixels"]).permute(0, 3, 1, 2)
    model = opened(folder)
    with torch.no_grad():
        if "time" in wanted:
            time, label = (torch.from_numpy(wanted[name]) for name in ("time", "label"))
            made = model(pixels, timestep=time, class_labels=label).sample.permute(0, 2, 3, 1)
        else:
            outputs = model(pixels)
            made = outputs.logits if "logits" in outputs else outputs.pooler_output
    return float(np.abs(made.numpy() - wanted["output"]).max() / wanted["output"].std())


def opened(folder: Path) -> Any:
    """The other library's model; SystemExit unless it takes every tensor, and no other."""
    import diffusers
    import transformers

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


def by_steps(folder: Path) -> float:
    """The distance of an image by diffusers' DDIM from the imported run's, over its deviation."""
    import torch
    from diffusers import DDIMScheduler

    from maxstack.inference.images import Sampler
    from maxstack.inference.trained_model import open_model

    run, params = open_model(str(folder / "dit"), ["model.dtype=float32"])
    sampler = Sampler(run, params, 10, "euler", 1.0)
    number, label = np.array([0], np.uint32), np.array([3], np.int32)
    x = run.within(sampler._noise)(number, 0)
    scheduler = DDIMScheduler(
        beta_end=0.02, timestep_spacing="trailing", clip_sample=False, set_alpha_to_one=True
    )
    scheduler.set_timesteps(10)
    model = opened(folder / "dit-out")
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
    from flax import nnx

    from maxstack.inference.trained_model import open_model

    words = f"run.output_dir={folder}", "run.name=shared", "run.tensorboard=false", *TRAINED
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


if __name__ == "__main__":
    sys.exit(main())
