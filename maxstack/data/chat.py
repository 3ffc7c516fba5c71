"""Chat templates: conversations become the text that a model was trained on.

A template is Jinja from a model's folder (jinja.py renders it), with the names of special tokens as
variables. Templates differ in what they take: arguments of tool calls as objects or as JSON text,
content as one text or as parts. No file says which, so each template is tried once with a small
conversation. Answers are found in the text by marks that `{% generation %}` blocks write around
them. The text is then encoded with special tokens as such.
"""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxstack.data import hub
from maxstack.data.byte_level import NAMED, read_json, read_special_tokens, token_text
from maxstack.data.jinja import BEGIN, END, Guarded, Templates
from maxstack.data.tokenizers import Tokenizer, open_tokenizer
from maxstack.errors import ConfigError, DataError, quoted, shortened
from maxstack.regular_file import read_regular
from maxstack.schema.data import DataConfig
from maxstack.schema.data import Tokenizer as TokenizerConfig
from maxstack.strict_json import SMALL, parse

CONFIG = "tokenizer_config.json"
JINJA = "chat_template.jinja"
JSON = "chat_template.json"
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of templates where a model has several."""
NAMED_TEMPLATES = Path(__file__).parent / "templates"
MARKER = re.compile(r"\{%[-+]?\s*generation\b")
THOUGHT = "reasoning_content", "thinking", "reasoning"
"""Keys of a message's reasoning in data sets. Templates read the first, that of gpt-oss the second
(transformers 5.24, utils/chat_template_utils.py)."""
PROBE = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "f", "arguments": {"a": "b"}},
        }
    ],
}
"""A message with a tool call, rendered once to find how a template takes the arguments."""
PART = "words of a part"
Span = tuple[int, int]
ASKED = (
    "write one there, or give generate and serve --chat-template FILE; or ask for completions of "
    "text: /v1/completions, generate without --chat, eval without --apply-chat-template"
)
REMEDY = "name one in data.template: chatml, plain, or a file of Jinja"


class ChatTemplate:
    """A chat template of Hugging Face's dialect of Jinja, rendered in a sandbox.

    `sources` maps names to templates, of which `default` is used, or `tool_use`, if there is one,
    for conversations with tools; `tokens` are variables such as bos_token. `guarded` templates are
    rendered in processes with limits. DataError, which begins with `where`, for a template that
    cannot be parsed.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        tokens: Mapping[str, str],
        where: str,
        guarded: bool = False,
    ):
        if DEFAULT not in sources:
            raise ConfigError(
                f"{where}: has chat templates {', '.join(map(quoted, sources))} and none named "
                f"{DEFAULT}; write one of them to a file and give it: --chat-template FILE"
            )
        self.sources, self.where = sources, where
        self.tokens = tokens
        self._wants_text: dict[str, bool] = {}
        self._takes_parts: dict[tuple[str, str], bool] = {}
        try:
            self._templates = (Guarded if guarded else Templates)(sources)
        # jinja2 is not installed, which is not a fault of the template.
        except ConfigError:
            raise
        except Exception as error:  # TemplateSyntaxError, and Python's for deep nesting
            raise self._refused(error) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Return the text of a conversation, with BOS where the template writes it. Messages, tools
        and `extra`, further variables, are plain JSON. DataError for what the template refuses, and
        for a template that does what the sandbox refuses."""
        name = self._name(tools)
        messages = [self._with_content(name, message) for message in messages]
        # Probing renders twice, so only conversations with calls pay for it.
        if any(message.get("tool_calls") for message in messages) and self._reads_text(name):
            messages = [_with_text_arguments(message) for message in messages]
        return self._rendered(name, messages, tools, add_generation_prompt, **extra)

    def _with_content(self, name: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the message with its parts of text joined as lines, unless the template takes a
        list of parts for this role, as templates of vision models do."""
        content, role = message.get("content"), str(message.get("role"))
        if not isinstance(content, list):
            return message
        if (name, role) not in self._takes_parts:
            probe = {"role": role, "content": [{"type": "text", "text": PART}]}
            # A template may refuse a conversation that does not begin with a user's turn, or has no
            # user at all.
            before = [] if role in ("system", "user") else [{"role": "user", "content": "a"}]
            after = [{"role": "user", "content": "a"}] if role == "system" else []
            try:
                found = self._rendered(name, [*before, probe, *after], None, False)
            except DataError:
                found = ""
            # A template that does not take parts may write the list itself, as Python shows it:
            # {'type': 'text', ...}.
            self._takes_parts[name, role] = PART in found and not re.search("['\"]text['\"]", found)
        if self._takes_parts[name, role]:
            return message
        return {**message, "content": "\n".join(part["text"] for part in content)}

    def _reads_text(self, name: str) -> bool:
        """Return True if a template takes the arguments of tool calls as JSON text, which those of
        DeepSeek join with other text, rather than as an object."""
        if name not in self._wants_text:
            works = []
            for call in (PROBE, _with_text_arguments(PROBE)):
                try:
                    self._rendered(name, [{"role": "user", "content": "a"}, call], None, False)
                    works.append(True)
                except DataError:
                    works.append(False)
            # Templates that take both, or neither, get objects, as transformers gives them.
            self._wants_text[name] = works == [False, True]
        return self._wants_text[name]

    def _rendered(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **extra: Any,
    ) -> str:
        variables = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.tokens,
            **extra,
        }
        try:
            return self._templates.render(name, variables)
        except Exception as error:  # a template can do anything
            raise self._refused(error) from error

    def marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, list[Span]] | None:
        """Return the text of a conversation and the spans, in characters, that its
        `{% generation %}` blocks wrote; None if the template has none. DataError if the template
        changes what a block wrote."""
        if not MARKER.search(self.sources[self._name(tools)]):
            return None
        # Random and of a private character, so no message can hold or guess them.
        marks = [f"\ue000{secrets.token_hex(8)}\ue000" for _ in range(2)]
        parts = self.render(
            messages,
            tools,
            add_generation_prompt=False,
            **dict(zip((BEGIN, END), marks, strict=True)),
        )
        text, spans = "", []
        before, *blocks = parts.split(marks[0])
        text += before
        for block in blocks:
            inside, _, after = block.partition(marks[1])
            spans.append((len(text), len(text) + len(inside)))
            text += inside + after
        # A filter around a block, such as trim, works otherwise on a text with marks in it.
        if text != self.render(messages, tools, add_generation_prompt=False):
            raise DataError(
                f"{self.where}: the chat template changes what a {{% generation %}} block "
                "wrote, so it is not known what is trained on; move the block outside of filters"
            )
        return text, spans

    def ends(self, tokenizer: Tokenizer) -> set[int]:
        """Return special tokens that end a turn of the assistant."""
        # Rendered, since no file says what a template writes after an answer; "b" stands for the
        # answer, and what follows the last one ends the turn.
        question = [{"role": "user", "content": "a"}]
        messages = [*question, {"role": "assistant", "content": "b"}]
        text = self.render(messages, add_generation_prompt=False)
        ids, _ = tokenizer.encode_marked(text[text.rfind("b") + 1 :])
        return {int(token) for token in ids[:1]} & {*tokenizer.special}

    def _name(self, tools: Any) -> str:
        return WITH_TOOLS if tools and WITH_TOOLS in self.sources else DEFAULT

    def _refused(self, error: Exception) -> DataError:
        line = f" line {lineno}:" if (lineno := getattr(error, "lineno", None)) else ""
        words = " ".join(str(error).split()) or type(error).__name__
        return DataError(f"{self.where}: the chat template:{line} {shortened(words, 500)}")


