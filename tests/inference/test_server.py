"""`maxstack serve` as real processes, asked by the unchanged openai client and by plain HTTP."""

import json
import re
import signal
import time

import openai
import parity
import pytest
from served import HELLO, make, serving

from maxstack import cli

LENGTH = 4096
SPACES = {token: -100 for token in (220, 197, 198, 201)}
"""Blanks of the folder's tokenizer, which a model of random weights likes in JSON."""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("served") / "model", LENGTH)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    adapter = parity.GOLDENS / "adapters" / "lora-llama"
    with serving(folder, log, "serve.max_requests=8", f"serve.adapters.tuned={adapter}") as server:
        yield server
        assert "Traceback" not in log.read_text()


def test_the_model_is_listed_and_found_by_its_name(server):
    assert [model.id for model in server.openai.models.list()] == ["tiny", "tuned"]
    assert server.openai.models.retrieve("tuned").parent == "tiny"
    assert server.openai.models.retrieve("tiny").max_model_len == LENGTH
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        server.openai.models.retrieve("other")


def test_the_page_is_sent_with_the_policy_that_it_asks_its_own_server_alone(server):
    answer = server.http.get("/")
    policy = answer.headers["Content-Security-Policy"]
    assert answer.text.startswith("<!doctype html>") and "unsafe" not in policy
    assert policy.startswith("default-src 'none'; connect-src 'self'; ")


def test_an_adapter_answers_by_its_name(server):
    models = "tiny tuned tiny".split()
    answers = [server.complete(model=model, temperature=0) for model in models]
    own, tuned, again = (answer.choices[0].text for answer in answers)
    assert tuned != own == again and answers[1].model == "tuned"


def test_usage_grows_with_a_stream(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [*server.complete(guided_regex="abc", stream=True, stream_options=options)]
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        ({"json": {"const": 7}}, "7"),
        ({"json": '{"const": 7}'}, "7"),
        ({"regex": "ab+c"}, "ab+c"),
        ({"choice": ["no", "no way"]}, "no( way)?"),
        ({"grammar": 'start: "x" "y"'}, "xy"),
    ],
)
def test_an_answer_follows_a_structure(server, structure, text):
    found = server.complete(structured_outputs=structure, max_tokens=50).choices[0].text
    assert re.fullmatch(text, found)


def test_a_seed_repeats_an_answer_and_the_seed_that_was_drawn_does_too(server):
    drawn = server.complete().choices[0]
    again = server.complete(seed=drawn.seed).choices[0]
    other = server.complete().choices[0]
    assert again.text == drawn.text != other.text


def test_several_choices_differ_and_the_first_is_the_only_answer(server):
    several = server.complete(n=3, seed=1)
    assert len({choice.text for choice in several.choices}) == 3
    assert several.choices[0].text == server.complete(seed=1).choices[0].text
    assert several.usage.prompt_tokens == 5 and several.usage.completion_tokens == 36


def test_a_prompt_is_a_text_or_tokens_or_a_list_of_either(server):
    tokens = server.http.post("/tokenize", json={"prompt": "Hello"}).json()["tokens"]
    forms = ["Hello", tokens, ["Hello"], [tokens], ["x", "Hello"], [[1, 2], tokens]]
    texts = [server.complete(form, temperature=0).choices[-1].text for form in forms]
    assert len(set(texts)) == 1


def test_tokens_become_their_text_again(server):
    for text in ("Grüße\n", "<|im_start|>x"):
        tokens = server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        back = server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert back == text
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and "assistant" in info["chat_template"]


@pytest.mark.parametrize("stream", [False, True])
def test_no_part_of_a_stop_string_is_given_out(server, stream):
    def text(**options):
        answer = server.complete(guided_regex="abcdabcef", stream=stream, **options)
        pieces = answer if stream else [answer]
        return "".join(choice.text for piece in pieces for choice in piece.choices)

    assert text() == "abcdabcef"
    assert text(stop="abce") == text(stop=["abcex", "abce"]) == "abcd"
    assert text(stop="nothing") == "abcdabcef"


