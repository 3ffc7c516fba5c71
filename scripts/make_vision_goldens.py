"""Makes the vision transformers of tests/goldens: for every one of goldens.yml's `vision` a tiny
random model of transformers, for every one of `dit` one of diffusers, with noise on every
parameter, and what it makes of three images.

A folder holds config.json and model.safetensors as transformers writes them, and vision.npz:
`pixels` float32 [B, S, S, C], `hidden` float32 [B, T, D], the last states after the last norm,
`output`, logits [B, K] or the pooled features [B, D], and `patch_grad` [D, C, P, P], the gradient
of half the sum of squares of `output` with respect to the patches' matrix. Those of diffusers hold
diffusion_pytorch_model.safetensors, and dit.npz: `pixels`, `time`, `label`, `output` [B, S, S, C]
and `patch_grad`. Needs torch, transformers and diffusers.

example: python scripts/make_vision_goldens.py --family dinov3 --check
"""

import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from make_goldens import TABLE, perturb, write_or_check

FAMILIES: dict[str, dict[str, Any]] = TABLE["vision"] | TABLE["dit"]
IMAGES = 3


def main() -> int:
    """Make or check the families; returns the exit code."""
    return write_or_check(__doc__, FAMILIES, make)


def make(family: str, folder: Path) -> tuple[int, int]:
    """Write the files of a family -> (tensors, numbers in them)."""
    import torch
    import transformers

    if family in TABLE["dit"]:
        return make_dit(family, folder)
    settings = dict(FAMILIES[family])
    name, head = settings.pop("class"), settings.pop("head")
    torch.manual_seed(zlib.crc32(family.encode()))
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
    model.save_pretrained(folder)
    np.savez_compressed(
        folder / "vision.npz",
        pixels=pixels,
        hidden=hidden.detach().numpy(),
        output=output.detach().numpy(),
        patch_grad=patches.grad.numpy(),
    )
    return counted(model)


def make_dit(family: str, folder: Path) -> tuple[int, int]:
    """The same of a diffusion transformer."""
    import diffusers
    import torch

    torch.manual_seed(zlib.crc32(family.encode()))
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
    return counted(model)


def counted(model: Any) -> tuple[int, int]:
    """Tensors of a model, and numbers in them."""
    tensors = [*model.state_dict().values()]
    return len(tensors), sum(tensor.numel() for tensor in tensors)


if __name__ == "__main__":
    sys.exit(main())
