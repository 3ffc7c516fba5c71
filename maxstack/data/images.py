"""Pictures to pixels: decoding, crops, random changes, and the lane that makes rows of them.

A picture is a document with a class, so order, mixture, holdout and resume are those of text. A row
holds one picture, cut and resized to the model's size. What is random about it is drawn from (seed,
source, place in the order of all epochs), so it changes with the epoch and with nothing else. Files
come from others: formats, pixels and scans are bounded before anything is decoded.

Shapes: H height  W width  C channels  S side of the model's images.
"""

import io
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maxstack.data.documents import Documents, Picture, text_hash
from maxstack.data.files import one_line
from maxstack.data.lanes import FED, Batch, Lane
from maxstack.data.sources import Synthetic
from maxstack.errors import DataError, StoreError
from maxstack.schema.data import DataConfig, ImageConfig

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling

    from maxstack.schema.objective import RowField as Field

TRIES = 10
"""Random parts that are drawn before the whole picture is taken."""
RATIO = 3 / 4, 4 / 3
"""Width over height of a random part."""
FIELDS = "image", "label", "real"
SHOWN = 32
"""Pixels of a small picture in a grid at the least."""
FORMATS = "AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"
"""Formats of files that are opened, by Pillow's names; others of its readers start programs."""
SCANS = 100
"""Scans of a JPEG file; progressive ones have 10."""
LARGEST = 89_478_485
"""Pixels of a picture at most, as read or resized: those at which Pillow warns."""


class Sample(NamedTuple):
    """The contents of a row."""

    pixels: np.ndarray
    """[S, S, C], uint8, or float16 of latents."""
    label: int


class ImageLane(Lane):
    """Rows that hold a picture each: `image` uint8 [S, S, C], `label` int32, and `real` float32, 0
    past the end of an evaluation. What is random about a picture is of (seed, its place in the
    order of all epochs), so nothing depends on workers or on where a run went on."""

    packs = False

    @classmethod
    def arrays(cls, cfg: DataConfig, fields: Mapping[str, "Field"]) -> dict[str, np.dtype]:
        """Return arrays of a row, by name, with their shapes."""
        if "image" not in fields:
            return {}
        return {name: np.dtype((fields[name].dtype, fields[name].size)) for name in FIELDS}

    def fill(self, row: Batch) -> None:
        """Write the next picture into the arrays of a row; nothing at the end of an evaluation."""
        sample, source = self._next()
        if sample is not None:
            # Into the views that the caller gave; an assignment without [...] would replace them.
            row["image"][...], row["label"][...], row["real"][...] = *sample, 1.0
            if FED in row:
                row[FED][self._mixture.source_of[source]] += 1

    def _next(self) -> tuple[Sample | None, int]:
        """Return the next picture that can be read, and its source."""
        mixture, passed = self._mixture, 0
        while True:
            counter = mixture.pick(self._at, self._phase, self._lane)
            if counter is None:
                return None, 0
            place = mixture.place(self._at, counter, self._lane)
            located = mixture.locate(counter, place)
            if located is None:
                return None, 0
            source, index = located
            # Before it is read: a broken picture takes its place too, so the order of the others
            # stays.
            mixture.count(self._at, counter, 1, self._lane)
            documents = mixture.sources[source]
            try:
                return self._made(documents, index, place), source
            except StoreError:
                raise
            except DataError as error:
                self._quarantine.add(f"{source} {index}", str(error))
            passed += 1
            if passed > 2 * mixture.documents + 100:
                raise DataError("no picture can be read")

    def _made(self, documents: Documents, index: int, place: int) -> Sample:
        mixture, cfg = self._mixture, self._mixture.cfg
        size = mixture.fields["image"].size
        # By place rather than index, so that each epoch sees other crops of a picture.
        seed = text_hash(f"{cfg.seed} picture {documents.name} {place}")
        random = None if mixture.evaluation else np.random.Generator(np.random.PCG64(seed))
        document = documents[index]
        if isinstance(documents, Synthetic):
            made = np.random.Generator(np.random.PCG64(index))
            pixels = made.integers(0, 256, size, np.uint8)
            return Sample(pixels, int(document[0]))  # type: ignore[index]
        assert isinstance(document, Picture)
        where = documents.where(index)
        classes = mixture.fields["label"].below
        if classes and not 0 <= document.label < classes:
            raise DataError(
                f"{where}: is of class {document.label}, but model.classes={classes} counts from "
                "0; set model.classes"
            )
        if mixture.cfg.has_latents:
            return Sample(check_latents(document.content, size, where), document.label)
        try:
            picture = decode_image(document.content, size[2])
            return Sample(pixels_of(picture, size, cfg.image, random), document.label)
        except Exception as error:  # Pillow's readers raise whatever damaged bytes lead to
            reason = one_line(error) or type(error).__name__
            raise DataError(f"{where}: not a readable picture: {reason}") from error


