"""preprocessor_config.json of model folders, and data.image."""

import json
import shutil

import numpy as np
import pytest
from parity import GOLDENS
from PIL import Image

from maxstack.data.images import pixels_of
from maxstack.errors import ConfigError
from maxstack.hf.folder import Folder
from maxstack.hf.preprocessor import of_run, pictures, write
from maxstack.inference.trained_model import config_of
from maxstack.load import load
from maxstack.schema.data import ImageConfig

PUBLISHED = json.loads((GOLDENS / "preprocessors.json").read_text())
MADE = np.load(GOLDENS / "preprocessors.npz")
SIDE = 14


def folder(path, said):
    """A folder of a tiny model with what it says of pictures."""
    path = path / "model"
    shutil.copytree(GOLDENS / "dinov2", path)
    (path / "preprocessor_config.json").write_text(json.dumps(said))
    return path


def read(path):
    """What the folder says of pictures."""
    return pictures(Folder(path, weights=False))


def values(image, side=SIDE):
    """What a section makes of the picture, as a model reads it."""
    cfg = ImageConfig.model_validate(image)
    pixels = pixels_of(Image.fromarray(MADE["picture"]), (side, side, 3), cfg, None)
    return (pixels / np.float32(255) - np.array(cfg.mean)) / np.array(cfg.std)


@pytest.mark.parametrize("name", PUBLISHED)
def test_pixels_are_those_of_transformers_processors(tmp_path, name):
    said = read(folder(tmp_path, PUBLISHED[name]))
    assert said.side == SIDE
    np.testing.assert_allclose(values(said.image), MADE[name], rtol=0, atol=2e-6 * MADE[name].std())


def test_a_processor_of_both_files_is_read_where_transformers_reads_it(tmp_path):
    path = folder(tmp_path, PUBLISHED["vit"])
    inner = {"image_processor": PUBLISHED["dinov2"], "processor_class": "SomeProcessor"}
    (path / "processor_config.json").write_text(json.dumps(inner))
    assert read(path).image["mean"] == [0.485, 0.456, 0.406]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"image_processor_type": "PoolFormerImageProcessor"}, "PoolFormer. is not computed"),
        ({"do_pad": True}, "unknown keys: do_pad"),
        ({"do_resize": False}, "do_resize=False"),
        ({"size": {"shortest_edge": 17, "longest_edge": 20}}, "size="),
        ({"crop_size": 18}, "crop_size=18"),
        ({"rescale_factor": 0.0}, "rescale_factor=0.0"),
    ],
)
def test_what_is_not_computed_is_refused_by_key(tmp_path, change, says):
    path = folder(tmp_path, PUBLISHED["dinov2"] | change)
    with pytest.raises(ConfigError, match=f"preprocessor_config.json: .*{says}"):
        read(path)


def test_a_folder_is_read_at_the_size_and_by_the_numbers_of_its_processor(tmp_path):
    path = folder(tmp_path, PUBLISHED["dinov2"])
    cfg, _ = config_of(str(path), [])
    image = cfg.data.image
    assert cfg.model.image_size == SIDE
    assert (image.mean, image.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (image.resize, image.keep_ratio, image.resample) == (17, True, "bicubic")


def test_given_keys_go_first_and_are_told_and_eval_data_has_the_same(tmp_path, caplog):
    source = {"kind": "synthetic", "vocab": 2}
    tree = {
        "model": {"from": str(folder(tmp_path, PUBLISHED["dinov2"])), "image_size": 28},
        "data": {"sources": [source], "image": {"mean": [0.1]}},
        "eval": {"data": {"sources": [source]}},
    }
    cfg = load(tree)
    for image in (cfg.data.image, cfg.eval.data.image):
        assert (image.mean, image.std, image.resize) == ((0.1,), (0.229, 0.224, 0.225), 34)
    assert "data.image.mean: that of " in caplog.text and "[0.485, 0.456, 0.406]" in caplog.text


def test_an_export_says_what_was_trained(tmp_path):
    path = folder(tmp_path, PUBLISHED["dinov2"])
    cfg, _ = config_of(str(path), ["data.image.mean=[0.2,0.3,0.4]", "data.image.keep_ratio=false"])
    write(path, of_run("run", cfg), path)
    written = json.loads((path / "preprocessor_config.json").read_text())
    assert written["image_mean"] == [0.2, 0.3, 0.4] and written["resample"] == 3
    assert written["size"] == {"height": 17, "width": 17}
    np.testing.assert_array_equal(values(read(path).image), values(cfg.data.image))


def test_an_export_gives_back_what_was_followed(tmp_path):
    path = folder(tmp_path, PUBLISHED["dinov2"])
    cfg, _ = config_of(str(path), [])
    out = tmp_path / "out"
    out.mkdir()
    write(out, of_run("run", cfg), path)
    assert json.loads((out / "preprocessor_config.json").read_text()) == PUBLISHED["dinov2"]
