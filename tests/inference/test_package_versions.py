"""Versions of packages behind a server that clients ask without a pause."""

import asyncio
import gc
import json
import shutil
import threading
import weakref

import jax
import numpy as np
import pytest
import tritonclient.http as triton
from packaged import KERNEL, make, serving, values
from processes import until
from tritonclient.utils import InferenceServerException

from maxstack.inference.packages.batching import Settings
from maxstack.inference.packages.repository import Repository

X = np.random.default_rng(1).standard_normal((2, 16)).astype(np.float32)
CLIENTS = 8


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Packages of which the n-th has n for its scale, by number."""
    folder = tmp_path_factory.mktemp("versions")
    return {n: make(folder / str(n), n) for n in (1, 2, 3)}


@pytest.fixture
def folder(versions, tmp_path):
    """A folder with the first."""
    shutil.copytree(versions[1], tmp_path / "toy" / "1")
    return tmp_path / "toy"


@pytest.fixture
def server(folder, tmp_path):
    flags = ["--poll", "0.2", "--batch-timeout", "500", "--batch-sizes", "2,16"]
    with serving(tmp_path / "log", folder, *flags) as server:
        yield server
        assert "Traceback" not in server.output.read_text()


@pytest.fixture
def client(server):
    return triton.InferenceServerClient(server.address)


def publish(package, folder, number):
    """Put a package into a folder of versions, in one step."""
    shutil.copytree(package, folder / f"{number}.unfinished")
    (folder / f"{number}.unfinished").rename(folder / str(number))


def damage(package, to, how):
    """A copy of a package, whose manifest or weights are changed by `how`."""
    shutil.copytree(package, to)
    how(to)
    return to


def scale(server):
    """Which of the packages answers."""
    return round(float((values(server.infer("toy", x=X), "logits") / (X @ KERNEL)).mean()))


def flip(folder):
    data = bytearray((folder / "weights" / "1.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "weights" / "1.safetensors").write_bytes(data)


def cut(folder):
    with (folder / "weights" / "1.safetensors").open("r+b") as file:
        file.truncate(100)


def change(**fields):
    def how(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | fields))

    return how


def write(text):
    return lambda folder: (folder / "manifest.json").write_text(text)


BROKEN = {
    "damaged": (flip, "is damaged: its sha256 is not that of manifest.json"),
    "truncated": (cut, "is 100 bytes; manifest.json says"),
    "another platform": (change(platforms=["tpu"]), "made for 1 of tpu; there are 1 of cpu"),
    "more devices": (change(devices=2), "made for 2 of cpu"),
    "another name": (change(name="other"), "is named other; other versions toy"),
    "a name of a path": (change(name="a/b"), "names of packages and signatures"),
    "no JSON": (write('{"format": "maxstack.package/1"'), "manifest.json: cannot be read"),
    "no signatures": (change(signatures={}), "has no signature that can be served"),
    "nothing": (write('{"format": "maxstack.package/1"}'), "has {"),
}


@pytest.mark.slow
def test_a_newer_version_answers_without_a_lost_request(server, folder, versions):
    """Each client sees one change, and the old version is let go."""
    ended, seen, problems = threading.Event(), [[] for _ in range(CLIENTS)], []

    def ask(i):
        own = np.random.default_rng(i).standard_normal((1 + i % 2, 16)).astype(np.float32)
        while not ended.is_set():
            answer = server.infer("toy", x=own)
            if answer.status_code != 200:
                problems.append(answer.text)
                return
            version = int(answer.json()["model_version"])
            expected = own @ KERNEL * version
            if not np.allclose(values(answer, "logits"), expected, rtol=1e-4, atol=1e-5):
                problems.append(f"version {version}: another result")
            seen[i].append(version)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        publish(versions[2], folder, 2)
        until(lambda: problems or all(2 in each for each in seen), 60)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert all(each == sorted(each) and {*each} <= {1, 2} for each in seen)
    asked = sum(server.figure("requests_total", "toy.classify", n) for n in (1, 2))
    assert asked == sum(map(len, seen)) and 1 in seen[0]
    log = server.output.read_text()
    assert "toy: version 2 instead of 1" in log and "compiled in" in log
    assert server.infer("toy", version="1", x=X).status_code == 404
    until(lambda: 'queue{model="toy.classify",version="1"}' not in server.http.get("/metrics").text)


@pytest.mark.slow
def test_broken_versions_are_refused_by_name_and_the_old_one_answers(
    server, client, folder, versions, tmp_path
):
    for number, (how, _) in enumerate(BROKEN.values(), 2):
        publish(damage(versions[2], tmp_path / f"{number}", how), folder, number)
    until(lambda: len(server.index()) == len(BROKEN) + 5, 30)
    found, log = server.index(), server.output.read_text()
    for number, (name, (_, words)) in enumerate(BROKEN.items(), 2):
        state, reason = found["toy", str(number)]
        assert state == "UNAVAILABLE" and words in reason, name
        assert log.count(f"toy version {number} is refused: ") == 1 and words in log
    with pytest.raises(InferenceServerException, match="version 10: .*; version 1 answers"):
        client.load_model("toy")
    ready = client.get_model_repository_index()
    assert {"name": "toy", "version": "1", "state": "READY", "reason": ""} in ready
    assert scale(server) == 1
    shutil.rmtree(folder / "3")
    shutil.copytree(versions[3], folder / "3")  # one that is mended is served
    until(lambda: scale(server) == 3, 30)
    shutil.rmtree(folder / "3")  # and when it is gone, the next one is
    until(lambda: scale(server) == 1, 30)


@pytest.mark.slow
def test_a_copy_that_is_under_way_is_no_version_until_it_is_whole(server, folder, versions):
    target = folder / "2"
    (target / "programs").mkdir(parents=True)
    (folder / "old").mkdir()
    for number in ("02", "-1", "two"):
        shutil.copytree(versions[3], folder / number)
    assert scale(server) == 1
    shutil.copy(versions[2] / "manifest.json", target)
    until(lambda: ("toy", "2") in server.index(), 30)
    assert "is missing" in server.index()["toy", "2"][1] and scale(server) == 1
    shutil.copytree(versions[2], target, dirs_exist_ok=True)
    until(lambda: scale(server) == 2, 30)


@pytest.mark.slow
def test_a_client_loads_and_unloads(versions, folder, tmp_path):
    """Without --poll nothing changes by itself."""
    other = make(tmp_path / "other", 5, "other")
    with serving(tmp_path / "log", folder, other, "--poll", "0", "--batch-sizes", "2") as server:
        client = triton.InferenceServerClient(server.address)
        client.load_model("toy")  # nothing newer is there
        publish(versions[2], folder, 2)
        assert scale(server) == 1
        client.load_model("toy.classify")
        assert scale(server) == 2
        client.unload_model("toy")
        assert not client.is_model_ready("toy") and client.is_model_ready("other")
        refused = server.infer("toy", x=X)
        assert refused.status_code == 503
        assert "POST /v2/repository/models/toy/load" in refused.json()["error"]
        assert server.index()["toy", ""] == ("UNAVAILABLE", "unloaded")
        client.load_model("toy")
        assert scale(server) == 2 and values(server.infer("other", x=X), "logits").shape == (2, 4)
        with pytest.raises(InferenceServerException, match="no model 'nothing' is served here"):
            client.load_model("nothing")
        with pytest.raises(InferenceServerException, match="parameters: this server takes none"):
            client.load_model("toy", config="{}")
        for path in ("index", "models/toy/load"):
            wrong = server.http.post(f"/v2/repository/{path}", content=b"[")
            assert wrong.status_code == 400 and "not JSON" in wrong.json()["error"]
        assert "Traceback" not in server.output.read_text()


@pytest.mark.slow
def test_a_version_that_was_replaced_leaves_no_weights(versions, folder):
    def kernels():
        return sum(array.shape == KERNEL.shape for array in jax.live_arrays())

    async def replace():
        gc.collect()
        before, repository = kernels(), Repository([folder], Settings((1,)), 0)
        repository.start()
        first = weakref.ref(repository.models[0].current)
        publish(versions[2], folder, 2)
        await repository.load("toy")
        while first() is not None:
            await asyncio.sleep(0.01)
        one = kernels() - before
        await repository.unload("toy")
        await repository.stop()
        return one, kernels() - before

    assert asyncio.run(asyncio.wait_for(replace(), 60)) == (1, 0)
