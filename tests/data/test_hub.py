"""Models of the hub by name, against a hub served on loopback."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from parity import GOLDENS
from tokenizer_files import of_words

from maxstack import cli, config
from maxstack.commands import convert
from maxstack.data import hub
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import ConfigError
from maxstack.hf.contents import Contents
from maxstack.inference.trained_model import config_of
from maxstack.load import load

COMMIT, OLD = "a" * 40, "b" * 40
WEIGHTS = "model.safetensors"
DATA = {"sources": [{"kind": "synthetic", "vocab": 128}], "seq_len": 16}


class Hub(ThreadingHTTPServer):
    """Serves one model, Some/Llama, as the hub does; `asked` has what was downloaded."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder, self.asked, self.gated = folder, [], False
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    """The hub's answer for a path."""

    def log_message(self, *args):
        pass

    def refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self):
        api, _, revision = self.path.partition("/revision/")
        name, _, rest = self.path[1:].partition("/resolve/")
        if api not in ("/api/models/Some/Llama", self.path) or name not in (
            "Some/Llama",
            self.path[1:],
        ):
            return self.refuse(401, "RepoNotFound")
        revision, _, file = (rest or revision).partition("/")
        commit = {"main": COMMIT, COMMIT: COMMIT, "v1": OLD, OLD: OLD}.get(revision)
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        if self.server.gated and file:
            return self.refuse(403, "GatedRepo")
        files = sorted(path.name for path in self.server.folder.iterdir())
        if not file:
            siblings = [{"rfilename": name} for name in files]
            body = json.dumps({"id": "Some/Llama", "sha": commit, "siblings": siblings}).encode()
        elif file not in files:
            return self.refuse(404, "EntryNotFound")
        else:
            body = (self.server.folder / file).read_bytes()
        self.send_response(200)
        for key, value in (
            ("ETag", f'"{file}-{len(body)}"'),
            ("X-Repo-Commit", commit),
            ("Content-Length", str(len(body))),
        ):
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            self.server.asked += [file] * bool(file)

    do_HEAD = do_GET


@pytest.fixture
def server(tmp_path, monkeypatch):
    folder = tmp_path / "served"
    shutil.copytree(GOLDENS / "llama", folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(described | {"auto_map": {"AutoModel": "modeling_llama.LlamaForCausalLM"}})
    )
    of_words(["<s>", "</s>", "a", "<unk>"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    for name in ("modeling.py", "pytorch_model.bin", "consolidated.safetensors", "README.md"):
        (folder / name).write_bytes(b"not to be read")
    served = Hub(folder)
    threading.Thread(target=served.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", served.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        served.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    hub.download_snapshot.cache_clear()
    yield served
    served.shutdown()
    served.server_close()
    hub.download_snapshot.cache_clear()
    huggingface_hub.close_session()


def configured(name):
    """The configuration of a run that starts from a model."""
    return load({"model": {"from": name}, "data": DATA})


def offline(monkeypatch):
    """A new process where HF_HUB_OFFLINE is set."""
    hub.download_snapshot.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_configuration_pins_the_commit_and_downloads_no_weights(server):
    cfg = configured("Some/Llama")
    assert cfg.model.weights == f"Some/Llama@{COMMIT}" and cfg.model.layers == 3
    assert cfg.data.tokenizer.path == f"Some/Llama@{COMMIT}/tokenizer.json"
    assert sorted(server.asked) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert open_tokenizer(cfg.data.tokenizer).vocab_size == 4
    assert configured("Some/Llama@v1").model.weights == f"Some/Llama@{OLD}"


def test_only_files_that_are_read_are_downloaded_and_each_once(server, monkeypatch):
    contents = Contents("Some/Llama")
    assert contents.tensors.keys() == Contents(GOLDENS / "llama").tensors.keys()
    wanted = ["config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json"]
    assert sorted(server.asked) == wanted
    offline(monkeypatch)
    assert Contents(f"Some/Llama@{COMMIT}").mapping == contents.mapping
    assert Contents("Some/Llama").mapping == contents.mapping
    assert sorted(server.asked) == wanted


def test_what_a_pinned_configuration_says_is_read_by_a_machine_that_has_nothing_yet(
    server, tmp_path
):
    text = config.dump(configured("Some/Llama"))
    (tmp_path / "config.yml").write_text(text)
    shutil.rmtree(tmp_path / "cache")
    hub.download_snapshot.cache_clear()
    server.asked.clear()
    again = load(tmp_path / "config.yml")
    assert config.dump(again) == text and server.asked == []
    assert open_tokenizer.__wrapped__(again.data.tokenizer).vocab_size == 4
    assert Contents(again.model.weights).tensors


def test_shards_are_those_of_the_index(server):
    names = list(Contents(GOLDENS / "llama").tensors)
    shard = "model-00001-of-00001.safetensors"
    (server.folder / WEIGHTS).rename(server.folder / shard)
    (server.folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, shard)})
    )
    assert Contents("Some/Llama").tensors.keys() == {*names}
    assert shard in server.asked and "consolidated.safetensors" not in server.asked


