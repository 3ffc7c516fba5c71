"""Counts, ids and offsets of the server's answers, whole and streamed, against the tokenizers
library, which reads the folder's tokenizer.json by itself."""

import itertools

import pytest
import tokenizers
from served import HELLO, make, serving

pytestmark = pytest.mark.slow
PROMPT = "Héllo 日本, 1 + 1?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("served") / "model", 1024)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with serving(folder, tmp_path_factory.mktemp("log") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(folder):
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def posted(server, path, **body):
    answer = server.http.post(path, json={"model": "tiny"} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


ASKED = {"max_tokens": 20, "seed": 5, "n": 2, "logprobs": 3, "return_token_ids": True}


@pytest.mark.parametrize("echo", [False, True])
def test_a_completions_ids_counts_and_offsets(server, tokenizer, echo):
    whole = posted(server, "/v1/completions", prompt=PROMPT, echo=echo, **ASKED)
    prompt, generated = tokenizer.encode(PROMPT).ids, 0
    for choice in whole["choices"]:
        ids, said = choice["token_ids"], choice["logprobs"]
        assert choice["prompt_token_ids"] == prompt
        shown = [*prompt, *ids] if echo else ids
        text = tokenizer.decode(shown, skip_special_tokens=True)
        assert choice["text"].rstrip("\ufffd") == text.rstrip("\ufffd")
        sizes = {len(said[name]) for name in said}
        assert sizes == {len(shown)}
        for count, offset in enumerate(said["text_offset"]):
            # The text before the token, without a character that is not whole yet, which bytes
            # of a random model may never be.
            before = tokenizer.decode(shown[:count], skip_special_tokens=True)
            assert len(before.rstrip("\ufffd")) <= offset <= len(before)
            exact = echo and count <= len(prompt)
            assert not exact or offset == len(before.rstrip("\ufffd"))
        likely = [*zip(said["token_logprobs"], said["top_logprobs"], strict=True)]
        if echo:
            assert likely.pop(0) == (None, None)
        for chosen, top in likely:
            assert chosen <= max(top.values()) + 1e-6 and len(top) in (3, 4)
        generated += len(ids)
    usage = whole["usage"]
    assert usage["prompt_tokens"] == len(prompt) and usage["completion_tokens"] == generated
    assert usage["total_tokens"] == len(prompt) + generated


def test_a_stream_has_the_ids_offsets_and_counts_of_the_whole(server):
    asked = ASKED | {"prompt": PROMPT}
    whole = posted(server, "/v1/completions", **asked)
    more = {"return_token_ids": True}
    del asked["return_token_ids"]
    stream = server.openai.completions.create(
        model="tiny", stream=True, stream_options={"include_usage": True}, extra_body=more, **asked
    )
    chunks = [*stream]
    for index, choice in enumerate(whole["choices"]):
        parts = [part for chunk in chunks for part in chunk.choices if part.index == index]
        assert "".join(part.text for part in parts) == choice["text"]
        assert parts[-1].finish_reason == choice["finish_reason"]
        ids = [part.token_ids or () for part in parts]
        assert [*itertools.chain(*ids)] == choice["token_ids"]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            found = [getattr(part.logprobs, name) for part in parts if part.logprobs]
            assert [*itertools.chain(*found)] == choice["logprobs"][name], name
    usage = chunks[-1].usage.model_dump(exclude_none=True)
    assert usage.items() >= {key: whole["usage"][key] for key in usage if key in whole}.items()
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_a_conversations_bytes_are_its_text_and_its_tokens_are_counted(server, tokenizer):
    asked = {"max_tokens": 16, "seed": 4, "logprobs": True, "top_logprobs": 2}
    answer = posted(server, "/v1/chat/completions", messages=HELLO, return_token_ids=True, **asked)
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    marks = {"<|im_start|>", "<|im_end|>"}
    text = b"".join(bytes(each["bytes"] or ()) for each in content if each["token"] not in marks)
    assert text.decode(errors="replace").rstrip("\ufffd") == (
        choice["message"]["content"].rstrip("\ufffd")
    )
    rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert answer["prompt_token_ids"] == tokenizer.encode(rendered).ids
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode(rendered).ids)
    for each in content:
        assert len(each["top_logprobs"]) == 2
        assert each["logprob"] <= each["top_logprobs"][0]["logprob"] + 1e-6


def test_tokens_are_counted_as_the_library_counts_them(server, tokenizer):
    ids = tokenizer.encode(PROMPT).ids
    found = posted(server, "/tokenize", prompt=PROMPT, return_token_strs=True)
    assert (found["tokens"], found["count"]) == (ids, len(ids))
    assert found["token_strs"] == [tokenizer.id_to_token(i) for i in ids]
    assert found["max_model_len"] == 1024
    assert posted(server, "/detokenize", tokens=ids)["prompt"] == PROMPT
    scored = posted(server, "/v1/completions", prompt=PROMPT, prompt_logprobs=1, max_tokens=1)
    per_token = scored["choices"][0]["prompt_logprobs"]
    assert len(per_token) == len(ids) and per_token[0] is None
    assert all(str(i) in each for i, each in zip(ids[1:], per_token[1:], strict=True))
    vector = posted(server, "/v1/embeddings", input=[PROMPT, "a"])
    assert vector["usage"] == {"prompt_tokens": len(ids) + 1, "total_tokens": len(ids) + 1}
