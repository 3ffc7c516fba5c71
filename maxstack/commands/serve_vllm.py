"""`maxstack serve --engine vllm`: a model folder for vLLM, and vLLM in this process's stead."""

import hashlib
import json
import os
import secrets
import shlex
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from maxstack import strict_json
from maxstack.command import model_overrides
from maxstack.commands.convert import write_folder
from maxstack.errors import ConfigError

MARK = "maxstack-export.json"
"""File of an exported folder that says of which checkpoint it is."""
UNFINISHED = ".unfinished"
TOKENIZERS = "tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model"
"""Files of which vLLM reads one."""


def run_vllm(
    args: Namespace, keys: list[bytes], name: str, tools: Callable[[Path], str | None]
) -> None:
    """Replace this process by vLLM, with the settings of `maxstack serve`. ConfigError for
    what it cannot take. `name` is the model's in the API; `tools` gives
    the format of tools for a Hugging Face folder, None for none."""
    environment = dict(os.environ)
    os.environ["JAX_PLATFORMS"] = "cpu"
    from maxstack.inference import vllm
    from maxstack.inference.opened import config_of

    program = shutil.which("vllm")
    if program is None:
        raise ConfigError(
            "--engine vllm: no program vllm is on the PATH; pip install vllm, for TPUs pip install "
            "vllm-tpu, best into an environment of its own"
        )
    if args.port == 0:
        raise ConfigError("--port 0: vLLM needs a number")
    if args.connections or args.connections_per_address:
        raise ConfigError(
            "--connections and --connections-per-address: vLLM takes none; leave them out, and let "
            "a proxy limit them"
        )
    if len(keys) > 1:
        raise ConfigError(
            f"--api-key-file {args.api_key_file}: vLLM reads one key of its environment, and there "
            f"are {len(keys)}; leave one"
        )
    asked = vllm.read_overrides(args.overrides)
    of_model = [each for each in model_overrides(args) if not each.startswith("mesh.")]
    cfg, own = config_of(args.model, of_model)
    if cfg.quantization.rules:
        raise ConfigError(
            "quantization: vLLM would get dequantized weights; where that is meant: maxstack export"
            f" {args.model} --out FOLDER, and serve FOLDER"
        )
    settings = vllm.serve_flags(cfg.serve, asked.mesh) + vllm.adapter_flags(cfg.serve.adapters)
    folder = _folder(args, own, cfg.model.weights)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ConfigError(f"{folder}: has no tokenizer that vLLM reads; leave --engine vllm out")
    own_flags = {
        "--host": args.host,
        "--port": args.port,
        "--served-model-name": name,
        "--dtype": cfg.model.dtype,
        "--chat-template": args.chat_template,
        "--ssl-certfile": args.tls_cert,
        "--ssl-keyfile": args.tls_key,
        "--seed": secrets.randbits(31),  # vLLM's own is 0, for all requests that have none
    }
    if keys:
        environment["VLLM_API_KEY"] = keys[0].decode()
        print(
            "--api-key-file: vLLM asks for the key below /v1 and /v2 alone; /invocations, which "
            "generates too, answers everybody who reaches it"
        )
    words = ["vllm", "serve", str(folder), *vllm.words_of(own_flags), *settings]
    words += vllm.answer_flags(args.grace) + vllm.tool_flags(tools(folder))
    print(shlex.join(words), flush=True)
    os.execve(program, words, environment)


def _folder(args: Namespace, own: Path | None, weights: str | None) -> Path:
    """The Hugging Face folder of a model, exported for a run or a checkpoint."""
    from maxstack.data import hub

    if own is not None:
        return exported(Path(args.model), args.export_to or own.with_name(f"{own.name}-vllm"))
    if args.export_to:
        raise ConfigError(
            f"--export-to: {args.model} is a Hugging Face folder, which is taken as it is; leave "
            "it out"
        )
    assert weights
    return hub.model_folder(weights, weights=True)


def exported(checkpoint: Path, out: Path) -> Path:
    """`out`, exported again where it is not of this checkpoint as it is now. ConfigError where
    something else lies there."""
    from maxstack.checkpoint.weights import on_newest

    return on_newest(checkpoint, lambda step: _exported(step, out))


def _exported(step: Path, out: Path) -> Path:
    from maxstack.checkpoint import manifest

    source = (step / manifest.NAME).read_bytes()
    mark = {"step": int(step.name), "manifest": hashlib.sha256(source).hexdigest()}
    if out.exists():
        if not (out / MARK).is_file():
            raise ConfigError(
                f"{out}: is no export for vLLM, and is not overwritten; give another --export-to"
            )
        if strict_json.read_object(out / MARK) == mark:
            return out
    fresh = out.with_name(out.name + UNFINISHED)
    shutil.rmtree(fresh, ignore_errors=True)
    write_folder(step, fresh)
    (fresh / MARK).write_text(json.dumps(mark))
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)
    return out