def test_an_answer_tells_why_it_ended(server):
    forced = {"logit_bias": {"64": 100}, "stop_token_ids": [64]}
    by_stop_token = server.complete(**forced).choices[0]
    with_it = server.complete(**forced, include_stop_str_in_output=True).choices[0]
    assert by_stop_token.finish_reason == "stop"
    assert by_stop_token.stop_reason == with_it.stop_reason == 64
    assert (by_stop_token.text, with_it.text) == ("", "a")
    by_string = server.complete(guided_regex="abcdef", stop="d").choices[0]
    by_token = server.complete(guided_regex="ab").choices[0]
    by_length = server.complete(guided_regex="abcdef", max_tokens=2).choices[0]
    assert (by_string.finish_reason, by_string.stop_reason) == ("stop", "d")
    assert (by_token.finish_reason, by_token.text) == ("stop", "ab")
    assert (by_length.finish_reason, by_length.text) == ("length", "ab")


def test_texts_become_vectors(server):
    tokens = server.http.post("/tokenize", json={"prompt": "Hello"}).json()["tokens"]

    def embed(given, **options):
        return server.openai.embeddings.create(model="tiny", input=given, **options)

    several = embed(["Hello", "x" * 40])
    one, again = embed("Hello", encoding_format="float"), embed(tokens)
    assert [row.index for row in several.data] == [0, 1] and several.usage.total_tokens == 45
    assert several.data[0].embedding == pytest.approx(one.data[0].embedding, abs=1e-8)
    assert again.data == several.data[:1] != several.data[1:]
    assert sum(x * x for x in one.data[0].embedding) == pytest.approx(1, abs=1e-6)
    tuned = server.openai.embeddings.create(model="tuned", input=tokens)
    assert tuned.model == "tuned" and tuned.data != again.data
    with pytest.raises(openai.BadRequestError, match="dimensions=2: config.json"):
        embed("x", dimensions=2)


def test_usage_counts_tokens_of_the_prompt_that_were_cached(server):
    first, second = (server.complete("cached " * 9, max_tokens=1).usage for _ in range(2))
    details = [usage.prompt_tokens_details.cached_tokens for usage in (first, second)]
    assert details[0] == 0 and 0 < details[1] < second.prompt_tokens


def test_a_prompt_is_scored_without_an_answer(server):
    scored = server.complete("Hello", echo=True, logprobs=0, max_tokens=0)
    longer = server.complete("Hello", echo=True, logprobs=0, max_tokens=1, temperature=0)
    found, both = (answer.choices[0].logprobs.token_logprobs for answer in (scored, longer))
    assert scored.choices[0].text == "Hello" and found == both[:-1]
    assert scored.usage.completion_tokens == 0


def test_biased_tokens_are_chosen_and_barred_ones_are_not(server):
    forced = server.complete(logit_bias={"64": 100}, max_tokens=6, return_token_ids=True)
    assert forced.choices[0].token_ids == [64] * 6
    barred = server.complete(logit_bias={"64": -100}, max_tokens=50, return_token_ids=True)
    assert 64 not in barred.choices[0].token_ids


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"max_tokenz": 3}, "max_tokenz=3: this server does not know it"),
        ({"best_of": 2}, "best_of=2: Input should be 1"),
        ({"suffix": "x"}, "suffix='x'"),
        ({"logprobs": 21}, "logprobs=21: Input should be less than or equal to 20"),
        ({"n": 0}, "n=0"),
        ({"stream": "yes"}, "stream='yes': Input should be a valid boolean"),
        ({"min_tokens": 99}, "min_tokens: 99 is more than the 16 tokens"),
        ({"min_tokens": 2, "guided_regex": "ab"}, "min_tokens: cannot be kept beside a grammar"),
        ({"prompt": []}, "prompt: is empty"),
        ({"prompt": [1] * LENGTH}, "serve.max_length=4096 holds prompt and answer"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"stop_token_ids": [999]}, "stop_token_ids: token 999 is outside"),
        ({"guided_regex": "("}, "guided_regex: grammar: not a regular expression"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "an answer follows one of them"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: is missing"),
        ({"stream_options": {"include_usage": True}}, "stream_options: is for stream=true"),
        ({"prompt": ["x"] * 2000}, "serve.max_waiting lets 774 of one client run and wait"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server, fields, words):
    with pytest.raises(openai.BadRequestError, match=re.escape(words)):
        server.openai.completions.create(model="tiny", prompt="x", extra_body=fields)
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b'{"prompt": ', {}, 400),
        (b"[1]", {}, 400),
        (b'{"prompt": "\xff"}', {}, 400),
        (b'{"prompt": "\\ud800"}', {}, 400),
        (b'{"prompt": ' + b"[" * 100_000, {}, 400),
        (b'{"prompt": "x", "temperature": NaN}', {}, 400),
        (b'{"prompt": "x"}', {"Content-Type": "text/plain"}, 415),
        (b'{"prompt": "' + b"x" * (9 << 20) + b'"}', {}, 413),
    ],
)
def test_a_body_that_is_no_request_is_refused(server, content, headers, status):
    headers = {"Content-Type": "application/json"} | headers
    answer = server.http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == status
    assert {*answer.json()["error"]} == {"message", "type", "param", "code"}


