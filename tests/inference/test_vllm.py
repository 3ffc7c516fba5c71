"""`maxstack serve --engine vllm` with a stand-in named vllm, a real process that notes what it is
given."""

import itertools
import json
import os
import shlex

import parity
import processes
import pytest
from served import make

from maxstack import cli
from maxstack.checkpoint import manifest
from maxstack.commands.serve_vllm import MARK
from maxstack.hf.contents import Contents
from maxstack.inference.tools import FORMATS
from maxstack.inference.vllm import INSTEAD, TOOL_PARSERS
from maxstack.schema.serve import ServeConfig

NOTE = 'printf "%s\\n" "$@" > "$NOTED"; env > "$NOTED.env"; echo $$ > "$NOTED.pid"'
HANDED = {
    "cache",
    "cache_dtype",
    "max_length",
    "max_requests",
    "identical",
    "prefix_cache",
    "speculate",
    "draft",
    "adapters",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def run(folder):
    """A run of that model."""
    out = folder.parent / "runs" / "tuned"
    assert cli.main(["import", str(folder), "--out", str(out)]) == 0
    return out


@pytest.fixture
def vllm(tmp_path):
    """Calls the command; the words that vLLM is given, its environment, and what was printed."""
    noted = tmp_path / "noted"
    environment = processes.environment() | processes.stand_ins(tmp_path / "bin", {"vllm": NOTE})
    environment |= {"NOTED": str(noted), "HOME": str(tmp_path)}
    environment.pop("JAX_PLATFORMS")

    def serve(model, *words, code=0, path=None):
        command = ["-m", "maxstack.cli", "serve", str(model), "--engine", "vllm", *words]
        own = environment | ({"PATH": path} if path else {})
        printed = processes.run(["python", *command], own, code)
        if code:
            return printed
        lines = (tmp_path / "noted.env").read_text().splitlines()
        given = dict(line.split("=", 1) for line in lines if "=" in line)
        return noted.read_text().splitlines(), given, printed

    return serve


def options(words):
    """Flag -> value, of flags that have one."""
    return dict(zip(words[2::2], words[3::2], strict=False))


@pytest.mark.slow
def test_a_hugging_face_folder_is_handed_as_it_is_with_the_same_settings(folder, vllm):
    before = sorted(path.name for path in folder.iterdir())
    settings = ["serve.max_requests=7", "serve.max_length=99", "serve.cache=0.5", "mesh.tensor=2"]
    settings.append("serve.cache_dtype=int8")
    tls = parity.GOLDENS / "tls"
    flags = {"--host": "127.0.0.1", "--port": "8123", "--grace": "60"}
    flags |= {"--tls-cert": f"{tls / 'cert.pem'}", "--tls-key": f"{tls / 'key.pem'}"}
    words, environment, printed = vllm(
        folder, *itertools.chain(*flags.items()), "model.dtype=float32", *settings
    )
    assert words[:2] == ["serve", str(folder)] and shlex.join(["vllm", *words]) in printed
    given = options(words)
    assert int(given.pop("--seed")) >= 0
    assert given == {
        "--host": "127.0.0.1",
        "--port": "8123",
        "--served-model-name": "model",
        "--dtype": "float32",
        "--max-num-seqs": "7",
        "--max-model-len": "99",
        "--kv-cache-memory-bytes": str(2**28),
        "--kv-cache-dtype": "int8_per_token_head",
        "--tensor-parallel-size": "2",
        "--generation-config": "vllm",
        "--shutdown-timeout": "60",
        "--ssl-certfile": flags["--tls-cert"],
        "--ssl-keyfile": flags["--tls-key"],
        "--enable-auto-tool-choice": "--tool-call-parser",
    }
    assert words[-1] == "hermes"
    assert sorted(path.name for path in folder.iterdir()) == before
    assert "JAX_PLATFORMS" not in environment and "VLLM_API_KEY" not in environment


@pytest.mark.slow
def test_a_key_goes_by_the_environment_and_never_by_the_command(folder, vllm, tmp_path):
    (tmp_path / "keys").write_text("a-secret\n")
    words, environment, printed = vllm(folder, "--api-key-file", str(tmp_path / "keys"))
    assert environment["VLLM_API_KEY"] == "a-secret"
    assert "a-secret" not in printed + " ".join(words)
    (tmp_path / "keys").write_text("a-secret\nanother\n")
    printed = vllm(folder, "--api-key-file", str(tmp_path / "keys"), code=1)
    assert "vLLM reads one key of its environment, and there are 2" in printed


@pytest.mark.slow
def test_a_run_is_exported_beside_it_and_again_only_when_its_checkpoint_changed(run, vllm):
    beside = run.with_name("tuned-vllm")
    words, _, printed = vllm(run)
    assert words[1] == str(beside) and f"{run} step 0 -> " in printed
    assert len(Contents(beside).tensors) == len(Contents(run.parent.parent / "model").tensors)
    first = (beside / "model.safetensors").stat().st_ino
    assert vllm(run)[0][1] == str(beside)
    assert (beside / "model.safetensors").stat().st_ino == first
    step = run / "checkpoints" / "0"
    manifest.write(step, manifest.checksums(step), {"changed": True})
    vllm(run)
    assert (beside / "model.safetensors").stat().st_ino != first
    assert not [*run.parent.glob("*.unfinished")]


@pytest.mark.slow
def test_a_folder_that_is_no_export_is_not_overwritten(run, vllm, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    printed = vllm(run, "--export-to", str(tmp_path / "mine"), code=1)
    assert f"{tmp_path / 'mine'}: is no export for vLLM, and is not overwritten" in printed
    assert (tmp_path / "mine" / "precious").exists()
    vllm(run, "--export-to", str(tmp_path / "new"))
    assert json.loads((tmp_path / "new" / MARK).read_text())["step"] == 0


@pytest.mark.slow
def test_adapters_are_handed_with_their_rank_and_dora_is_refused(folder, vllm, tmp_path):
    adapter = parity.GOLDENS / "adapters" / "lora-llama"
    words, _, _ = vllm(folder, f"serve.adapters.tuned={adapter}")
    at = words.index("--lora-modules")
    assert words[at - 5 : at] == ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "8"]
    assert json.loads(words[at + 1]) == {"name": "tuned", "path": str(adapter)}
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "use_dora": true}')
    printed = vllm(folder, f"serve.adapters.odd={tmp_path}", code=1)
    assert "serve.adapters.odd: vLLM takes no adapter with use_dora" in printed


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("serve.identical=strict", "serve.identical=strict: vLLM does not promise it"),
        ("quantization=int8", "quantization=int8: vLLM cannot take it"),
        ("--connections=5", "--connections and --connections-per-address: vLLM takes none"),
        ("mesh.expert=2", "mesh.expert=2: vLLM cannot take it"),
        ("--port=0", "--port 0: vLLM needs a number"),
        ("--export-to=here", "is a Hugging Face folder, which is taken as it is"),
    ],
)
def test_what_vllm_cannot_take_is_refused_by_name(word, says, folder, vllm):
    assert says in vllm(folder, word, code=1)


def test_what_changes_no_answer_is_said_by_name(folder, vllm):
    words, _, printed = vllm(
        folder,
        "serve.rows=32",
        "serve.max_waiting=3",
        "serve.speculate=4",
        "serve.draft=mtp",
        "serve.prefix_cache=false",
    )
    assert "serve.rows=32: vLLM chooses" in printed and "serve.max_waiting=3: with vLLM" in printed
    assert "serve.identical=check: not tried" in printed
    drafts = options(words)["--speculative-config"]
    assert json.loads(drafts) == {"method": "mtp", "num_speculative_tokens": 4}
    assert "--no-enable-prefix-caching" in words


def test_every_key_of_serve_is_handed_or_named():
    assert HANDED | INSTEAD.keys() == ServeConfig.model_fields.keys()
    assert TOOL_PARSERS.keys() == FORMATS.keys()


def test_a_missing_vllm_is_a_pip_command(folder, vllm):
    printed = vllm(folder, code=1, path=os.defpath)
    assert "no program vllm is on the PATH; pip install vllm" in printed
