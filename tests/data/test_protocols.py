"""Data at s3://, gs://, hf:// and http://, by each one's own driver, from stores on loopback."""

import functools
import http.server
import json
import secrets
import threading
import time

import fsspec
import huggingface_hub.constants
import pytest
from json_lines import lines_of_texts
from object_store import environment, hub, served
from source_files import opened, source_of, texts_of
from tokenizer_files import learn_byte_level

from maxstack.config import storage
from maxstack.data.engines import Processes
from maxstack.data.prepare import prepare
from maxstack.errors import StoreError
from maxstack.schema.data import DataConfig

pytestmark = pytest.mark.slow  # the servers and drivers come with the extra test-all
TEXTS = [f"document {i} of a store, " * (i % 7 + 1) for i in range(60)]


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """An empty cache, and drivers that know nothing yet."""
    monkeypatch.setenv("MAXSTACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MAXSTACK_RETRY_SECONDS", "20")
    yield
    for scheme in ("s3", "gs", "hf", "http"):
        fsspec.get_filesystem_class(scheme).clear_instance_cache()


@pytest.fixture
def bucket(request, monkeypatch):
    """The proxy of a store and the URL of its empty bucket."""
    with served(request.param) as store:
        for variable, value in environment(store).items():
            monkeypatch.setenv(variable, value)
        name = f"bucket-{secrets.token_hex(4)}"  # moto's servers of one process share their data
        fsspec.filesystem(request.param, use_listings_cache=False).mkdir(name)
        yield store, f"{request.param}://{name}"


def write(path, content):
    with storage.replacing(path) as file:
        file.write_bytes(content)


def lines(texts):
    return lines_of_texts(texts).encode()


def read(url):
    return texts_of(opened("jsonl", url))


@pytest.mark.parametrize("bucket", ["s3", "gs"], indirect=True)
def test_shards_made_of_and_at_a_store_that_fails_are_those_of_a_folder(bucket, tmp_path):
    store, url = bucket
    model = learn_byte_level(TEXTS, 300)

    def prepared(folder, out):
        for part in range(3):
            write(f"{folder}/in/{part}.jsonl", lines(TEXTS[part::3]))
        write(f"{folder}/tokenizer.json", model.to_str().encode())
        cfg = {
            "sources": [source_of("jsonl", f"{folder}/in/*.jsonl")],
            "tokenizer": {"kind": "huggingface", "path": f"{folder}/tokenizer.json"},
            "seq_len": 8,
        }
        prepare(DataConfig.model_validate(cfg), out, Processes(2), shard_size=25)
        manifest = json.loads(storage.read(f"{out}/manifest.json"))
        return manifest, [storage.read(f"{out}/{name}") for name in sorted(manifest["shards"])]

    asked = []

    def fault(method, path):
        asked.append(path)
        if len(asked) % 9 == 5:
            return lambda: time.sleep(0.2)
        if method != "GET" or len(asked) > 30:  # gcsfs tries a few times itself, and waits
            return None
        return {3: 503, 7: 0.5}.get(len(asked) % 9)

    expected, shards = prepared(str(tmp_path), str(tmp_path / "out"))
    store.fault = fault
    manifest, stored = prepared(url, f"{url}/out")
    assert stored == shards and len(shards) == 3 and len(asked) > 40
    assert manifest["totals"] == expected["totals"] and manifest["shards"] == expected["shards"]
    ((_, files),) = manifest["files"].items()
    names = [f"{url}/in/{part}.jsonl" for part in range(3)]
    assert files == [[name, *storage.stamp(name)] for name in names]
    assert all(version for _, _, version in files)
    found = opened("array_record", f"{url}/out/*.array_record", content="tokens")
    assert len(found) == len(TEXTS)


@pytest.mark.parametrize("bucket", ["s3", "gs"], indirect=True)
def test_a_file_is_read_some_ranges_ahead_and_no_more(bucket, monkeypatch):
    store, url = bucket
    content = lines(TEXTS * 40)
    write(f"{url}/a.jsonl", content)
    monkeypatch.setattr(storage, "RANGE", len(content) // 9)
    now, most, lock = [0], [0], threading.Lock()

    def fault(method, path):
        def wait():
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(0.1)
            with lock:
                now[0] -= 1

        return wait if method == "GET" and "a.jsonl" in path else None

    store.fault = fault
    assert read(f"{url}/a.jsonl") == TEXTS * 40
    assert 1 < most[0] <= storage.AHEAD + 1


@pytest.fixture
def dataset(monkeypatch):
    """The files of a dataset of a hub."""
    files = {"a.jsonl": lines(TEXTS[:30]), "more/b.jsonl": lines(TEXTS[30:])}
    with hub(files) as url:
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield files


def test_a_dataset_of_a_hub_is_read_and_pinned(dataset):
    documents = opened("jsonl", "hf://datasets/Some/Data/**/*.jsonl")
    assert texts_of(documents) == TEXTS
    before = [file.version for file in documents.files]
    dataset["a.jsonl"] = lines(TEXTS[29::-1])
    again = opened("jsonl", "hf://datasets/Some/Data/**/*.jsonl")
    assert texts_of(again) == TEXTS[29::-1] + TEXTS[30:]
    after = [file.version for file in again.files]
    assert before[0] != after[0] and before[1:] == after[1:]


def test_a_file_of_a_hub_that_changed_after_it_was_listed_is_refused(dataset):
    documents = opened("text", "hf://datasets/Some/Data/*.jsonl")
    dataset["a.jsonl"] = lines(TEXTS[29::-1])
    with pytest.raises(StoreError, match=r"^hf://datasets/Some/Data/a.jsonl: changed after it was"):
        documents[0]


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_files_of_a_web_server_are_read_by_ranges(bucket, monkeypatch):
    store, url = bucket
    write(f"{url}/a.jsonl", lines(TEXTS))
    fsspec.filesystem("s3").chmod(f"{url}/a.jsonl", "public-read")
    monkeypatch.setattr(storage, "RANGE", 1000)
    path = f"/{url.partition('://')[2]}/a.jsonl"
    assert read(store.url + path) == TEXTS
    assert store.requests.count(f"GET {path}") > 3


def test_files_of_a_web_server_that_gives_no_ranges_are_read_whole(tmp_path, monkeypatch):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.jsonl").write_bytes(lines(TEXTS))
    monkeypatch.setattr(storage, "RANGE", 1000)
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "served")
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert read(f"{url}/a.jsonl") == TEXTS
        assert read(f"{url}/*.jsonl") == TEXTS
        server.shutdown()
