"""vLLM's command line for the settings of `maxstack submit --serve --engine vllm`. Its flags:
docs.vllm.ai, "vllm serve", and the sources of 0.32; --shutdown-timeout exists since 0.18."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

from maxstack import config
from maxstack.config import Section
from maxstack.errors import ConfigError
from maxstack.schema.serve import ServeConfig

INSTEAD = {
    "rows": "vLLM chooses the tokens of a step",
    "page": "vLLM chooses the tokens of a page",
    "max_waiting": "vLLM queues any number of requests and never answers 429",
    "snapshot": "vLLM caches states of recurrent layers in its own way",
    "snapshots": "vLLM caches states of recurrent layers in its own way",
    "attention": "vLLM chooses its kernels",
}
"""Keys of `serve` that vLLM lacks and that change no answer, and what it does instead."""
TOOL_PARSERS = {"hermes": "hermes", "llama3": "llama3_json", "mistral": "mistral"}
"""Our --tool-parser and vLLM's --tool-call-parser."""


class ModelSettings(Section):
    """Keys of `model`."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """null: the model's own."""


class VllmConfig(Section):
    """The overrides that vLLM can be given."""

    serve: ServeConfig = ServeConfig()
    model: ModelSettings = ModelSettings()


def read_overrides(overrides: Sequence[str]) -> VllmConfig:
    """Read the settings that overrides name; ConfigError for those that vLLM lacks."""
    for override in overrides:
        key = override.partition("=")[0]
        if key.startswith(("mesh.", "serve.adapters")):
            raise ConfigError(
                f"{override}: --engine vllm takes neither mesh.* nor serve.adapters; the mesh is "
                "the topology's, and adapters can be merged (maxstack lora merge)"
            )
        if key.partition(".")[0] != "serve" and key != "model.dtype":
            raise ConfigError(
                f"{override}: vLLM cannot take it; --engine vllm takes serve.* and model.dtype"
            )
    return config.load(VllmConfig, {}, overrides)


def serve_flags(serve: ServeConfig, tensor: int) -> list[str]:
    """Return the flags for `serve` on `tensor` devices, and print the keys that vLLM ignores.
    ConfigError for a promise that it does not make."""
    if serve.identical == "strict":
        raise ConfigError(
            "serve.identical=strict: vLLM does not promise it; set serve.identical=any, or leave "
            "--engine vllm out"
        )
    for key, instead in INSTEAD.items():
        if (value := getattr(serve, key)) != ServeConfig.model_fields[key].default:
            print(f"serve.{key}={value}: {instead}", file=sys.stderr)
    if serve.identical == "check":
        print(
            "serve.identical=check: not checked; with vLLM a request's bits may depend on other "
            "requests",
            file=sys.stderr,
        )
    flags: dict[str, object] = {
        "--max-num-seqs": serve.max_requests,
        "--max-model-len": serve.max_length,
        "--kv-cache-memory-bytes": serve.cache and int(serve.cache * 2**30 / tensor),
        "--kv-cache-dtype": serve.cache_dtype and f"{serve.cache_dtype}_per_token_head",
        "--tensor-parallel-size": tensor,
    }
    if serve.speculate:
        drafts = {"method": serve.draft, "num_speculative_tokens": serve.speculate}
        flags["--speculative-config"] = json.dumps(drafts)
    words = words_of(flags)
    if not serve.prefix_cache:
        words.append("--no-enable-prefix-caching")
    return words


def answer_flags(timeout: int) -> list[str]:
    """Return flags for what our server does by default: OpenAI's sampling parameters, and `timeout`
    seconds for running requests after SIGTERM."""
    return words_of({"--generation-config": "vllm", "--shutdown-timeout": timeout})


def tool_flags(parser: str | None) -> list[str]:
    """Return flags for the format of tool calls, by the name of --tool-parser; None: no tools."""
    if parser is None:
        return []
    return ["--enable-auto-tool-choice", "--tool-call-parser", TOOL_PARSERS[parser]]


def words_of(flags: Mapping[str, object]) -> list[str]:
    """List flags and their values as words, without those that are None."""
    words: list[str] = []
    for flag, value in flags.items():
        if value is not None:
            words += flag, str(value)
    return words