def test_import_takes_a_name(server, tmp_path):
    assert cli.run(convert.import_model, ["Some/Llama", "--out", str(tmp_path / "run")]) == 0
    assert load(tmp_path / "run" / "config.yml").model.layers == 3


def test_score_takes_a_name_whatever_lies_in_the_working_folder(server, tmp_path):
    (tmp_path / "config.yml").write_text("")
    cfg, own = config_of("Some/Llama", [])
    assert own is None and cfg.model.weights == f"Some/Llama@{COMMIT}"


def test_a_folder_of_that_name_comes_first(server, tmp_path):
    shutil.copytree(GOLDENS / "llama", tmp_path / "Some" / "Llama")
    assert configured("Some/Llama").model.weights == "Some/Llama" and not server.asked


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "Some/Lama",
            "Some/Lama: no such folder, and no model at http://127.0.0.1:.*/Some/Lama; check the "
            "name, or.*`hf auth login` ",
        ),
        (
            "Some/Llama@v9",
            "Some/Llama: has no revision v9; http://.*/commits lists them",
        ),
        (
            "Llama",
            "Llama: no such folder or .gguf file, and no name of a model of the hub, which is",
        ),
        ("a/b/c", "a/b/c: no such folder or .gguf file, and no name of a model of the hub"),
        ("./Some/Llama", "no such folder"),
        ("Some/L--lama", "Some/L--lama: no such folder, and no name that the hub allows"),
    ],
)
def test_a_name_that_leads_nowhere_is_told_in_a_sentence(server, name, says):
    with pytest.raises(ConfigError, match=says) as caught:
        configured(name)
    assert "\n" not in str(caught.value) and "hf download" not in str(caught.value)


def test_a_gated_model_asks_to_log_in(server):
    server.gated = True
    with pytest.raises(
        ConfigError,
        match="Some/Llama: is gated: ask for access at .*, and log in with `hf auth login`.*"
        "`hf download Some/Llama --revision main --include",
    ):
        Contents("Some/Llama")


def test_offline_the_message_names_the_variable_what_to_run_and_the_cache(server, monkeypatch):
    cfg = configured("Some/Llama")
    offline(monkeypatch)
    with pytest.raises(
        ConfigError,
        match=f"Some/Llama: .*HF_HUB_OFFLINE is set .*{constants.HF_HUB_CACHE}: unset it, or run "
        rf"`hf download Some/Llama --revision {COMMIT} --include '\*.json' --include 'model",
    ):
        Contents(f"Some/Llama@{COMMIT}")
    assert Path(open_tokenizer.__wrapped__(cfg.data.tokenizer).name).name == "tokenizer.json"


def test_a_hub_that_does_not_answer_is_told_with_the_first_cause(server, monkeypatch):
    def unreachable(*args, **keys):
        error = huggingface_hub.errors.LocalEntryNotFoundError("Please check your connection")
        raise error from ConnectionError("refused")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(ConfigError, match=r"\(refused\); download it .*`hf download Some/Llama"):
        Contents("Some/Llama")


def test_a_repository_without_safetensors_or_config_is_refused(server):
    (server.folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match="Some/Llama: has no safetensors on the hub"):
        Contents("Some/Llama")
    (server.folder / "config.json").unlink()
    hub.download_snapshot.cache_clear()
    shutil.rmtree(constants.HF_HUB_CACHE)
    with pytest.raises(ConfigError, match="Some/Llama: has no config.json at "):
        Contents("Some/Llama")
