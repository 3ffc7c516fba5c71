"""Examples of records as tokens: which of them count, and what else is known of them."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maxstack.data.chat import ChatTemplate, Span, encode_chat, template_of
from maxstack.data.conversations import (
    Completion,
    Conversation,
    Example,
    alone,
    desirable,
    example,
    margin,
    number,
    preference,
    prompt_of,
    with_answer_of,
)
from maxstack.data.documents import Documents
from maxstack.data.tokenizers import naming, open_prompt_tokenizer, open_tokenizer, within
from maxstack.errors import DataError, quoted
from maxstack.schema.data import ChatRecord, DataConfig, Record

if TYPE_CHECKING:
    from maxstack.schema.objective import RowField as Field

EXTRAS = (
    *("ends", "label", "margin", "mismatched", "reference"),
    *("teacher_tokens", "teacher_logps"),
)
"""Arrays that rows of records may have beside tokens, where an objective declares them. ends: 1 at
the last token of a sequence, which is then among the inputs; label: 1 or -1, of an answer that is
wanted or not; margin: of a preference; mismatched: 1 on a prompt with another's answer; reference:
the log-probability of an answer under a reference; teacher_tokens and teacher_logps [K]: the
likeliest tokens under a teacher, and their log-probabilities. label, margin, mismatched and
reference are the same on a whole sequence."""
Raw = Mapping[str, Any]
Another = Callable[[int], Raw]
TRIES = 8
"""Other records that are looked at for an answer to another prompt."""


class Segment(NamedTuple):
    """Tokens that see each other."""

    ids: np.ndarray
    """int32 [N]."""
    values: Mapping[str, np.ndarray]
    """Arrays [N, ...] of a row by name, each element of the token that is predicted; `mask`, where
    it is missing, is 1."""


class Unit(NamedTuple):
    """Segments that stand one after the other, `whole`ly in one row or split where one ends."""

    segments: list[Segment]
    whole: bool
    record: Raw | None = None
    """The record, of a prompt."""

    @property
    def length(self) -> int:
        """Tokens of a row: pairs of an input and its target."""
        return sum(len(segment.ids) - 1 for segment in self.segments)

    def cut(self, most: int) -> "Unit | None":
        """The beginnings of the segments, of at most so many tokens of a row; of two, each has half
        and what the other leaves. None where nothing is left that counts."""
        sizes = [len(segment.ids) - 1 for segment in self.segments]
        share = most // len(sizes)
        spare = sum(max(0, share - size) for size in sizes)
        parts = [
            Segment(
                ids[: share + spare + 1], {k: v[: share + spare + 1] for k, v in values.items()}
            )
            for ids, values in self.segments
        ]
        counted = all(part.values["mask"][1:].any() for part in parts)
        return Unit(parts, self.whole) if counted else None


class Examples:
    """Units of the records of one kind, with the arrays in `fields`."""

    def __init__(self, cfg: DataConfig, fields: Mapping[str, "Field"], train: str = "assistant"):
        self._cfg, self._fields, self._train = cfg, fields, train
        self._tokenizer = open_tokenizer(cfg.tokenizer)

    def units(self, record: Raw, another: Another) -> list[Unit]:
        """The units of a record; `another` gives some other record of the source for each
        number."""
        raise NotImplementedError

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return template_of(self._cfg)

    def _segments(self, given: Example, **values: float) -> list[Segment]:
        if isinstance(given, Completion):
            segments = [self._completion(given)]
        else:
            segments = self._conversation(given, self._train)
        if "ends" in self._fields:
            segments = [with_end(segment) for segment in segments]
        return [
            Segment(
                segment.ids,
                {
                    **segment.values,
                    **{
                        name: np.full(len(segment.ids), value, np.float32)
                        for name, value in values.items()
                        if name in self._fields
                    },
                },
            )
            for segment in segments
        ]

    def _completion(self, given: Completion) -> Segment:
        """Prompt and completion as one text, of which the completion and EOS count."""
        text = (given.prompt + given.completion).encode()
        if not self._tokenizer.eos:
            raise DataError(
                "a completion must end in a token at which generation stops, and data.tokenizer "
                "has none; set data.tokenizer.eos"
            )
        longest = self._cfg.longest
        ids = self._tokenizer.encode(text, longest)
        spans = self._tokenizer.spans(text, longest)
        return _counted(ids, spans, [(len(given.prompt.encode()), len(text))])

    def _conversation(self, given: Conversation, train: str) -> list[Segment]:
        turns = [
            i
            for i, message in enumerate(given.messages)
            if message["role"] == "assistant" and i >= given.trained
        ]
        if not turns:
            raise DataError("no message of the assistant, so there is nothing to train on")
        if train == "each":
            return [self._spelt(given.messages[: turn + 1], given, [turn]) for turn in turns]
        if train == "all":
            text = self._template.render(given.messages, given.tools, add_generation_prompt=False)
            return [self._tokens(text, [(0, len(text))], check=False)]
        return [self._spelt(given.messages, given, turns[-1:] if train == "last" else turns)]

    def _spelt(
        self, messages: Sequence[Mapping[str, Any]], given: Conversation, turns: list[int]
    ) -> Segment:
        """Messages of which these turns count: what the template's markers enclose, or else what
        comes after the prompt of each turn."""
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if marked := self._template.marked(messages, given.tools):
            text, spans = marked
            if len(spans) != len(answers):
                raise DataError(
                    f"{self._template.where}: {len(spans)} {{% generation %}} blocks for "
                    f"{len(answers)} messages of the assistant; there must be one for each"
                )
            return self._tokens(text, [spans[answers.index(turn)] for turn in turns])
        text = self._template.render(messages, given.tools, add_generation_prompt=False)
        return self._tokens(
            text, [self._after_prompt(messages, given, turn, text) for turn in turns]
        )

    def _after_prompt(
        self, messages: Sequence[Mapping[str, Any]], given: Conversation, turn: int, text: str
    ) -> Span:
        """Where a turn stands in the text: after the prompt for it, up to where the conversation
        that ends with it does. DataError where these are no beginnings of the text."""
        prompt = self._template.render(messages[:turn], given.tools)
        whole = self._template.render(
            messages[: turn + 1], given.tools, add_generation_prompt=False
        )
        for part, what in ((prompt, "prompt before"), (whole, "conversation up to")):
            if not text.startswith(part):
                at = next(
                    (i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), 0
                )
                raise DataError(
                    f"{self._template.where}: the template writes the {what} message {turn} "
                    f"otherwise than in the whole conversation, from {quoted(part[at : at + 30])} "
                    "on, so it is not known what is trained on; set record.train=each, which gives "
                    "each answer a row of its own, or mark answers in the template with "
                    "{% generation %} and {% endgeneration %}"
                )
        return len(prompt), len(whole)

    def _tokens(self, text: str, spans: Sequence[Span], check: bool = True) -> Segment:
        """The text's tokens, of which those in the spans count up to the token that ends a turn."""
        ids, tokens = encode_chat(self._tokenizer, text)
        counted = [(len(text[:begin].encode()), len(text[:end].encode())) for begin, end in spans]
        segment = _counted(ids, tokens, counted)
        if not check:
            return segment
        mask, written = segment.values["mask"], text.encode()
        for begin, end in counted:
            inside = np.flatnonzero((tokens[:, 0] >= begin) & (tokens[:, 1] <= end))
            last = len(inside)
            while last and not written[slice(*tokens[inside[last - 1]])].strip():
                last -= 1  # white space after the end of a turn is never generated
            if not last or int(ids[inside[last - 1]]) not in self._tokenizer.special:
                tail = written[begin:end].decode(errors="replace")[-30:]
                raise DataError(
                    f"a turn of the assistant ends in {quoted(tail)}, which is no special token of "
                    f"{self._tokenizer.name}, so the model would not learn to stop; let the chat "
                    "template write the EOS token there"
                )
            mask[inside[last:]] = 0
        return segment


