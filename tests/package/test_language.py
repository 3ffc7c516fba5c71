"""OpenAI's API on packages' programs, beside the Open Inference Protocol, in one process."""

import numpy as np
import packaged
import parity
import pytest
from golden_packages import write

GOLDEN = np.load(parity.GOLDENS / "llama/greedy.npz")
PROMPT = GOLDEN["prompts"][0][: GOLDEN["lengths"][0]].tolist()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A language model and a package of another kind."""
    folder = tmp_path_factory.mktemp("language")
    with pytest.MonkeyPatch.context() as patch:
        model = write(folder, "llama", patch)
    toy = packaged.make(folder / "toy")
    words = [model, toy, "--batch-sizes", "4"]
    with packaged.serving(folder / "log", *words) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1", "/models/llama/v1"])
@pytest.mark.slow
def test_the_answer_is_that_of_transformers(server, path):
    count = GOLDEN["tokens"].shape[1]
    body = {"prompt": PROMPT, "max_tokens": count, "temperature": 0, "return_token_ids": True}
    answer = server.http.post(f"{path}/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == GOLDEN["tokens"][0].tolist()
    assert server.http.get(f"{path}/models").json()["data"][0]["id"] == "llama"


def test_the_same_process_answers_for_both_packages_by_the_inference_protocol(server):
    tokens, lengths = np.array([PROMPT], np.int32), np.array([len(PROMPT)], np.int32)
    logits = packaged.values(server.infer("llama", tokens=tokens, lengths=lengths), "logits")
    assert logits[0, -1].argmax() == GOLDEN["tokens"][0, 0]
    x = np.ones((1, 16), np.float32)
    made = packaged.values(server.infer("toy", x=x), "logits")
    np.testing.assert_allclose(made, x @ packaged.KERNEL, rtol=1e-5)
    assert server.http.get("/health").json() == {"ready": True}


@pytest.mark.slow
def test_unknown_paths_are_refused_as_the_protocol_has_errors(server):
    answer = server.http.get("/v2/nothing")
    assert answer.status_code == 404 and "GET" in answer.json()["error"]
