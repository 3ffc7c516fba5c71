"""A folder for every image model of goldens.yml: for each of `vision` a tiny random model of
transformers, for each of `dit` one of diffusers, with noise on every parameter, and what it makes
of three images.

A folder holds config.json and model.safetensors as transformers writes them, and vision.npz:
`pixels` float32 [B, S, S, C], `hidden` float32 [B, T, D], the last states after the last norm,
`output`, logits [B, K] or the pooled features [B, D], and `patch_grad` [D, C, P, P], the gradient
of half the sum of squares of `output` with respect to the patches' matrix. Those of diffusers hold
diffusion_pytorch_model.safetensors, and dit.npz: `pixels`, `time`, `label`, `output` [B, S, S, C]
and `patch_grad`.
"""

import zlib
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from make_goldens import TABLE

from golden.families import CLOSE, perturb

__all__ = ["CLOSE", "NAMES", "make"]
FAMILIES: dict[str, dict[str, Any]] = TABLE["vision"] | TABLE["dit"]
NAMES = [*FAMILIES]
IMAGES = 3


def make(family: str, out: Path) -> None:
    """Write the folder of a family."""
    torch.manual_seed(zlib.crc32(family.encode()))
    if family in TABLE["dit"]:
        return make_dit(family, out / family)
    settings = dict(FAMILIES[family])
    name, head = settings.pop("class"), settings.pop("head")
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}{head}")(config).float().eval()
    perturb(model)
    size = config.image_size
    pixels = np.random.default_rng(0).normal(size=(IMAGES, size, size, 3)).astype(np.float32)
    made = model(torch.from_numpy(pixels).permute(0, 3, 1, 2), output_hidden_states=True)
    if head == "ForImageClassification":
        body = getattr(model, model.base_model_prefix)
        hidden = body(torch.from_numpy(pixels).permute(0, 3, 1, 2)).last_hidden_state
        output = made.logits
    else:
        hidden, output = made.last_hidden_state, made.pooler_output
    (output.square().sum() / 2).backward()
    (patches,) = (
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 4 and "patch" in name
    )
    assert patches.grad is not None
    model.save_pretrained(out / family)
    np.savez_compressed(
        out / family / "vision.npz",
        pixels=pixels,
        hidden=hidden.detach().numpy(),
        output=output.detach().numpy(),
        patch_grad=patches.grad.numpy(),
    )


def make_dit(family: str, folder: Path) -> None:
    """The same of a diffusion transformer."""
    model = diffusers.DiTTransformer2DModel(**FAMILIES[family]).float().eval()
    perturb(model)
    size, channels = model.config.sample_size, model.config.in_channels
    pixels = np.random.default_rng(0).normal(size=(IMAGES, size, size, channels))
    pixels = pixels.astype(np.float32)
    time, label = np.array([10, 500, 999]), np.array([1, model.config.num_embeds_ada_norm, 7])
    made = model(
        torch.from_numpy(pixels).permute(0, 3, 1, 2),
        timestep=torch.from_numpy(time),
        class_labels=torch.from_numpy(label),
    ).sample
    (made.square().sum() / 2).backward()
    model.save_pretrained(folder)
    np.savez_compressed(
        folder / "dit.npz",
        pixels=pixels,
        time=time,
        label=label,
        output=made.permute(0, 2, 3, 1).detach().numpy(),
        patch_grad=model.pos_embed.proj.weight.grad.numpy(),
    )
