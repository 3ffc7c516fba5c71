"""Embeddings as sentence-transformers' files describe them."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, processors

from maxstack.errors import ConfigError
from maxstack.inference.pooling import read_pooling

HIDDEN = np.array([3.0, 4.0, 12.0], np.float32)


def write(folder, config=None, pooling=None, *kinds):
    (folder / "config.json").write_text(json.dumps(config or {}))
    if kinds:
        modules = [
            {"path": kind, "type": f"sentence_transformers.models.{kind}"}
            for kind in ("Transformer", "Pooling", *kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "Pooling").mkdir()
        (folder / "Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_a_folder_without_modules_gives_vectors_of_norm_one(tmp_path):
    made = read_pooling(write(tmp_path)).vector(HIDDEN, None)
    np.testing.assert_allclose(made, HIDDEN / 13, rtol=1e-6)


def test_vectors_are_normalized_only_where_modules_say_so(tmp_path):
    last = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (tmp_path / "a").mkdir()
    pooling = read_pooling(write(tmp_path / "a", None, last, "Normalize"))
    assert pooling.normalize
    modules = json.loads((tmp_path / "a/modules.json").read_text())[:2]
    (tmp_path / "a/modules.json").write_text(json.dumps(modules))
    assert np.array_equal(read_pooling(tmp_path / "a").vector(HIDDEN, None), HIDDEN)


@pytest.mark.parametrize(
    ("pooling", "kind", "words"),
    [
        ({"pooling_mode_mean_tokens": True}, "Normalize", "another pooling"),
        ({}, "Normalize", "another pooling"),
        ({"pooling_mode_lasttoken": True}, "Dense", "modules.json: Dense"),
    ],
)
def test_other_modules_are_refused_by_name(tmp_path, pooling, kind, words):
    with pytest.raises(ConfigError, match=words):
        read_pooling(write(tmp_path, None, pooling, kind))


def test_a_vector_is_cut_to_sizes_that_the_model_names(tmp_path):
    pooling = read_pooling(write(tmp_path, {"matryoshka_dimensions": [2]}))
    pooling.check(2)
    np.testing.assert_allclose(pooling.vector(HIDDEN, 2), [0.6, 0.8], rtol=1e-6)
    with pytest.raises(ConfigError, match="dimensions=1: .* it names 2"):
        pooling.check(1)
    read_pooling(write(tmp_path, {"is_matryoshka": True})).check(1)


def test_a_text_ends_with_the_tokens_of_the_post_processor(tmp_path):
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, "a"))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s> </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made.save(str(write(tmp_path) / "tokenizer.json"))
    assert (0, *read_pooling(tmp_path).after) == tuple(made.encode("a").ids[1:])
