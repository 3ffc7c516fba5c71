"""preprocessor_config.json of a model folder as data.image, both ways.

The class of the processor gives the values of absent keys (preprocessor.yml); sizes, crop, scaling
and normalization then become one resize, one square and a mean and deviation. Each key is computed,
known to change nothing, or refused: nine shapes of published files give the pixels of transformers'
Pillow processors to 2e-6 of their deviation.
"""

import functools
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
import yaml

from maxstack.config.annotations import listed
from maxstack.data.hub import MODEL, PREPROCESSOR, PROCESSOR
from maxstack.errors import ConfigError, quoted
from maxstack.hf.folder import Folder
from maxstack.hf.writer import write_json
from maxstack.schema.data import ImageConfig
from maxstack.strict_json import read_object

if TYPE_CHECKING:
    from maxstack.schema.config import Config

log = logging.getLogger(__name__)
KEYS = "mean", "std", "resize", "keep_ratio", "resample"
"""Keys of data.image that a folder gives."""
FILTERS = get_args(ImageConfig.model_fields["resample"].annotation)
"""Filters by Pillow's numbers."""
TABLE = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text())


class Pictures(NamedTuple):
    """Settings of a folder for pictures."""

    where: str
    said: dict[str, Any]
    """Content of the file."""
    side: int
    """Side of the resulting images."""
    image: dict[str, Any]
    """KEYS of data.image, for images of that side."""

    def at(self, side: int) -> dict[str, Any]:
        """Return KEYS for images of another side that show as much of a picture."""
        # The border that is cut off stays the same share of the picture.
        resize = round(self.image["resize"] * side / self.side)
        if side != self.side:
            _warn(f"{self.where}: makes {self.side} pixels, not {side}: data.image.resize={resize}")
        return self.image | {"resize": resize}


def pictures(folder: Folder) -> Pictures | None:
    """Return a folder's settings for pictures; None, with a warning, where it has none. ConfigError
    for a key that is not supported."""
    where, said = _found(folder)
    if said is None:
        if folder.stem == MODEL:
            _warn(f"{where}: no such file, so data.image is what the configuration makes it")
        return None
    kind = said.get("image_processor_type") or said.get("feature_extractor_type")
    # All classes of a model's processors, old, fast and by Pillow, share their defaults.
    kind = re.sub("(FeatureExtractor|ImageProcessor)(Fast|Pil)?$", "", str(kind or ""))
    kind = kind or folder.config.get("model_type")
    given = {key: value for key, value in said.items() if value not in (None, {}, [])}
    try:
        if kind not in TABLE["classes"]:
            raise ValueError(f"image_processor_type: {quoted(kind)} is not computed here")
        values = TABLE["classes"][kind] | given
        known = {*TABLE["classes"]["ViT"], *TABLE["inert"]}
        # A step that is not done needs no support, whatever it would do.
        off = {key for key, value in given.items() if key.startswith("do_") and value is False}
        if unknown := sorted(given.keys() - known - off):
            raise ValueError(f"unknown keys: {listed(unknown)}")
        return Pictures(where, said, *_parse(values))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{where}: {error}; correct it, or copy the folder without this file, and give "
            f"{listed([f'data.image.{key}' for key in KEYS])} yourself"
        ) from None


def _found(folder: Folder) -> tuple[str, dict[str, Any] | None]:
    """Return path and content; `image_processor` of processor_config.json goes first, as in
    transformers."""
    path = folder.path / PREPROCESSOR
    if (folder.path / PROCESSOR).is_file():
        inner = read_object(folder.file(PROCESSOR)).get("image_processor")
        if isinstance(inner, dict):
            return str(folder.path / PROCESSOR), inner
    return str(path), read_object(folder.file(PREPROCESSOR)) if path.is_file() else None


