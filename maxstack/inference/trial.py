"""Grammars of strangers are compiled in a process of their own first: the library ends the process
that gives it rules nested too deeply, and may take minutes or all memory for others."""

from typing import Any

from maxstack import limited
from maxstack.errors import ConfigError
from maxstack.inference.grammar import Compiler, Vocabulary

STACK = 2 << 20
"""Bytes of stack in which a grammar has to compile. Threads that use it have more."""
SECONDS, MEMORY = 3, 512 << 20
"""Processor time and bytes that a grammar may take."""


class Trial(limited.Limited):
    """The process."""

    def __init__(self, vocabulary: Vocabulary, seconds: int = SECONDS):
        tokens = [token.decode("latin-1") for token in vocabulary.tokens]
        start = tokens, vocabulary.special_token_ids
        super().__init__(__name__, start, seconds, MEMORY, STACK)

    def check(self, kind: str, value: Any) -> None:
        """ConfigError for a grammar of `Compiler.compile` that cannot be compiled within the
        limits."""
        try:
            reason = self.ask((kind, value))
        except limited.Ended as error:
            raise ConfigError(f"grammar: {error}; give a simpler one") from None
        if reason:
            raise ConfigError(reason)


class _Tries:
    def __init__(self, start: Any):
        tokens, stop_tokens = start
        words = [token.encode("latin-1") for token in tokens]
        self._compiler = Compiler(Vocabulary(words, stop_tokens))

    def __call__(self, request: Any) -> str | None:
        """Why a grammar cannot be compiled, None where it can."""
        try:
            self._compiler.compile(*request)
        except ConfigError as error:
            return str(error)
        return None


if __name__ == "__main__":
    limited.answer_all(_Tries)
