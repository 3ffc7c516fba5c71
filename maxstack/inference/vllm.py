"""vLLM's command line for what `maxstack serve` is asked to do. Its flags: docs.vllm.ai, "vllm
serve", and the sources of 0.32; --shutdown-timeout is there since 0.18."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

from maxstack import config
from maxstack.config import PositiveInt, Section
from maxstack.data.copies import local_folder
from maxstack.errors import ConfigError
from maxstack.schema.serve import ServeConfig
from maxstack.strict_json import read_object

INSTEAD = {
    "rows": "vLLM chooses the tokens of a step",
    "page": "vLLM chooses the tokens of a page",
    "max_waiting": "with vLLM any number of requests waits, and none gets status 429",
    "snapshot": "vLLM keeps states of recurrent layers in its own way",
    "snapshots": "vLLM keeps states of recurrent layers in its own way",
    "attention": "vLLM chooses its kernels",
}
"""Keys of `serve` that vLLM is not given, which change no answer -> what it does."""
TOOL_PARSERS = {"hermes": "hermes", "llama3": "llama3_json", "mistral": "mistral"}
"""--tool-parser -> --tool-call-parser."""
RANKS = 1, 8, 16, 32, 64, 128, 256, 320, 512
"""Values of --max-lora-rank (vllm/config/lora.py)."""
REFUSED = "use_dora", "rank_pattern", "alpha_pattern"
"""Settings of PEFT's adapters that vLLM refuses, or that older ones do not read
(vllm/lora/peft_helper.py)."""


class ModelSettings(Section):
    """Keys of `model`."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """null: the model's own."""


class MeshSettings(Section):
    """Keys of `mesh`."""

    tensor: PositiveInt = 1
    data: PositiveInt = 1


class VllmConfig(Section):
    """The overrides that vLLM can be given."""

    serve: ServeConfig = ServeConfig()
    model: ModelSettings = ModelSettings()
    mesh: MeshSettings = MeshSettings()


def read_overrides(overrides: Sequence[str]) -> VllmConfig:
    """The settings that overrides name; ConfigError for those that vLLM cannot take."""
    for override in overrides:
        key = override.partition("=")[0]
        if key.partition(".")[0] != "serve" and key not in (
            "model.dtype",
            "mesh.tensor",
            "mesh.data",
        ):
            raise ConfigError(
                f"{override}: vLLM cannot take it; --engine vllm takes serve.*, model.dtype, "
                "mesh.tensor and mesh.data"
            )
    return config.load(VllmConfig, {}, overrides)


def serve_flags(serve: ServeConfig, mesh: MeshSettings) -> list[str]:
    """Flags for `serve` but its adapters, and `mesh`. Prints what vLLM does otherwise; ConfigError
    where that would break a promise."""
    if serve.identical == "strict":
        raise ConfigError(
            "serve.identical=strict: vLLM does not promise it; set serve.identical=any, or leave "
            "--engine vllm out"
        )
    notes = [
        f"serve.{key}={getattr(serve, key)}: {instead}"
        for key, instead in INSTEAD.items()
        if getattr(serve, key) != ServeConfig.model_fields[key].default
    ]
    if serve.identical == "check":
        notes.append(
            "serve.identical=check: not tried; with vLLM a request's bits may depend on others"
        )
    for note in notes:
        print(note, file=sys.stderr)
    flags: dict[str, object] = {
        "--max-num-seqs": serve.max_requests,
        "--max-model-len": serve.max_length,
        "--kv-cache-memory-bytes": serve.cache and int(serve.cache * 2**30 / mesh.tensor),
        "--kv-cache-dtype": serve.cache_dtype and f"{serve.cache_dtype}_per_token_head",
        "--tensor-parallel-size": mesh.tensor,
        "--data-parallel-size": mesh.data if mesh.data > 1 else None,
    }
    if serve.speculate:
        drafts = {"method": serve.draft, "num_speculative_tokens": serve.speculate}
        flags["--speculative-config"] = json.dumps(drafts)
    return [*words_of(flags), *["--no-enable-prefix-caching"] * (not serve.prefix_cache)]


def answer_flags(timeout: int) -> list[str]:
    """Flags for what our server does of itself: requests without sampling parameters get OpenAI's,
    and SIGTERM lets requests finish. `timeout`: the seconds that they have."""
    return words_of({"--generation-config": "vllm", "--shutdown-timeout": timeout})


def adapter_flags(adapters: Mapping[str, str]) -> list[str]:
    """Flags for serve.adapters; ConfigError for an adapter that vLLM cannot apply."""
    if not adapters:
        return []
    modules, ranks = [], []
    for name, path in adapters.items():
        folder = local_folder(path).resolve()
        settings = read_object(folder / "adapter_config.json")
        if odd := [key for key in REFUSED if settings.get(key)]:
            raise ConfigError(
                f"serve.adapters.{name}: vLLM takes no adapter with {', '.join(odd)}; merge it "
                "(maxstack lora merge), or leave --engine vllm out"
            )
        modules.append(json.dumps({"name": name, "path": str(folder)}))
        ranks.append(int(settings["r"]))
    allowed = [rank for rank in RANKS if rank >= max(ranks)]
    if not allowed:
        raise ConfigError(f"serve.adapters: rank {max(ranks)} is above vLLM's most, {RANKS[-1]}")
    counts = words_of({"--max-loras": len(ranks), "--max-lora-rank": allowed[0]})
    return ["--enable-lora", *counts, "--lora-modules", *modules]


def tool_flags(parser: str | None) -> list[str]:
    """Flags for the format of tools, by the name that --tool-parser has for it; None: no tools."""
    if parser is None:
        return []
    return ["--enable-auto-tool-choice", "--tool-call-parser", TOOL_PARSERS[parser]]


def words_of(flags: Mapping[str, object]) -> list[str]:
    """The words of flags with values, without those that are None."""
    pairs = [(flag, str(value)) for flag, value in flags.items() if value is not None]
    return [word for pair in pairs for word in pair]
