"""Pictures to pixels: crops, random changes, mirrors."""

import numpy as np
import pytest
from PIL import Image

from maxstack.data.images import CHANGES, center_crop, inception_crop, pixels_of, shift_pixels
from maxstack.schema.data import ImageConfig


def image():
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(20, 200, (40, 60, 3), np.uint8))


def test_the_center_is_cut_after_the_shorter_side_was_made_small():
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[16:48, 48:80] = 255  # what is left of the middle at half its side
    sections = ImageConfig(resize=16), ImageConfig()
    half, whole = (np.asarray(center_crop(Image.fromarray(pixels), 8, cfg)) for cfg in sections)
    assert half.min() > 180 and whole[:1].max() == 0 and whole[3:5, 3:5].min() > 180
    narrow = Image.new("RGB", (1, 20_000))
    with pytest.raises(ValueError, match="exceed the limit of 89,478,485"):
        center_crop(narrow, 224, ImageConfig())


def test_random_parts_have_areas_and_ratios_in_range(monkeypatch):
    boxes = []
    monkeypatch.setattr(
        "maxstack.data.images.resize_box", lambda picture, box, *_: boxes.append(box) or picture
    )
    rng = np.random.default_rng(0)
    for _ in range(200):
        inception_crop(image(), 8, ImageConfig(least_area=0.2), rng)
    areas = [(right - left) * (low - top) / 2400 for left, top, right, low in boxes]
    ratios = [(right - left) / (low - top) for left, top, right, low in boxes]
    assert 0.17 < min(areas) < 0.3 and 0.8 < max(areas) <= 1.0
    assert 0.7 < min(ratios) and max(ratios) <= 1.5
    assert all(0 <= l and r <= 60 and 0 <= t and b <= 40 for l, t, r, b in boxes)  # noqa: E741


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_keeps_size_and_mode(name, mode):
    before = image().convert(mode)
    for strength in (0.0, 1.0):
        after = CHANGES[name](before, strength, -1.0)
        assert (after.size, after.mode) == (before.size, before.mode)
    assert after.tobytes() != before.tobytes() or (name, mode) == ("color", "L")


def test_pixels_move_by_what_shift_allows():
    pixels = np.zeros((6, 6, 1), np.uint8)
    pixels[3, 3] = 1
    rng, seen = np.random.default_rng(0), set()
    for _ in range(100):
        ((row, column, _),) = np.argwhere(shift_pixels(pixels, 1, rng))
        seen.add((row, column))
    assert seen == {(row, column) for row in (2, 3, 4) for column in (2, 3, 4)}


def test_half_of_the_pictures_are_mirrored():
    cfg = ImageConfig(crop="none", flip=True)
    rng, size = np.random.default_rng(0), (8, 8, 3)
    plain = pixels_of(image(), size, cfg, None)
    made = [pixels_of(image(), size, cfg, rng) for _ in range(60)]
    whole = pixels_of(image(), size, ImageConfig(crop="none", flip=False), rng)
    mirrored = [np.array_equal(pixels, whole[:, ::-1]) for pixels in made]
    assert 15 < sum(mirrored) < 45 and plain.shape == size
    assert all(m or np.array_equal(p, whole) for m, p in zip(mirrored, made, strict=True))
