"""Programs and weights of a model's layers."""

import dataclasses
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import answers, build
from jax import monitoring
from safetensors.numpy import load_file, save_file

from maxstack import sharding
from maxstack.errors import DataError
from maxstack.inference import programs
from maxstack.inference.adapters import Adapters
from maxstack.inference.engine_setup import OVERRIDES
from maxstack.inference.layout import Layout
from maxstack.inference.page_cache import Limits
from maxstack.inference.request import Sampling
from maxstack.inference.trained_model import config_of, read_layers, read_weights
from maxstack.run import assemble
from maxstack.state import flat

GOLDENS = Path(__file__).parents[1] / "goldens"
MESH = *OVERRIDES, "mesh.tensor=1"
LENGTH = 64
GREEDY = Sampling(max_tokens=32, temperature=0.0)


def prompt(length):
    return [np.random.default_rng(1).integers(0, 128, length).tolist()]


def unloaded(folder, dtype):
    """The run of a folder, its programs without weights, and the run's own folder."""
    cfg, own = config_of(str(folder), [*MESH, f"model.dtype={dtype}"])
    cfg = programs.inference_config(cfg)
    run = assemble(cfg, sharding.make_mesh(cfg.mesh, jax.devices()[:1]), trains=False)
    layout, limits = Layout.of(cfg.model, cfg.serve), Limits(8, 4, (8,) * 4, 2)
    return run, programs.Programs(run, layout, limits, LENGTH, Adapters()), own


def test_programs_are_compiled_by_kind_of_layer_whatever_the_depth():
    """Gemma 3: five layers with a window, one without, and both again."""
    engine, _ = build(GOLDENS / "gemma3", MESH, LENGTH)
    answers(engine, prompt(9), GREEDY)
    layers = engine.programs._layers
    assert len(layers._layers) == engine.cfg.decoder.layers > 2
    assert [program._cache_size() for program in layers._programs.values()] == [1, 1]


@pytest.mark.parametrize("name", ["gemma3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_what_a_prompt_needs_is_compiled_before_there_are_weights(name):
    """And no program more when it is answered."""
    length = 19 + GREEDY.max_tokens
    engine, _ = build(GOLDENS / name, MESH, LENGTH, on_demand=length)
    engine.compile(19, draws=False)
    compiled = []

    def note(event, _, fun_name="", **__):
        if event.endswith("backend_compile_duration"):
            compiled.append(fun_name)

    monitoring.register_event_duration_secs_listener(note)
    try:
        answers(engine, prompt(19), GREEDY)
        assert not compiled
        answers(engine, prompt(5), dataclasses.replace(GREEDY, temperature=1.0))
        assert compiled == ["jit(run)"]
    finally:
        monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next", "deepseek_v3", "gemma3"])
def test_layers_of_a_folder_are_read_as_steps_keep_them(name, dtype):
    run, made, own = unloaded(GOLDENS / name, dtype)
    whole = made.prepare(read_weights(str(GOLDENS / name), run, own), keep=False)
    layers = read_layers(run, made.kept())
    known = {path.removesuffix("/kept"): kept for path, kept in flat(whole).items()}
    assert known.keys() == layers.keys()
    for path, kept in known.items():
        for theirs, ours in zip(jax.tree.leaves(kept), jax.tree.leaves(layers[path]), strict=True):
            assert theirs.dtype == ours.dtype and theirs.tobytes() == ours.tobytes(), path


def test_an_expert_that_is_not_finite_is_named(tmp_path):
    shutil.copytree(GOLDENS / "mixtral", tmp_path / "mixtral")
    file = tmp_path / "mixtral/model.safetensors"
    tensors = load_file(file)
    name = [name for name in sorted(tensors) if ".experts." in name][-1]
    tensors[name][0, 0] = np.inf
    save_file(tensors, file)
    run, made, _ = unloaded(file.parent, "float32")
    with pytest.raises(DataError, match=f"tensor {re.escape(name)}: 1 of"):
        read_layers(run, made.kept())