def check_latents(content: bytes | np.ndarray, size: tuple[int, ...], where: str) -> np.ndarray:
    """Return latents, which an encoder made of a picture, in the model's shape. DataError for
    another shape, or values that are not finite."""
    assert isinstance(content, np.ndarray)
    # Records such as tf.train.Example hold flat lists.
    if content.shape != size and content.shape != (math.prod(size),):
        raise DataError(
            f"{where}: latents of shape {list(content.shape)}, but model.image_size and "
            f"model.channels make them {list(size)}"
        )
    if not np.isfinite(content).all():
        raise DataError(f"{where}: latents hold a number that is not finite")
    return content.reshape(size)


def decode_image(content: bytes | np.ndarray, channels: int) -> "Image":
    """Decode a picture to so many channels, turned as its EXIF orientation says and on
    white where it is transparent. Of numbers of 16 bits the upper 8 are kept; ValueError for those
    of 32, which say no range, or another of Pillow's errors where it cannot be read."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if isinstance(content, np.ndarray):
        picture = Image.fromarray(content)
    else:
        try:
            picture = Image.open(io.BytesIO(content), formats=FORMATS)
        except UnidentifiedImageError:
            raise ValueError(f"none of {', '.join(FORMATS)}") from None
    # Pillow has read the header alone so far; pixels are decoded by the first change.
    _check_pixels(*picture.size)
    # FF DA begins a scan; in coded data FF is followed by 00, so it does not occur there by chance.
    if picture.format == "JPEG" and content.count(b"\xff\xda") > SCANS:  # type: ignore[union-attr]
        raise ValueError(f"more than {SCANS} scans, each of which decodes the whole picture")
    ImageOps.exif_transpose(picture, in_place=True)
    # Pillow opens PNG and PPM of 16 bits in mode I, that of 32 bits.
    if picture.mode == "F" or (picture.mode == "I" and picture.format not in ("PNG", "PPM")):
        raise ValueError(
            "32-bit pixels, whose range the file does not state; convert it to 8 or 16 bits"
        )
    if picture.mode.startswith("I"):  # 16 bits, which convert() would cut off at 255
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.has_transparency_data:  # as the processors of transformers show it since 5.0
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    wanted = {1: "L", 3: "RGB"}
    if channels not in wanted:
        raise ValueError(f"model.channels={channels}: pictures have 1 or 3")
    return picture.convert(wanted[channels])


def _check_pixels(width: int, height: int) -> None:
    """ValueError for more than LARGEST."""
    if width * height > LARGEST:
        raise ValueError(f"{width} x {height} pixels exceed the limit of {LARGEST:,}")


def pixels_of(
    picture: "Image",
    size: tuple[int, ...],
    cfg: ImageConfig,
    random: np.random.Generator | None,
) -> np.ndarray:
    """Return pixels uint8 [S, S, C] of a picture; `random`: changed as in training, None: as in
    evaluation."""
    from PIL import ImageOps

    side = size[0]
    if random is None or cfg.crop == "center":
        picture = center_crop(picture, side, cfg)
    elif cfg.crop == "inception":
        picture = inception_crop(picture, side, cfg, random)
    else:
        picture = resize_box(picture, (0, 0, *picture.size), side, cfg)
    if random is not None:
        if cfg.flip and random.random() < 0.5:
            picture = ImageOps.mirror(picture)
        if cfg.randaugment:
            for _ in range(cfg.randaugment.layers):
                picture = random_change(picture, cfg.randaugment.magnitude / 10, random)
    # A gray picture has no axis of channels, which `size` adds.
    pixels = np.asarray(picture, np.uint8).reshape(size)
    if random is not None and cfg.shift:
        pixels = shift_pixels(pixels, cfg.shift, random)
    return pixels


def image_grid(images: np.ndarray, columns: int) -> "Image":
    """Return images uint8 [N, S, S, C] in rows of so many, each at least SHOWN pixels high, with a
    line between them."""
    times = -(-SHOWN // images.shape[1])
    # By whole pixels rather than by resizing, so that small images stay as they are.
    images = images.repeat(times, axis=1).repeat(times, axis=2)
    side, channels = images.shape[1] + 1, images.shape[3]
    rows = -(-len(images) // columns)
    whole = np.full((rows * side - 1, columns * side - 1, channels), 128, np.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * side, i % columns * side
        whole[top : top + side - 1, left : left + side - 1] = image
    return to_image(whole)


def to_image(pixels: np.ndarray) -> "Image":
    """Return pixels uint8 [S, S, C] as an image."""
    from PIL import Image

    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def resize_box(picture: "Image", box: tuple[int, ...], side: int, cfg: ImageConfig) -> "Image":
    """Return a part of a picture as a square."""
    return picture.resize((side, side), _filter(cfg), box)  # type: ignore[arg-type]


def _filter(cfg: ImageConfig) -> "Resampling":
    from PIL.Image import Resampling

    return Resampling[cfg.resample.upper()]


def center_crop(picture: "Image", side: int, cfg: ImageConfig) -> "Image":
    """Return the middle of a picture that was resized as a whole, to whole numbers of pixels cut
    off as transformers' processors cut them."""
    shorter = cfg.resize or side
    width = height = shorter
    if cfg.keep_ratio:
        least = min(picture.size)
        width, height = (int(shorter * length / least) for length in picture.size)
    _check_pixels(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    # Resized whole and then cut, as transformers do; a resized box would interpolate other pixels.
    made = picture.resize((width, height), _filter(cfg))
    return made.crop((left, top, left + side, top + side))


def inception_crop(
    picture: "Image", side: int, cfg: ImageConfig, random: np.random.Generator
) -> "Image":
    """Return a random part with an area between `least_area` and all of it (Szegedy et al. 2015,
    arXiv:1409.4842), or the whole picture where none is found."""
    width, height = picture.size
    for _ in range(TRIES):
        area = random.uniform(cfg.least_area, 1.0) * width * height
        # Uniform in the logarithm, so wide and high parts are equally likely.
        ratio = np.exp(random.uniform(*np.log(RATIO)))
        wide, high = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            left = int(random.integers(0, width - wide + 1))
            top = int(random.integers(0, height - high + 1))
            return resize_box(picture, (left, top, left + wide, top + high), side, cfg)
    return resize_box(picture, (0, 0, width, height), side, cfg)


def shift_pixels(pixels: np.ndarray, most: int, random: np.random.Generator) -> np.ndarray:
    """Move pixels by up to `most` each way."""
    down, right = random.integers(0, 2 * most + 1, 2)
    padded = np.pad(pixels, ((most, most), (most, most), (0, 0)), mode="edge")
    return padded[down : down + pixels.shape[0], right : right + pixels.shape[1]]


def random_change(picture: "Image", strength: float, random: np.random.Generator) -> "Image":
    """Return one random change of RandAugment (Cubuk et al. 2020, arXiv:1909.13719), of a strength
    from 0 to 1."""
    names = [*CHANGES]
    sign = 1.0 if random.random() < 0.5 else -1.0
    return CHANGES[names[int(random.integers(len(names)))]](picture, strength, sign)


def _affine(row: Callable[[float, "Image"], tuple[float, ...]]) -> Callable[..., "Image"]:
    """Return a change by an affine map, whose six numbers `row` gives."""

    def change(picture: "Image", strength: float, sign: float) -> "Image":
        from PIL.Image import Resampling, Transform

        numbers = row(sign * strength, picture)
        fill = 128 if picture.mode == "L" else (128,) * 3
        return picture.transform(
            picture.size, Transform.AFFINE, numbers, Resampling.BILINEAR, fillcolor=fill
        )

    return change


def _enhanced(name: str) -> Callable[..., "Image"]:
    def change(picture: "Image", strength: float, sign: float) -> "Image":
        from PIL import ImageEnhance

        return getattr(ImageEnhance, name)(picture).enhance(0.1 + 1.8 * strength)

    return change


def _operated(f: Callable[[Any, "Image", float], "Image"]) -> Callable[..., "Image"]:
    def change(picture: "Image", strength: float, sign: float) -> "Image":
        from PIL import ImageOps

        return f(ImageOps, picture, strength)

    return change


def _rotate(picture: "Image", strength: float, sign: float) -> "Image":
    fill = 128 if picture.mode == "L" else (128,) * 3
    return picture.rotate(sign * strength * 30, fillcolor=fill)


def _solarize_add(picture: "Image", strength: float, sign: float) -> "Image":
    """Make pixels brighter that are darker than the middle."""
    values = np.asarray(picture)
    brighter = np.minimum(values.astype(np.int32) + int(110 * strength), 255)
    return _image(np.where(values < 128, brighter, values))


def _image(values: np.ndarray) -> "Image":
    from PIL import Image

    return Image.fromarray(values.astype(np.uint8))


CHANGES: dict[str, Callable[..., "Image"]] = {
    "autocontrast": _operated(lambda ops, picture, _: ops.autocontrast(picture)),
    "equalize": _operated(lambda ops, picture, _: ops.equalize(picture)),
    "invert": _operated(lambda ops, picture, _: ops.invert(picture)),
    "posterize": _operated(
        lambda ops, picture, strength: ops.posterize(picture, max(1, 8 - int(4 * strength)))
    ),
    "solarize": _operated(
        lambda ops, picture, strength: ops.solarize(picture, int(256 * (1 - strength)))
    ),
    "solarize_add": _solarize_add,
    "color": _enhanced("Color"),
    "contrast": _enhanced("Contrast"),
    "brightness": _enhanced("Brightness"),
    "sharpness": _enhanced("Sharpness"),
    "rotate": _rotate,
    "shear_x": _affine(lambda strength, _: (1, 0.3 * strength, 0, 0, 1, 0)),
    "shear_y": _affine(lambda strength, _: (1, 0, 0, 0.3 * strength, 1, 0)),
    "translate_x": _affine(
        lambda strength, picture: (1, 0, 0.45 * strength * picture.width, 0, 1, 0)
    ),
    "translate_y": _affine(
        lambda strength, picture: (1, 0, 0, 0, 1, 0.45 * strength * picture.height)
    ),
}
"""Changes by name: f(picture, strength 0 to 1, sign)."""
