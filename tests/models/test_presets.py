"""Every preset against transformers' own model of the same numbers
(scripts/golden/presets.py): parameters, tensor names, shapes."""

import gzip
import json
import math
import re
from collections import Counter
from pathlib import Path

import jax
import pytest
from flax import nnx

from maxstack.config.compose import presets_dir
from maxstack.hf.binding import bind
from maxstack.hf.families import FAMILIES
from maxstack.load import load
from maxstack.models.model import abstract, weights_of

GOLDENS = json.loads(
    gzip.decompress((Path(__file__).parents[1] / "goldens" / "presets.json.gz").read_bytes())
)
PRESETS = {
    path.stem: path
    for path in sorted((presets_dir() / "models").glob("*.yml"))
    if not path.stem.startswith("dit-")
}
DIT = {"s": 33, "b": 130, "l": 458, "xl": 675}
"""Millions of parameters in table 1 of arXiv:2212.09748, with patches of 2."""
RUN = "model: {preset: PRESET}\ndata: {sources: [{kind: synthetic, vocab: 2}]}\n"


def test_every_preset_has_a_golden():
    assert GOLDENS.keys() == PRESETS.keys(), "run scripts/make_goldens.py presets"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_and_tensors_of_the_published_model(name, tmp_path):
    (tmp_path / "run.yml").write_text(RUN.replace("PRESET", name))
    model = load(tmp_path / "run.yml").model
    weights = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(abstract(model)[1]))
    shapes = {"/".join(str(key.key) for key in path): leaf.shape for path, leaf in weights}
    golden, said = (
        GOLDENS[name],
        re.search(r"^# .* config\.json; ([\d,]+) parameters", PRESETS[name].read_text()),
    )
    assert said, "the first line names the source and the count"
    assert (
        sum(map(math.prod, shapes.values()))
        == golden["parameters"]
        == int(said[1].replace(",", ""))
    )
    found: dict[str, Counter[str]] = {}
    family = FAMILIES[golden["model_type"]]
    for tensor in bind(family, model, shapes):
        if not tensor.row.copy:
            written = tensor.name if model.has_head else tensor.name.removeprefix(family.body)
            found.setdefault(re.sub(r"\d+(?=\.)", "#", written), Counter())[
                "x".join(map(str, tensor.shape))
            ] += 1
    assert found == golden["tensors"]


@pytest.mark.parametrize("size", DIT)
def test_a_diffusion_transformer_has_the_parameters_of_its_paper(size):
    """DiT-XL/2 has exactly those of the published weights without their fixed positions:
    675,129,632 - 256 * 1152."""
    for patch in (2, 4, 8):
        path = presets_dir() / "models" / f"dit-{size}{patch}.yml"
        source = {"kind": "synthetic", "vocab": 2}
        model = load({"model": path.stem, "data": {"sources": [source]}}).model
        made = sum(math.prod(leaf.shape) for leaf in weights_of(model).values())
        assert f"; {made:,} parameters." in path.read_text()
        assert round(made / 1e6) == DIT[size] or patch > 2
        assert size != "xl" or patch > 2 or made == 675_129_632 - 256 * 1152