def test_a_page_of_another_site_cannot_ask(server):
    named = {"Host": "pages.example:80"}
    assert server.http.get("/v1/models", headers=named).status_code == 403
    assert server.http.get("/v1/models", headers={"Host": "localhost:1"}).status_code == 200


def test_paths_and_methods_that_are_not_there_are_refused(server):
    assert server.http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert server.http.get("/v1/completions").status_code == 405


def leave_stream(server):
    stream = server.complete(max_tokens=LENGTH - 10, ignore_eos=True, stream=True)
    next(iter(stream))
    stream.close()


def leave_answer(server):
    with pytest.raises(openai.APITimeoutError):
        server.complete(max_tokens=LENGTH - 10, ignore_eos=True, n=4, timeout=0.5)


def leave_prefill(server):
    with pytest.raises(openai.APITimeoutError):
        server.complete([[i] * (LENGTH - 10) for i in range(8)], max_tokens=1, timeout=0.3)


@pytest.mark.parametrize("leave", [leave_stream, leave_answer, leave_prefill])
def test_a_client_that_leaves_frees_its_pages(server, leave):
    before = server.metric('request_success_total{finished_reason="abort"}')
    leave(server)
    server.wait_until_idle()
    assert server.metric('request_success_total{finished_reason="abort"}') > before


def test_figures_count_requests_and_tokens(server):
    names = (
        "prompt_tokens_total",
        "generation_tokens_total",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
    )
    before = [*map(server.metric, names)]
    server.complete("Hello", max_tokens=7, ignore_eos=True, n=2)
    after = [*map(server.metric, names)]
    assert [new - old for new, old in zip(after, before, strict=True)] == [10, 14, 2, 2]


def test_a_conversation_streamed_is_the_answer_that_is_not_streamed(server):
    whole = server.chat(logprobs=True, top_logprobs=2)
    chunks = [chunk.choices[0] for chunk in server.chat(stream=True, logprobs=True, top_logprobs=2)]
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content and chunks[0].delta.role == "assistant"
    assert chunks[-1].finish_reason == whole.choices[0].finish_reason
    content = [token for chunk in chunks for token in chunk.logprobs.content]
    assert content == whole.choices[0].logprobs.content and len(content[0].top_logprobs) == 2