class Chats(Examples):
    """A conversation, or a prompt with its completion."""

    def units(self, record: Raw, another: Another) -> list[Unit]:
        """One unit, or with train=each one for each answer."""
        segments = self._segments(example(record))
        if "teacher_tokens" in self._fields:
            segments = [_taught(segment, record, self._fields) for segment in segments]
        return [Unit([segment], whole=True) for segment in segments]


class Pairs(Examples):
    """A chosen and a rejected answer to one prompt, one after the other."""

    def units(self, record: Raw, another: Another) -> list[Unit]:
        """One unit of two segments."""
        segments = []
        for name, given in zip(("chosen", "rejected"), preference(record), strict=True):
            values = {"margin": margin(record)} if "margin" in self._fields else {}
            if "reference" in self._fields:
                values["reference"] = number(record, f"ref_{name}_logps")
            segments += self._segments(given, **values)
        return [Unit(segments, whole=True)]


class Labelled(Examples):
    """An answer that is wanted or not, and where it is asked for, an answer to another prompt after
    it."""

    def units(self, record: Raw, another: Another) -> list[Unit]:
        """One unit of one segment or two."""
        given, values = example(record), {"label": 1.0 if desirable(record) else -1.0}
        if "reference" in self._fields:
            values["reference"] = number(record, "ref_logps")
        segments = self._segments(given, **values)
        if "mismatched" in self._fields:
            for attempt in range(TRIES):
                other = example(another(attempt))
                if prompt_of(other) != prompt_of(given):
                    break
            segments += self._segments(with_answer_of(given, other), mismatched=1.0)
        return [Unit(segments, whole=True)]