def _parse(values: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the side of images and KEYS of data.image. ValueError for what these cannot
    express."""
    resize, keep_ratio = _size("size", values)
    side, loose = _size("crop_size", values) if values["do_center_crop"] else (resize, keep_ratio)
    # Batches are arrays of equal squares; a crop beyond the edges would add a border.
    if not values["do_resize"] or loose or side > resize:
        keys = "do_resize", "size", "do_center_crop", "crop_size"
        said = ", ".join(f"{key}={quoted(values[key])}" for key in keys)
        raise ValueError(f"{said}: does not make a square without a border of every picture")
    if values["resample"] not in range(len(FILTERS)):
        raise ValueError(f"resample={quoted(values['resample'])}: is none of Pillow's filters")
    # (factor x - mean) / std of values x up to 255, where data.image has x / 255.
    # One affine function: dividing both numbers by the factor folds the scaling into them.
    factor = 255 * (values["rescale_factor"] if values["do_rescale"] else 1)
    if not 0 < factor < float("inf"):
        raise ValueError(f"rescale_factor={quoted(values['rescale_factor'])}: must be above 0")
    shift, scale = values["image_mean"], values["image_std"]
    if not values["do_normalize"]:
        shift, scale = 0.0, 1.0
    image = ImageConfig(
        mean=(np.atleast_1d(shift) / factor).tolist(),
        std=(np.atleast_1d(scale) / factor).tolist(),
        resize=resize,
        keep_ratio=keep_ratio,
        resample=FILTERS[values["resample"]],
    )
    return side, image.model_dump(mode="json", include={*KEYS})


def _size(key: str, values: dict[str, Any]) -> tuple[int, bool]:
    """Return a side, and whether it is that of the shorter edge alone."""
    size = values[key]
    if isinstance(size, int):
        # A number alone is both sides, or the shorter edge, as the class has it.
        square = values["default_to_square"] or key == "crop_size"
        size = [size, size] if square else {"shortest_edge": size}
    if isinstance(size, list):
        size = dict(zip(("height", "width"), size, strict=True))
    loose = [*size] == ["shortest_edge"]
    if (not loose and {*size} != {"height", "width"}) or len({*size.values()}) > 1:
        raise ValueError(f"{key}={quoted(size)}: must be a shortest_edge, or a height as its width")
    return next(iter(size.values())), loose


def of_run(where: str, cfg: "Config") -> Pictures | None:
    """Return a run's settings for pictures as a folder has them; None where it reads none."""
    model: Any = cfg.model
    if model.tokens is None or model.channels not in (1, 3):
        return None
    image, size = cfg.data.image, model.image_size
    # One number for each channel, so that settings of a run and of a folder compare.
    mean, std = (
        tuple(np.broadcast_to(each, model.channels).tolist()) for each in (image.mean, image.std)
    )
    own = image.model_copy(update={"mean": mean, "std": std, "resize": image.resize or size})
    return Pictures(where, {}, size, own.model_dump(mode="json", include={*KEYS}))


def write(out: Path, own: Pictures, source: Path | None) -> None:
    """Write preprocessor_config.json for a run's evaluation: that of `source`, the folder that the
    model came with, where it agrees, else one of BitImageProcessor, which expresses all of
    data.image."""
    try:
        came = pictures(Folder(source, weights=False)) if source else None
    except ConfigError:  # the run cannot have used it
        came = None
    # The original file keeps keys that other programs may read.
    if came and came[2:] == own[2:]:
        write_json(out / PREPROCESSOR, came.said)
        return
    if came:
        _warn(f"{PREPROCESSOR}: is of the run's data.image, in place of {came.where}")
    image = own.image
    edges = ("shortest_edge",) if image["keep_ratio"] else ("height", "width")
    said = {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": len(image["mean"]) == 3,
        "size": dict.fromkeys(edges, image["resize"]),
        "crop_size": {"height": own.side, "width": own.side},
        "resample": FILTERS.index(image["resample"]),
        "image_mean": image["mean"],
        "image_std": image["std"],
    }
    write_json(out / PREPROCESSOR, TABLE["classes"]["Bit"] | said)


@functools.cache
def _warn(message: str) -> None:
    log.warning("%s", message)
