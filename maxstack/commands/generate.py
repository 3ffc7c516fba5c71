"""`maxstack generate`: generate text from prompts, or chat."""

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from maxstack.command import (
    ALLOW_NONFINITE,
    MODEL,
    OVERRIDES,
    SEED,
    TEMPERATURE,
    WEIGHTS,
    argument,
    between,
    check_writable,
    command,
    model_overrides,
    positive,
    share,
)
from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from maxstack.inference.generation import Generator


@command(
    "generate",
    "Generate text from prompts. Without --prompt and --prompts, read prompts from the terminal, "
    "one per line.",
    "generate runs/quickstart --prompt 'The ' --max-tokens 100",
    MODEL,
    OVERRIDES,
    argument("--prompt", metavar="TEXT", help="prompt; - reads it from standard input"),
    argument(
        "--prompts",
        metavar="FILE.jsonl",
        help='file of prompts: "id" and one of "prompt", "tokens" or "messages" per line',
    ),
    argument(
        "--out",
        metavar="FILE.jsonl",
        help="output file for --prompts: id, text, tokens, logprobs and finish_reason per line; "
        "run the same command again to resume",
    ),
    argument(
        "--adapter",
        metavar="FOLDER",
        help="LoRA adapter to apply: a folder in PEFT's format, or its name in serve.adapters",
    ),
    argument(
        "--chat",
        action="store_true",
        help="treat prompts as user messages and apply the chat template",
    ),
    argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja chat template (default: the one in the model's folder)",
    ),
    argument("--system", metavar="TEXT", help="with --chat: system message"),
    argument(
        "--max-tokens", type=positive, default=256, help="maximum tokens to generate (default: 256)"
    ),
    TEMPERATURE,
    argument(
        "--top-k",
        type=between(0, 1 << 30, int),
        default=0,
        metavar="K",
        help="sample from the K likeliest tokens; 0: from all (default: 0)",
    ),
    argument(
        "--top-p",
        type=share,
        default=1.0,
        metavar="P",
        help="sample from the fewest likeliest tokens that reach probability P (default: 1)",
    ),
    argument(
        "--min-p",
        type=between(0, 1),
        default=0.0,
        metavar="P",
        help="minimum probability, as a fraction of the likeliest token's (default: 0)",
    ),
    argument(
        "--repetition-penalty",
        type=between(0.01, 100),
        default=1.0,
        metavar="F",
        help="penalty on repeated tokens; 1: none (default: 1)",
    ),
    SEED,
    argument("--n", type=positive, default=1, help="completions per prompt (default: 1)"),
    argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop at this string; repeatable",
    ),
    argument(
        "--ignore-eos", action="store_true", help="keep generating past the end-of-text token"
    ),
    WEIGHTS,
    ALLOW_NONFINITE,
)
def main(args: argparse.Namespace) -> None:
    """Generate; ConfigError or DataError before weights are read for unusable arguments or
    prompts."""
    if args.prompt is not None and args.prompts:
        raise ConfigError("maxstack generate: give --prompt or --prompts, not both")
    if bool(args.prompts) != bool(args.out):
        missing, given = ("--out", "--prompts") if args.prompts else ("--prompts", "--out")
        raise ConfigError(f"maxstack generate: {given} needs {missing} FILE.jsonl")
    if args.prompt == "":
        raise ConfigError("--prompt: is empty; give at least one character")
    if args.system and not args.chat:
        raise ConfigError("--system: needs --chat")
    check_writable("--out", args.out)
    from maxstack.inference.engine_setup import First, chat_template, start
    from maxstack.inference.generation import Generator, check_prompts, encode, read_prompts
    from maxstack.inference.request import Sampling
    from maxstack.inference.trained_model import config_of

    rows = read_prompts(args.prompts) if args.prompts else []
    template = None
    if args.chat or any(row.kind == "messages" for row in rows):
        opened = config_of(args.model, model_overrides(args))
        template = chat_template(args.model, *opened, args.chat_template)
    reads_text = not args.prompts or bool(args.stop)

    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    prompt: list[int] = []

    def check(tokenizer: Any, vocab: int) -> First:
        check_prompts(args.model, tokenizer, vocab, rows, reads_text)
        if text is not None:
            prompt.extend(encode(tokenizer, template, text, args.chat, args.system))
        return First(max(1, len(prompt)), args.max_tokens, args.temperature > 0)

    served = start(args.model, model_overrides(args), args.adapter, check)
    generator = Generator(
        served, Sampling.of(args), template, args.stop, args.ignore_eos, args.adapter
    )
    if args.prompts:
        generator.answer_file(rows, args.out, args.n, args.chat, args.system)
    elif text is not None:
        _print_answers(generator, prompt, args.n)
    else:
        _converse(generator, args)


def _print_answers(generator: "Generator", prompt: list[int], count: int) -> None:
    for choice in range(count):
        if count > 1:
            print(f"--- {choice} ---")
        for text in generator.stream(prompt, choice):
            print(text, end="", flush=True)
        print()


def _converse(generator: "Generator", args: argparse.Namespace) -> None:
    """Answer prompts from the terminal until it ends (Ctrl-D); with --chat, keep the history."""
    messages = [{"role": "system", "content": args.system}] if args.system else []
    prefix = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prefix)
        except EOFError:
            return
        if not text:
            continue
        if not args.chat:
            _print_answers(generator, generator.encode(text), args.n)
            continue
        messages.append({"role": "user", "content": os.fsencode(text).decode(errors="replace")})
        answer = ""
        for piece in generator.stream(generator.encode_messages(messages)):
            answer += piece
            print(piece, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})