def read_chat_template(
    folder: Path,
    file: str | Path | None = None,
    remedy: str = "",
    named: Mapping[str, str] | None = None,
    guarded: bool = False,
) -> ChatTemplate:
    """Return the chat template of a Hugging Face folder, or of a run that was imported from one, or
    that in `file`, with the folder's special tokens, and those `named` that it does not name.
    ConfigError, with a remedy, where there is none."""
    beside = folder / "hf" if (folder / "hf").is_dir() else folder
    config = read_special_tokens(beside)
    tokens = {name: text for name in NAMED if (text := token_text(config.get(name))) is not None}
    # The tokenizer's own file is asked last: the folder's files are what transformers reads.
    tokens = {**(named or {}), **tokens}
    if file:
        return ChatTemplate({DEFAULT: _read_text(Path(file))}, tokens, str(file), guarded)
    further = {
        path.stem: _read_text(path) for path in sorted((beside / hub.FURTHER).glob("*.jinja"))
    }
    # In transformers' order: chat_template.jinja, then the files of JSON.
    path = beside / JINJA
    if path.is_file():
        return ChatTemplate({**further, DEFAULT: _read_text(path)}, tokens, str(path), guarded)
    for name in (CONFIG, JSON):  # of which AutoTokenizer reads the first alone
        path = beside / name
        template = read_json(path).get("chat_template")
        if template is not None:
            sources = {**_parse_templates(template, path), **further}
            return ChatTemplate(sources, tokens, str(path), guarded)
    raise ConfigError(
        f"{folder}: has no chat template, neither {JINJA}, nor chat_template in {JSON} or "
        f"{CONFIG}; {remedy or ASKED}"
    )


def open_template(data: DataConfig, guarded: bool = False) -> ChatTemplate:
    """Return the chat template that data.template names, or that of the tokenizer's folder.
    ConfigError where there is none."""
    path, named = getattr(data.tokenizer, "path", None), data.template
    file = NAMED_TEMPLATES / f"{named}.jinja" if named in template_names() else named
    tokens = open_tokenizer(data.tokenizer).named
    if path is not None:
        folder = hub.model_folder(os.path.dirname(path) or ".", weights=False)
        return read_chat_template(folder, file, REMEDY, tokens, guarded)
    if file is None:
        raise ConfigError(f"data.template: a tokenizer of kind bytes has none; {REMEDY}")
    return ChatTemplate({DEFAULT: _read_text(Path(file))}, tokens, str(file), guarded)


