"""`maxstack import` and `maxstack export`: whole or not at all, resumable, in bounded memory."""

import json
import shutil
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import parity
import pytest
from parity import GOLDENS

from maxstack import cli
from maxstack.commands import convert
from maxstack.hf.contents import Contents
from maxstack.hf.safetensors_file import SafetensorsFile
from maxstack.load import load


def imported(source, out, *more):
    return cli.run(convert.import_model, [str(source), "--out", str(out), *more])


def exported(run, out, *more):
    return cli.run(convert.export_model, [str(run), "--out", str(out), *more])


def test_a_folder_becomes_a_run_and_a_folder_again(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDENS / "llama", source)
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    assert imported(source, tmp_path / "run") == 0
    assert load(tmp_path / "run" / "config.yml").model.param_dtype == "float32"
    assert exported(tmp_path / "run", tmp_path / "out", "--shard-size", "20kB") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run", "source"]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "temperature": 0.5
    }
    assert (tmp_path / "out" / "additional_chat_templates" / "rag.jinja").is_file()
    assert len([*(tmp_path / "out").glob("model-*.safetensors")]) > 1
    before, after = Contents(source).tensors, Contents(tmp_path / "out").tensors
    assert {name: tensor.array().tobytes() for name, tensor in before.items()} == {
        name: tensor.array().tobytes() for name, tensor in after.items()
    }


def test_dtypes_are_cast_on_the_way_in_and_out(tmp_path):
    assert imported(GOLDENS / "llama", tmp_path / "run", "--dtype", "bfloat16") == 0
    assert exported(tmp_path / "run", tmp_path / "out", "--dtype", "bfloat16") == 0
    folders = tmp_path / "out", GOLDENS / "llama"
    file, origin = (SafetensorsFile(folder / "model.safetensors") for folder in folders)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    for name in origin.entries:
        wanted = origin.array(name).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(file.array(name), wanted)


def test_a_refused_folder_leaves_nothing_behind(tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(GOLDENS / "llama", source)
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-4])
    assert imported(source, tmp_path / "run") == 2
    config = json.loads((source / "config.json").read_text())
    (source / "model.safetensors").write_bytes(data)
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    assert imported(source, tmp_path / "run") == 2
    (source / "config.json").write_text(json.dumps(config | {"hidden_act": "magic"}))
    assert imported(source, tmp_path / "run") == 1
    assert imported(tmp_path / "nowhere", tmp_path / "run") == 1
    assert not (tmp_path / "run").exists()
    assert "magic" in capsys.readouterr().err


def test_names_that_are_taken_are_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    assert imported(GOLDENS / "llama", tmp_path / "run") == 1
    assert imported(GOLDENS / "llama", tmp_path / "other") == 0
    assert exported(tmp_path / "other", tmp_path / "run") == 1
    assert exported(tmp_path / "nowhere", tmp_path / "out") == 1
    assert imported(GOLDENS / "gpt2", tmp_path / "other") == 1


def test_an_import_that_is_done_is_not_done_again(tmp_path, capsys):
    assert imported(GOLDENS / "llama", tmp_path / "run") == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert imported(GOLDENS / "llama", tmp_path / "run") == 0
    assert "already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.slow
def test_a_killed_import_is_no_run_and_goes_on(tmp_path):
    source, out = tmp_path / "source", tmp_path / "run"
    synthetic(source, layers=12, embed=256, hidden=1024, vocab=1000)
    process = subprocess.Popen(
        [sys.executable, "-m", "maxstack.cli", "import", str(source), "--out", str(out)],
        stderr=subprocess.DEVNULL,
    )
    journal = out / ".importing" / "done.txt"
    while process.poll() is None and not (journal.exists() and journal.stat().st_size):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the import was over before it could be killed"
    assert not (out / "checkpoints").exists()
    assert not (out / "config.yml").exists()
    done = journal.read_text()
    assert done
    assert exported(out, tmp_path / "early") == 1
    assert imported(source, out) == 0
    assert not journal.parent.exists()
    assert exported(out, tmp_path / "out") == 0
    before, after = (
        SafetensorsFile(folder / "model.safetensors") for folder in (source, tmp_path / "out")
    )
    assert all(
        before.array(name).tobytes() == after.array(name).tobytes() for name in before.entries
    )


PEAK = """
import sys
from maxstack import cli
from maxstack.commands import convert
assert cli.run(getattr(convert, sys.argv[1]), sys.argv[2:]) == 0
status = open("/proc/self/status").read()  # not ru_maxrss, which begins at what the parent had
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.slow
def test_memory_stays_far_below_the_model(tmp_path):
    largest = synthetic(tmp_path / "source", layers=8, embed=1024, hidden=8192, vocab=16000)
    for command in ("import_model source --out run", "export_model run --out out"):
        words = [sys.executable, "-c", PEAK, *command.split()]
        peak = subprocess.check_output(words, cwd=tmp_path, text=True)
        assert int(peak.splitlines()[-1]) < 3 * largest + 2**30, command


def synthetic(folder, *, layers, embed, hidden, vocab):
    """A Llama of random bfloat16 numbers; -> bytes of its largest tensor."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": embed // 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 1e4,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (vocab, embed),
        "lm_head.weight": (vocab, embed),
        "model.norm.weight": (embed,),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}{norm}.weight": (embed,)
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {f"{name}self_attn.{part}_proj.weight": (embed, embed) for part in "qkvo"}
        shapes |= {f"{name}mlp.{part}_proj.weight": (hidden, embed) for part in ("gate", "up")} | {
            f"{name}mlp.down_proj.weight": (embed, hidden)
        }
    header, at = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    block = np.random.default_rng(0).integers(0, 2**14, 1 << 22, np.uint16).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, at, len(block)):
            file.write(block[: min(len(block), at - begin)])
    return max(int(np.prod(shape)) * 2 for shape in shapes.values())


@pytest.mark.parametrize(
    ("text", "wanted"), [("5GB", 5 * 10**9), ("2GiB", 2**31), ("100", 100), ("1.5kB", 1500)]
)
def test_shard_sizes(text, wanted):
    from maxstack.hf.export import shard_bytes

    assert shard_bytes(text) == wanted


def test_nan_is_imported_only_if_it_is_asked_for(tmp_path, capsys):
    name = parity.poisoned(GOLDENS / "llama", tmp_path / "source", np.nan)
    assert imported(tmp_path / "source", tmp_path / "run") == 2
    assert f"tensor {name}: 1 of" in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert imported(tmp_path / "source", tmp_path / "run", "--allow-nonfinite") == 0