def test_a_conversation_becomes_the_templates_text(server):
    body = {"messages": HELLO}
    tokens = server.http.post("/tokenize", json=body).json()["tokens"]
    marked = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert tokens == server.http.post("/tokenize", json={"prompt": marked}).json()["tokens"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert server.chat().usage.prompt_tokens == len(tokens)
    assert server.chat(messages=parts).choices == server.chat().choices


def test_an_answer_follows_a_json_schema(server):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer", "maximum": 99}},
        "required": ["kind", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = server.chat(response_format=form, max_tokens=60, logit_bias=SPACES)
    value = json.loads(answer.choices[0].message.content)
    assert value["kind"] in ("a", "b") and isinstance(value["n"], int)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_tool_that_is_asked_for_is_called(server, choice):
    options = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 80, "logit_bias": SPACES}
    answer = server.chat(**options).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments)["a"] in (1, 2)
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    chunks = [chunk.choices[0] for chunk in server.chat(**options, stream=True)]
    (streamed,) = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    for name in ("name", "arguments"):
        assert getattr(streamed.function, name) == getattr(call.function, name)
    assert not any(chunk.delta.content for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_the_model_makes_are_told_from_its_text(server, stream):
    call = r'<tool_call>\{"name": "add", "arguments": \{"a": 1\}\}</tool_call>'

    def parts(text, **options):
        answer = server.chat(
            tools=[TOOL],
            stream=stream,
            max_tokens=200,
            extra_body={"guided_regex": text},
            **options,
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        messages = [choice.delta if stream else choice.message for choice in choices]
        calls = [call for message in messages for call in message.tool_calls or ()]
        content = "".join(message.content or "" for message in messages)
        arguments = [json.loads(call.function.arguments) for call in calls]
        return content, arguments, choices[-1].finish_reason

    assert parts("Sums: " + call + call) == ("Sums:", [{"a": 1}] * 2, "tool_calls")
    assert parts("No sum < 3") == ("No sum < 3", [], "stop")
    assert parts(call + call, parallel_tool_calls=False) == ("", [{"a": 1}], "tool_calls")
    assert parts(call, tool_choice="none")[0].startswith("<tool_call>")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0"),
        ({"top_logprobs": 3}, "top_logprobs: is for logprobs=true"),
        ({"tool_choice": "required"}, "tool_choice: is for tools, and there are none"),
        ({"audio": {}}, "audio={}: this server does not know it"),
        ({"prompt_logprobs": 2}, "prompt_logprobs=2: this server does not support it"),
    ],
)
def test_what_a_conversation_cannot_have_is_refused_by_name(server, fields, words):
    with pytest.raises(openai.BadRequestError, match=re.escape(words)):
        server.openai.chat.completions.create(model="tiny", messages=HELLO, extra_body=fields)


@pytest.mark.slow
def test_keys_a_full_queue_and_the_end_by_a_signal(folder, tmp_path):
    """One process, because each takes seconds to start."""
    (tmp_path / "keys").write_text("first\n\n second \n")
    options = [
        "--api-key-file",
        str(tmp_path / "keys"),
        "serve.max_requests=1",
        "serve.max_waiting=1",
    ]
    with serving(folder, tmp_path / "log", *options, key="second") as server:
        for header in ("", "second", "Bearer firs", "Bearer third"):
            headers = {"Authorization": header}
            for path in ("/v1/models", "/tokenizer_info"):
                assert server.http.get(path, headers=headers).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            server.openai.with_options(api_key="third").models.list()
        assert server.http.get("/health", headers={"Authorization": ""}).status_code == 200

        streams = [server.complete(max_tokens=600, ignore_eos=True, stream=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as full:
            server.complete()
        assert full.value.response.headers["Retry-After"] == "1"
        streams[1].close()

        next(iter(streams[0]))
        for _ in range(2):  # as some send it to a process and to its group
            server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while server.http.get("/health").status_code == 200:
            assert time.monotonic() < deadline
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            server.complete()
        *_, last = streams[0]
        assert last.choices[0].finish_reason == "length"
        assert server.process.wait(30) == 0 and "Traceback" not in server.output.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--api-key-file", "none"], "--api-key-file none: cannot be read"),
        (["--api-key-file", "/dev/null"], "only files are read"),
        (["--port", "70000"], "--port 70000: must be a number from 0 to 65535"),
        (["--tool-parser", "x"], "--tool-parser x: is not one of hermes"),
        (["--host", "203.0.113.1"], "cannot listen there"),
    ],
)
def test_wrong_arguments_are_refused_before_the_model_is_read(capsys, options, words):
    assert cli.main(["serve", "no-such-folder", *options]) == 1
    assert words in capsys.readouterr().err