class Prompts(Examples):
    """A prompt alone; nothing of it counts."""

    def units(self, record: Raw, another: Another) -> list[Unit]:
        """One unit of one segment."""
        given = alone(record)
        if isinstance(given, Completion):
            ids = open_prompt_tokenizer(self._cfg.tokenizer).encode(given.prompt.encode())
        else:
            ids, _ = encode_chat(
                self._tokenizer, self._template.render(given.messages, given.tools)
            )
        segment = Segment(ids, {"mask": np.zeros(len(ids), np.float32)})
        return [Unit([segment], whole=True, record=record)]


KINDS: dict[str, type[Examples]] = {
    "chat": Chats,
    "pairs": Pairs,
    "labelled": Labelled,
    "prompts": Prompts,
}


def units_of(
    documents: Documents, index: int, cfg: DataConfig, fields: Mapping[str, "Field"]
) -> list[Unit]:
    """The units of a record. DataError, naming its file and record, if it cannot be read."""

    def another(attempt: int) -> Raw:
        # Spread over the source, so that neighbours, which often share a prompt, are far.
        step = 1 + (attempt + 1) * len(documents) // (TRIES + 1)
        return _record(documents, (index + step) % len(documents), cfg)

    assert documents.record
    maker = _examples(documents.record, cfg, frozenset(fields.items()))
    with naming(documents, index):
        record = _record(documents, index, cfg)
        try:
            return maker.units(record, another)
        except DataError as error:
            raise DataError(f"{documents.where(index)}: {error}") from error


@functools.lru_cache(maxsize=16)
def _examples(record: Record, cfg: DataConfig, fields: frozenset[tuple[str, "Field"]]) -> Examples:
    train = {"train": record.train} if isinstance(record, ChatRecord) else {}
    return KINDS[record.kind](cfg, dict(fields), **train)


def _record(documents: Documents, index: int, cfg: DataConfig) -> Mapping[str, Any]:
    document = within(documents, index, cfg.longest, cfg.beyond)
    assert isinstance(document, bytes)
    try:
        value = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{documents.where(index)}: not JSON: {getattr(error, 'msg', error)}; mend or remove "
            "the record"
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"{documents.where(index)}: is no JSON object")
    return value


def _counted(ids: np.ndarray, tokens: np.ndarray, counted: Sequence[Span]) -> Segment:
    """Tokens of which those count that lie in one of the spans of bytes, from beginning to end."""
    mask = np.zeros(len(ids), np.float32)
    for begin, end in counted:
        mask[(tokens[:, 0] >= begin) & (tokens[:, 1] <= end)] = 1
    return Segment(ids, {"mask": mask})


def _taught(segment: Segment, record: Mapping[str, Any], fields: Mapping[str, "Field"]) -> Segment:
    """The segment with what a teacher's `top_tokens` and `top_logprobs`, [tokens, K] each, say of
    its tokens. DataError where there are others."""
    (top,) = fields["teacher_tokens"].size
    values = {**segment.values}
    for name, key in (("teacher_tokens", "top_tokens"), ("teacher_logps", "top_logprobs")):
        shape = len(segment.ids), top
        try:
            stored = np.array(record[key], fields[name].dtype)[:, :top]
        except (KeyError, ValueError, TypeError, IndexError):
            stored = np.zeros(0)
        if stored.shape != shape:
            raise DataError(
                f"{key}: must hold {shape[0]} lists of {top} numbers, one for each token; "
                f"`maxstack score TEACHER --records FILE --top {top} --out FILE` writes them"
            )
        values[name] = stored
    return segment._replace(values=values)


def with_end(segment: Segment) -> Segment:
    """The segment with one more token, of no meaning, as the target of the last; only that counts,
    at the last token."""
    mask = np.zeros(len(segment.ids) + 1, np.float32)
    mask[-1] = 1
    return Segment(np.append(segment.ids, np.int32(0)), {"mask": mask, "ends": mask})
