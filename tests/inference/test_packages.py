"""`maxstack serve` of packages as a real process, asked by Triton's client and by plain HTTP."""

import json
import re
import signal
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import documents
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from packaged import KERNEL, TYPES, make, serving, values
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from maxstack import cli
from maxstack.inference.packages import tensors
from maxstack.inference.server.refusal import Refusal

SIZES, QUEUE = "1,2,4,8", 6
X = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)
"""As many rows as a batch has at most, so that it waits for no others."""
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("packages") / "toy")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    digits = make(tmp_path_factory.mktemp("digits") / "1", name="digits")
    flags = ["--batch-sizes", SIZES, "--queue", str(QUEUE), "--batch-timeout", "300000"]
    with serving(log, folder, digits, *flags) as server:
        yield server
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def client(server):
    return triton.InferenceServerClient(server.address)


def ask(client, model, arrays, binary, outputs=None, **options):
    """The answer to Triton's client."""
    inputs = []
    for name, array in arrays.items():
        datatype = np_to_triton_dtype(array.dtype)
        inputs.append(triton.InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    return client.infer(model, inputs, outputs=outputs, **options)


def at_once(function, arguments):
    """Results of calls that begin together."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        return [*pool.map(function, arguments)]


def test_the_server_and_its_models_are_ready(client, server):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("toy") and client.is_model_ready("toy.mean", "1")
    assert not client.is_model_ready("other") and not client.is_model_ready("toy", "2")
    assert client.get_server_metadata()["extensions"][0] == "binary_tensor_data"
    names = ["toy", "toy.classify", "toy.mean", "toy.same", "toy.root"]
    assert server.http.get("/v2/models").json()["models"][:5] == names
    assert re.search(r"toy version 1: \d+ programs .* in \d", server.output.read_text())


def test_metadata_name_tensors_and_what_is_not_served(client):
    found = client.get_model_metadata("toy.mean")
    assert (found["versions"], found["platform"]) == (["1"], "maxstack_package")
    assert found["inputs"] == [
        {"name": "tokens", "datatype": "INT32", "shape": [-1, -1]},
        {"name": "lengths", "datatype": "INT32", "shape": [-1]},
    ]
    assert [each["name"] for each in found["outputs"]] == ["used", "mean"]
    assert found["parameters"]["not_served"].startswith("toy.count has a state")
    largest = [client.get_model_config(f"toy.{n}")["max_batch_size"] for n in ("mean", "same")]
    assert largest == [4, 0]
    assert client.get_model_config("toy")["input"][0]["dims"] == [16]


@pytest.mark.parametrize("binary", [False, True])
def test_a_signature_answers_by_its_name_and_the_first_by_the_packages(client, binary):
    for model in ("toy", "toy.classify"):
        found = ask(client, model, {"x": X}, binary, request_id="a")
        np.testing.assert_allclose(found.as_numpy("logits"), X @ KERNEL, rtol=1e-5)
        answer = found.get_response()
        assert (answer["model_name"], answer["model_version"], answer["id"]) == (model, "1", "a")


@pytest.mark.parametrize("binary", [False, True])
def test_tensors_of_each_type_come_back_as_they_were(client, binary):
    arrays = {name: np.arange(6).reshape(2, 3).astype(_dtype(name)) for name in TYPES}
    outputs = [
        triton.InferRequestedOutput(name, binary_data=binary or name == "bfloat16")
        for name in TYPES
    ]
    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, [2, 3], np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array, binary_data=binary or name == "bfloat16")
    found = client.infer("toy.same", inputs, outputs=outputs)
    for name in TYPES:
        np.testing.assert_array_equal(found.as_numpy(name), arrays[name])


def _dtype(name):
    return ml_dtypes.bfloat16 if name == "bfloat16" else name


def test_only_the_outputs_that_are_asked_for_come_each_as_it_is_asked_for(client):
    arrays = {"tokens": np.ones((4, 5), np.int32), "lengths": np.full(4, 5, np.int32)}
    outputs = [triton.InferRequestedOutput("mean", binary_data=False)]
    found = ask(client, "toy.mean", arrays, True, outputs).get_response()
    assert found["outputs"] == [
        {"name": "mean", "datatype": "FP32", "shape": [4], "data": [1.0, 1.0, 1.0, 1.0]}
    ]


def test_a_request_may_have_what_kserves_client_adds(server):
    tensor = {"name": "x", "datatype": "FP32", "shape": [8, 16], "data": X.tolist()}
    body = {"id": "a", "model_name": "toy", "parameters": None, "inputs": [tensor]}
    answer = server.http.post("/v2/models/toy/infer", json=body)
    np.testing.assert_allclose(values(answer, "logits"), X @ KERNEL, rtol=1e-5)


def test_requests_that_come_together_share_a_batch(server):
    names = ("requests_total", "batches_total", "rows_total", "padded_rows_total")
    before = [server.figure(name, "toy.classify") for name in names]
    answers = at_once(lambda i: server.infer("toy", x=X[i : i + 1]), range(5))
    for i, answer in enumerate(answers):
        np.testing.assert_allclose(values(answer, "logits"), X[i : i + 1] @ KERNEL, rtol=1e-5)
        told = answer.json()["parameters"]
        assert (told["batch_size"], told["padded_to"]) == (5, 8) and told["queue_us"] > 0
    after = [server.figure(name, "toy.classify") for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [5, 1, 5, 3]


def test_requests_of_other_lengths_share_the_batch_of_their_program(server):
    def mean(length):
        tokens = np.arange(1, length + 1, dtype=np.int32)[None]
        return server.infer("toy.mean", tokens=tokens, lengths=np.array([length], np.int32))

    lengths = (3, 7, 20)
    answers = at_once(mean, lengths)
    for length, answer in zip(lengths, answers, strict=True):
        assert values(answer, "used").tolist() == [[*range(1, length + 1)]]
        assert values(answer, "mean").tolist() == [(length + 1) / 2]
    told = [answer.json()["parameters"] for answer in answers]
    sizes = [(each["batch_size"], each["padded_to"]) for each in told]
    assert sizes == [(2, 4), (2, 4), (1, 4)]


def test_a_full_queue_refuses_at_once(server):
    began = time.monotonic()

    def timed(i):
        answer = server.infer("toy", x=X[:1])
        return answer, time.monotonic() - began

    answers = at_once(timed, range(QUEUE + 1))
    (refused,) = [(answer, took) for answer, took in answers if answer.status_code != 200]
    assert refused[0].status_code == 503 and refused[0].headers["Retry-After"] == "1"
    assert f"{QUEUE} requests wait" in refused[0].json()["error"]
    assert refused[1] < min(took for answer, took in answers if answer.status_code == 200)
    assert server.figure("queue", "toy.classify") == 0


def tensor(**fields):
    return {"inputs": [TENSOR | fields]}


def texts(tokens, length):
    """A request of one text."""
    text = {"name": "tokens", "datatype": "INT32", "shape": [1, len(tokens)], "data": tokens}
    return {"inputs": [text, text | {"name": "lengths", "shape": [1], "data": [length]}]}


@pytest.mark.parametrize(
    ("model", "body", "status", "words"),
    [
        ("other", tensor(), 404, "no model 'other' is served here; there are toy, toy.classify"),
        ("toy/versions/7", tensor(), 404, "version '7' is not served; 1 is"),
        ("toy.count", tensor(), 400, "toy.count has a state"),
        ("toy", [], 400, "the body: is no JSON object"),
        ("toy", {}, 400, "inputs: must be a list of objects"),
        ("toy", {"inputs": []}, 400, "inputs: x is missing"),
        ("toy", {"inputs": [TENSOR, TENSOR]}, 400, "inputs: x is there twice"),
        ("toy", tensor(name="y"), 400, "inputs: 'y' is none of x"),
        ("toy", tensor(datatype="FP64"), 400, "x: datatype is 'FP64'; it must be FP32"),
        ("toy", tensor(shape=[1, -16]), 400, "x: shape must be a list of sizes"),
        ("toy", tensor(shape=[1] * 33), 400, "x: shape must be a list of sizes"),
        ("toy", tensor(shape=[0, 2**39, 2**39], data=[]), 400, "x: shape must be a list of sizes"),
        ("toy", tensor(shape=[2, 16]), 400, "x: data has the shape [16], not [2, 16]"),
        ("toy", tensor(shape=[16]), 400, "x is [16]; it must be ['batch', 16]"),
        ("toy", tensor(shape=[0, 16], data=[]), 400, "no program takes these sizes"),
        ("toy", tensor(shape=[9, 16], data=[0] * 144), 400, "9 rows; a batch has 8 at most"),
        ("toy", tensor(data=["a"] * 16), 400, "x: data must be numbers that FP32 can hold"),
        ("toy", tensor(data=[1e39] * 16), 400, "x: data must be numbers that FP32 can hold"),
        ("toy", tensor(data=[[1], [1, 2]]), 400, "x: data must be numbers, in lists"),
        ("toy", tensor(data=None), 400, "x: data must be a list"),
        ("toy", tensor(parameters={"binary_data_size": 64}), 400, "has data and binary_data_size"),
        ("toy", tensor(parameters={"shared_memory_region": "a"}), 400, "does not know"),
        ("toy", tensor() | {"parameters": {"sequence_id": 3}}, 400, "know 'sequence_id'"),
        ("toy", tensor() | {"outputs": [{"name": "y"}]}, 400, "outputs: 'y' is none of logits"),
        ("toy", tensor() | {"model_name": "a"}, 400, "model_name: 'a' is asked as toy"),
        ("toy", tensor() | {"id": 7}, 400, "id: must be a text"),
        ("toy.root", tensor(shape=[8], data=[-1] * 8), 400, "root: holds NaN or infinities"),
        ("toy.mean", {"inputs": [{"name": "tokens", "datatype": "INT32", "shape": [1, 2],
                                  "data": [1.5, 2]}]}, 400, "integers that INT32 can hold"),
        ("toy.mean", texts([5, 100], 2), 400, "tokens holds 100; it must be from 0 to 99"),
        ("toy.mean", texts([5, -1], 2), 400, "tokens holds -1; it must be from 0 to 99"),
        ("toy.mean", texts([5, 6], 99), 400, "lengths holds 99; it must be from 1 to 2"),
        ("toy.mean", texts([5, 6], -3), 400, "lengths holds -3; it must be from 1 to 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(server, model, body, status, words):
    answer = server.http.post(f"/v2/models/{model}/infer", json=body)
    assert answer.status_code == status and answer.json().keys() == {"error"}
    assert words in answer.json()["error"]


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b'{"inputs": ', {}, 400),
        (b'{"inputs": "\xff"}', {}, 400),
        (b"[" * 100_000, {}, 400),
        (b'{"inputs": NaN}', {}, 400),
        (b"{}", {"Inference-Header-Content-Length": "3"}, 400),
        (b"{}", {"Inference-Header-Content-Length": "-1"}, 400),
        (b"{}", {"Inference-Header-Content-Length": "0" * 5000 + "2"}, 400),
        (json.dumps(tensor()).encode() + b"more", {"Inference-Header-Content-Length": "96"}, 400),
        (b'{"inputs": "' + b"x" * (9 << 20) + b'"}', {}, 413),
        (b"x" * (65 << 20), {}, 413),
        (b"{}", {"Content-Encoding": "gzip"}, 415),
        (b"{}", {"Origin": "http://pages.example"}, 403),
        (b"{}", {"Host": "pages.example:80"}, 403),
    ],
    ids=range(13),
)
def test_a_body_that_is_no_request_is_refused(server, content, headers, status):
    answer = server.http.post("/v2/models/toy/infer", content=content, headers=headers)
    assert answer.status_code == status and answer.json().keys() == {"error"}


@pytest.mark.parametrize("nest", [lambda values: values, lambda values: [values]])
def test_texts_of_json_make_no_array_as_wide_as_their_longest(nest):
    values = nest(["a" * 10_000, *[""] * 1_000])
    tracemalloc.start()
    with pytest.raises(Refusal, match="x: data must be numbers"):
        tensors.from_values("x", "FP32", [1001], values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_binary_data_of_another_size_is_refused(client):
    x = triton.InferInput("x", [8, 16], "FP32")
    x._raw_data, x._parameters = X.tobytes()[:-4], {"binary_data_size": X.nbytes - 4}
    with pytest.raises(InferenceServerException, match="FP32 of the shape .* needs 512"):
        client.infer("toy", [x])
    x._raw_data, x._parameters = X.tobytes() + b"more", {"binary_data_size": X.nbytes}
    with pytest.raises(InferenceServerException, match="4 bytes follow"):
        client.infer("toy", [x])


def test_paths_and_methods_that_are_not_there_are_refused(server):
    assert "Not Found" in server.http.get("/v2/nothing").json()["error"]
    assert server.http.get("/v2/models/toy/infer").status_code == 405
    assert server.http.get("/v1/models").status_code == 404


def test_failures_and_latencies_are_counted(server):
    names = "failures_total", "latency_seconds_count"
    before = [server.figure(name, "toy.classify") for name in names]
    assert server.http.post("/v2/models/toy/infer", json={}).status_code == 400
    assert values(server.infer("toy", x=X), "logits").shape == (8, 4)
    after = [server.figure(name, "toy.classify") for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 2]


def test_the_pages_commands_and_program_get_answers(server):
    page = documents.ROOT / "docs" / "SERVING.md"
    program = next(block for block in documents.blocks(page, "python") if "triton" in block)
    found = {}
    exec(program.replace("127.0.0.1:8000", server.address), found)
    np.testing.assert_allclose(found["logits"], np.ones((2, 16)) @ KERNEL, rtol=1e-5)
    commands = [each.words for each in documents.commands() if each.words[0] == "curl"]
    for _, address, *body in commands:
        path = address.removeprefix("http://127.0.0.1:8000")
        content = {"content": body[1]} if body else {}
        answer = server.http.request("POST" if body else "GET", path, **content)
        assert answer.status_code == 200 and "logits" in answer.text
    assert len(commands) == 2


@pytest.mark.slow
def test_keys_and_the_end_by_a_signal(folder, tmp_path):
    (tmp_path / "keys").write_text("first\n")
    flags = ["--api-key-file", tmp_path / "keys", "--batch-timeout", "1000000"]
    with serving(tmp_path / "log", folder, *flags, key="first") as server:
        for header in ("", "first", "Bearer firs"):
            headers = {"Authorization": header}
            for path in ("/v2", "/v2/models/toy", "/v2/models/toy/ready"):
                assert server.http.get(path, headers=headers).status_code == 401
            for path in ("models/toy/infer", "repository/index", "repository/models/toy/unload"):
                assert server.http.post(f"/v2/{path}", headers=headers).status_code == 401
        assert server.http.get("/v2/health/ready", headers={"Authorization": ""}).is_success
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.infer, "toy", x=X[:1])
            while not server.figure("queue", "toy.classify"):
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 5
            while server.http.get("/v2/health/ready").status_code == 200:
                assert time.monotonic() < deadline
            refused = server.infer("toy", x=X)
            assert refused.status_code == 503 and "shutting down" in refused.json()["error"]
            assert values(waiting.result(), "logits").shape == (1, 4)
        assert server.process.wait(30) == 0 and "Traceback" not in server.output.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["PACKAGE", "no-such-folder"], "no-such-folder: is not a package, but other folders are"),
        (["PACKAGE", "serve.queue=3"], "serve.queue=3: a package has no config values"),
        (["PACKAGE", "--tool-parser", "none"], "--tool-parser: applies to a run"),
        (["one", "two"], "one two: give one model, or any number of packages"),
        (["one", "--poll", "0"], "--poll: applies to packages"),
        (["a=b"], "a=b: is an override, not a folder"),
        (["EMPTY"], "2: is missing"),
        (["PACKAGE", "PACKAGE"], "another package is named toy too"),
    ],
)
def test_wrong_words_are_refused(folder, tmp_path, capsys, words, said):
    broken = tmp_path / "empty" / "2"
    broken.mkdir(parents=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    (broken / "manifest.json").write_text(json.dumps(manifest))
    places = {"PACKAGE": str(folder), "EMPTY": str(tmp_path / "empty")}
    assert cli.main(["serve", "--port", "0", *[places.get(word, word) for word in words]]) == 1
    assert said in capsys.readouterr().err.replace(f"{broken}/programs/classify", "2")
