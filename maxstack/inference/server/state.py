"""State that the routes of a server share."""

import dataclasses
from typing import TYPE_CHECKING

from maxstack.data.chat import ChatTemplate
from maxstack.errors import quoted
from maxstack.inference.engine_setup import Served
from maxstack.inference.grammar import Vocabulary
from maxstack.inference.server.admission import Access
from maxstack.inference.server.grammars import Grammars
from maxstack.inference.server.refusal import Refusal
from maxstack.inference.server.threads import Threads
from maxstack.inference.service import Service
from maxstack.inference.tools import FORMATS, ToolFormat

if TYPE_CHECKING:
    from maxstack.data.tokenizers import Tokenizer

BODY = 8 << 20
"""Bytes of a request's body at most."""


@dataclasses.dataclass
class State:
    """A model that is served."""

    served: Served
    service: Service
    name: str
    template: ChatTemplate | None = None
    tool_parser: str | None = None
    """Name in `tools.FORMATS`; None: tool calls are not read."""
    access: Access = Access()
    started: int = 0
    """Time of the start in seconds since 1970."""

    def __post_init__(self) -> None:
        # A function, because the vocabulary takes seconds to make and few servers need it.
        self.grammars = Grammars(self._vocabulary)
        self.threads = Threads()

    @property
    def vocab(self) -> int:
        """Rows of the model's embedding."""
        return self.served.cfg.decoder.vocab

    @property
    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer; Refusal where it has none."""
        if self.served.tokenizer is None:
            raise Refusal(400, f"{self.name} has no tokenizer; give prompts as lists of tokens")
        return self.served.tokenizer

    @property
    def tool_format(self) -> ToolFormat:
        """Format of the model's tool calls; Refusal where it is unknown."""
        if self.tool_parser is None:
            raise Refusal(
                400,
                f"tools: the chat template of {self.name} does not show how it calls tools; start "
                f"the server with --tool-parser {'|'.join(FORMATS)}",
                param="tools",
            )
        return FORMATS[self.tool_parser]

    @property
    def models(self) -> list[str]:
        """Names of the model and its adapters, as requests give them."""
        return [self.name, *self.service.engine.adapters]

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a request names, None for the model itself. Refusal with status
        404 for another name."""
        if model in (None, self.name):
            return None
        if model not in self.models:
            raise Refusal(
                404,
                f"no model {quoted(model)} is served here; there are {', '.join(self.models)}",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )
        return model

    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.tokenizer, self.served.stop_tokens, self.vocab)
