"""`maxstack generate`: a trained model goes on from prompts, or answers in a conversation."""

import argparse
import os
from typing import TYPE_CHECKING, Any

from maxstack.command import (
    ALLOW_NONFINITE,
    HOTTEST,
    MODEL,
    OVERRIDES,
    WEIGHTS,
    argument,
    check_writable,
    command,
    model_overrides,
    positive,
    up_to,
)
from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from maxstack.inference.generation import Generator


@command(
    "generate",
    "Go on from prompts by a trained model. Without --prompt and --prompts it reads them from the "
    "terminal, one a line.",
    "generate runs/quickstart --prompt 'The ' --max-tokens 100",
    MODEL,
    OVERRIDES,
    argument("--prompt", metavar="TEXT", help="how the text begins; - reads standard input"),
    argument(
        "--prompts",
        metavar="FILE.jsonl",
        help='many: {"id", and "prompt", "tokens" or "messages"} a line',
    ),
    argument(
        "--out",
        metavar="FILE.jsonl",
        help="of --prompts: id, text, tokens, logprobs and finish_reason a line; the same command "
        "goes on after a kill",
    ),
    argument(
        "--adapter",
        metavar="FOLDER",
        help="in PEFT's format, or its name in serve.adapters: answer with it",
    ),
    argument("--chat", action="store_true", help="prompts are messages of a user, by the template"),
    argument("--chat-template", metavar="FILE", help="Jinja; default: that of the model's folder"),
    argument("--system", metavar="TEXT", help="the system's message, with --chat"),
    argument("--max-tokens", type=positive, default=256, help="of an answer (default: 256)"),
    argument(
        "--temperature",
        type=up_to(HOTTEST),
        default=1.0,
        help="0: the likeliest token (default: 1)",
    ),
    argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest; 0: all"),
    argument("--top-p", type=up_to(1), default=1.0, metavar="P", help="likeliest of probability P"),
    argument("--min-p", type=up_to(1), default=0.0, metavar="P", help="share of the likeliest's"),
    argument("--repetition-penalty", type=float, default=1.0, metavar="F", help="1: none"),
    argument("--seed", type=int, default=0, help="of all random numbers (default: 0)"),
    argument("--n", type=positive, default=1, help="answers to each prompt (default: 1)"),
    argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer"),
    argument("--ignore-eos", action="store_true", help="go on after the end of a text"),
    WEIGHTS,
    ALLOW_NONFINITE,
)
def main(args: argparse.Namespace) -> None:
    """Generate; ConfigError or DataError, before weights are read, for arguments and prompts that
    cannot be used."""
    if args.prompt is not None and args.prompts:
        raise ConfigError("maxstack generate: give either --prompt or --prompts")
    if bool(args.prompts) != bool(args.out):
        missing, given = ("--out", "--prompts") if args.prompts else ("--prompts", "--out")
        raise ConfigError(f"maxstack generate: {given} needs {missing} FILE.jsonl too")
    if args.prompt == "":
        raise ConfigError("--prompt: is empty; give at least one character")
    if args.system and not args.chat:
        raise ConfigError("--system: only a conversation has a system's message; give --chat too")
    if args.top_k < 0 or args.repetition_penalty <= 0:
        raise ConfigError("--top-k must be 0 or more, and --repetition-penalty above 0")
    check_writable("--out", args.out)
    from maxstack.inference.engine_setup import chat_template, start
    from maxstack.inference.generation import Generator, check_prompts, read_prompts
    from maxstack.inference.trained_model import config_of

    rows = read_prompts(args.prompts) if args.prompts else []
    template = None
    if args.chat or any(row.kind == "messages" for row in rows):
        opened = config_of(args.model, model_overrides(args))
        template = chat_template(args.model, *opened, args.chat_template)
    reads_text = not args.prompts or bool(args.stop)

    def check(tokenizer: Any, vocab: int) -> None:
        check_prompts(args.model, tokenizer, vocab, rows, reads_text)

    served = start(args.model, model_overrides(args), args.adapter, check)
    generator = Generator(
        served, _sampling(args), template, args.stop, args.ignore_eos, args.adapter
    )
    if args.prompts:
        generator.answer_file(rows, args.out, args.n, args.chat, args.system)
    elif args.prompt is not None:
        import sys

        text = sys.stdin.read() if args.prompt == "-" else args.prompt
        _print_answers(generator, generator.encode(text, args.chat, args.system), args.n)
    else:
        _converse(generator, args)


def _sampling(args: argparse.Namespace) -> Any:
    from maxstack.inference.request import Sampling

    names = "max_tokens temperature top_k top_p min_p repetition_penalty seed".split()
    return Sampling(**{name: getattr(args, name) for name in names})


def _print_answers(generator: "Generator", prompt: list[int], count: int) -> None:
    for choice in range(count):
        if count > 1:
            print(f"--- {choice} ---")
        for text in generator.stream(prompt, choice):
            print(text, end="", flush=True)
        print()


def _converse(generator: "Generator", args: argparse.Namespace) -> None:
    """Prompts from the terminal until its end (Ctrl-D); a conversation keeps what was said."""
    import sys

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
            _print_answers(generator, generator.encode(text, False, None), args.n)
            continue
        messages.append({"role": "user", "content": os.fsencode(text).decode(errors="replace")})
        answer = ""
        for piece in generator.stream(generator.encode_messages(messages)):
            answer += piece
            print(piece, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})
