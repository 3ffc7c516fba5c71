"""Servers for tests: a Hugging Face folder with random weights, a byte-level tokenizer and a chat
template, and a process that serves it, with clients."""

import contextlib
import re
import time
from pathlib import Path

import httpx
import openai
import processes
from asked_folders import write_llama
from tokenizer_files import byte_level

MARKS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{% if tools %}Tools, as <tool_call>{"name": ..., "arguments": ...}</tool_call>: {{ tools | tojson }}
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
OURS = {
    "guided_regex",
    "ignore_eos",
    "include_stop_str_in_output",
    "return_token_ids",
    "stop_token_ids",
    "structured_outputs",
}
"""Fields of requests that OpenAI's API lacks."""
FEW = ("model.dtype=float32", "serve.rows=32", f"run.compilation_cache={processes.COMPILED}")
"""A server that compiles four sizes of step in place of six comes up sooner."""
HELLO = [{"role": "user", "content": "Hello"}]


def make(folder: Path, length: int = 8192) -> Path:
    """The folder, for texts of at most `length` tokens."""
    tokenizer = byte_level(MARKS)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    end = tokenizer.token_to_id(MARKS[1])
    changes = {"max_position_embeddings": length, "eos_token_id": end}
    write_llama(folder, tokenizer, TEMPLATE, {"eos_token": MARKS[1]}, changes)
    return folder


class Served:
    """A server's process, its address and clients."""

    def __init__(self, folder, log, *options, key="none"):
        words = ["serve", str(folder), "--port", "0", "--served-model-name", "tiny", *FEW, *options]
        self.output = log
        self.process, address = processes.serve(words, processes.environment(), log)
        headers = {"Authorization": f"Bearer {key}"}
        # The first request of a kind compiles its programs, beside other tests' work.
        self.http = httpx.Client(base_url=address, headers=headers, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)

    def complete(self, prompt="Hello", **options):
        """A completion; fields that the client does not know go into the body."""
        extra = {name: options.pop(name) for name in OURS & {*options}}
        options = {"model": "tiny", "prompt": prompt, "max_tokens": 12} | options
        return self.openai.completions.create(**options, extra_body=extra)

    def chat(self, **options):
        """An answer to HELLO."""
        options = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "seed": 3} | options
        return self.openai.chat.completions.create(**options)

    def metric(self, name):
        """The value of a metric; `name` may end with labels."""
        label, _, more = name.partition("{")
        pattern = rf'^vllm:{label}\{{model_name="tiny"{"," + more if more else "}"} (\S+)$'
        return float(re.search(pattern, self.http.get("/metrics").text, re.M)[1])

    def wait_until_idle(self):
        """Fails unless all requests end, and all pages are free, in a few seconds."""
        names = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
        deadline = time.monotonic() + 10
        while any(map(self.metric, names)):
            assert time.monotonic() < deadline, "requests or pages are left"
            time.sleep(0.02)


@contextlib.contextmanager
def serving(folder, log, *options, **more):
    server = Served(folder, log, *options, **more)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
