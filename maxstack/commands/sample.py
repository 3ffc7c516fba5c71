"""`maxstack sample`: texts from a model trained by masked diffusion."""

import argparse
import json
import os

from maxstack.command import (
    ALLOW_NONFINITE,
    HOTTEST,
    MODEL,
    OVERRIDES,
    argument,
    check_writable,
    command,
    model_overrides,
    positive,
    up_to,
    write,
)
from maxstack.errors import ConfigError


@command(
    "sample",
    "Write texts by a model that was trained by masked diffusion.",
    "sample runs/masked-diffusion --count 2 --length 256",
    MODEL,
    OVERRIDES,
    argument("--count", type=positive, default=4, help="texts (default: 4)"),
    argument("--length", type=positive, help="tokens of a text (default: data.seq_len)"),
    argument("--steps", type=positive, help="steps (default: one a token)"),
    argument(
        "--order",
        choices=("random", "confidence", "margin", "entropy"),
        default="random",
        help="which positions are filled first (default: random)",
    ),
    argument(
        "--temperature",
        type=up_to(HOTTEST),
        default=1.0,
        help="0: the likeliest token (default: 1)",
    ),
    argument("--seed", type=int, default=0, help="of all random numbers (default: 0)"),
    argument("--prompt", default="", metavar="TEXT", help="how every text begins"),
    argument("--out", metavar="FILE.jsonl", help='write {"text", "tokens"} a line instead'),
    ALLOW_NONFINITE,
)
def main(args: argparse.Namespace) -> None:
    """Sample; ConfigError for a model that was not trained so, or a prompt that does not fit."""
    check_writable("--out", args.out)
    for override in args.overrides:
        if override.startswith("objective"):
            raise ConfigError(f"{override}: a trained model's objective cannot be changed")
    import numpy as np

    from maxstack.data.tokenizers import open_prompt_tokenizer
    from maxstack.inference.diffusion import sample
    from maxstack.inference.opened import open_model

    run, params = open_model(args.model, model_overrides(args))
    shift = getattr(run.cfg.objective, "shift", False)
    tokenizer = open_prompt_tokenizer(
        run.cfg.data.tokenizer, bos=shift
    )  # without shift no sequence holds BOS
    prompt = tokenizer.encode(os.fsencode(args.prompt))
    length = args.length or run.cfg.data.seq_len
    if len(prompt) >= length:
        raise ConfigError(f"--prompt: is {len(prompt)} tokens long, and --length is {length}")
    if shift and not len(prompt):
        raise ConfigError("--prompt: with objective.shift the first token must be given")
    tokens = np.zeros((args.count, length), np.int32)
    tokens[:, : len(prompt)] = prompt
    in_prompt = np.broadcast_to(np.arange(length) < len(prompt), tokens.shape)
    rows = sample(
        run,
        params,
        tokens,
        in_prompt,
        steps=args.steps or length,
        order=args.order,
        temperature=args.temperature,
        seed=args.seed,
    )
    texts = [tokenizer.decode(row).decode(errors="replace") for row in rows]
    if args.out:
        lines = [
            json.dumps({"text": text, "tokens": row.tolist()})
            for text, row in zip(texts, rows, strict=True)
        ]
        write("--out", args.out, "\n".join(lines) + "\n")
    else:
        print("\n\n".join(f"--- {i} ---\n{text}" for i, text in enumerate(texts)))