def answer_ends(data: DataConfig, tokenizer: Tokenizer) -> set[int]:
    """Return tokens that end an answer in a run's data: EOS, those that the files of a model beside
    the tokenizer name, and what its chat template writes there."""
    ends = {*tokenizer.eos}
    if path := getattr(data.tokenizer, "path", None):
        beside = os.path.dirname(hub.resolve_file(path)) or "."
        ends |= read_ends(hub.model_folder(beside, weights=False))
    if data.has_records:
        with contextlib.suppress(ConfigError):  # records of texts need no template
            ends |= open_template(data).ends(tokenizer)
    return ends


def find_bos(tokenizer: TokenizerConfig) -> list[int]:
    """Return the id of the BOS that a file of a tokenizer, or the files beside it, name, whether
    texts begin with it or not; none if they name none."""
    path, opened = getattr(tokenizer, "path", None), open_tokenizer(tokenizer)
    if path is None:
        return []
    beside = hub.model_folder(os.path.dirname(hub.resolve_file(path)) or ".", weights=False)
    named = token_text(read_special_tokens(beside).get("bos_token")) or opened.named.get(
        "bos_token", ""
    )
    number = opened.id_of(named)
    return [] if number is None else [number]


def read_ends(folder: Path) -> set[int]:
    """Return ids at which generation stops by config.json and generation_config.json of a folder,
    which may name several."""
    ends: set[int] = set()
    for name in ("config.json", hub.GENERATION):
        given = read_json(folder / name).get("eos_token_id")
        ends.update(given if isinstance(given, list) else [] if given is None else [given])
    return ends


def template_names() -> list[str]:
    """Return names of the templates that come with maxstack."""
    return sorted(file.stem for file in NAMED_TEMPLATES.glob("*.jinja"))


def encode_chat(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Return ids of a rendered conversation, without another BOS, and the bytes from and up to
    which the text of each goes: int32 [N] and int64 [N, 2].

    Special tokens that are spelt out in it become their ids, in what people wrote too, as in
    transformers. Of a SentencePiece model these are the control tokens, between which each text is
    encoded by itself, with the space that the model puts before a text. The tokenizer of kind bytes
    has one, <|endoftext|>. DataError for half of a pair of surrogates, which JSON can hold and
    UTF-8 cannot.
    """
    try:
        # Otherwise an error of the tokenizer that names no message.
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"messages: are not Unicode text: {error}; send whole characters") from None
    return tokenizer.encode_marked(text)


def to_template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of OpenAI's API as templates take them: arguments of tool calls as objects,
    and reasoning, from any key of THOUGHT, under the keys that templates read. DataError for
    parts of content that are no text, and for arguments that are no JSON object."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    changed = dict(message)
    if isinstance(message.get("content"), list):
        for part in message["content"]:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise DataError(f"{where}.content: a part {quoted(kind)}; only text can be read")
    thoughts = [message[name] for name in THOUGHT if message.get(name) is not None]
    if thoughts:
        # Templates differ in the key that they read, so the reasoning stands under both.
        changed["reasoning_content"] = thoughts[0]
        changed.setdefault("thinking", thoughts[0])
    if message.get("tool_calls"):
        changed["tool_calls"] = [_call(call, where) for call in message["tool_calls"]]
    return changed


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not {"name", "arguments"} <= function.keys():
        raise DataError(
            f"{where}.tool_calls: {quoted(call)} is no call; wanted: "
            '{"function": {"name": ..., "arguments": ...}}'
        )
    function = dict(function)
    where = f"{where}.tool_calls: arguments of {quoted(function['name'])}"
    if isinstance(function["arguments"], str):
        # OpenAI's API sends arguments as a text of JSON, empty for a function without any.
        function["arguments"] = parse((function["arguments"] or "{}").encode(), where)
    if not isinstance(function["arguments"], dict):
        raise DataError(f"{where}: are no JSON object")
    return {**call, "function": function}


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its calls as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, **({"tool_calls": calls} if calls else {})}


def _parse_templates(template: Any, path: Path) -> dict[str, str]:
    """Return name -> template of a chat_template, which is a text or a list of named ones."""
    if isinstance(template, str):
        return {DEFAULT: template}
    try:
        named = {entry["name"]: entry["template"] for entry in template}
    except (TypeError, KeyError):
        named = {}
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise DataError(
            f"{path}: chat_template={quoted(template)}: must be a text, or a list of mappings with "
            "name and template"
        )
    return named


def _read_text(path: Path) -> str:
    try:
        return read_regular(path, SMALL).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{shortened(str(path))}: the chat template cannot be read: {reason}; give chatml, "
            "plain, or a file of Jinja"
        ) from error
