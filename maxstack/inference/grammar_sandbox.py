"""A process with limits in which grammars of clients are compiled first.

The library crashes on rules that are nested too deeply (a chain of 1,000 definitions ended the
server by signal 11), and takes minutes or all memory for others (`multipleOf: 9999991`: no answer
after 120 s, 3.6 GB). So a grammar is compiled here first, on a small stack, with limits of time and
memory, and measured; only one that passes is compiled again in the server. A process that asks for
each mask was not built: ending one matcher would end the others' states with it.
"""

from typing import Any

from maxstack import limited
from maxstack.errors import ConfigError
from maxstack.hardware.memory import give_back
from maxstack.inference.grammar import Compiler, Vocabulary

# A chain of 100 definitions needs 1 MiB of stack, of 200 2 MiB, of 400 8 MiB. Threads that use a
# grammar have 16 MiB, so what compiles here does not overflow there.
STACK = 2 << 20
"""Bytes of stack in which a grammar must compile; threads that use it later have more."""
SECONDS = 3
"""Processor time that a grammar may take to compile."""
MEMORY = 512 << 20
"""Bytes that it may take to compile."""
# Compiled grammars are kept for later requests, so their size counts, not only their making.
COMPILED = 64 << 20
"""Bytes that a compiled grammar may have."""
COPIES = 4
"""Copies that are made to measure one."""


class GrammarSandbox(limited.Limited):
    """Compiles grammars in a process of its own."""

    def __init__(self, vocabulary: Vocabulary, seconds: int = SECONDS):
        # Requests are JSON, which holds no bytes; latin-1 maps each byte to one character and back.
        tokens = [token.decode("latin-1") for token in vocabulary.tokens]
        start = tokens, vocabulary.special_token_ids
        super().__init__(__name__, start, seconds, MEMORY, STACK)

    def check(self, kind: str, value: Any) -> tuple[int, int]:
        """Return the bytes of a compiled grammar and of each copy. ConfigError for one that cannot
        be compiled within the limits."""
        try:
            reason, compiled, copied = self.ask((kind, value))
        except limited.Ended as error:
            raise ConfigError(f"grammar: {error}; give a simpler one") from None
        if reason:
            raise ConfigError(reason)
        if compiled > COMPILED:
            raise ConfigError(
                f"grammar: is {compiled >> 20} MiB when it is compiled, and may be "
                f"{COMPILED >> 20}; give a simpler one"
            )
        return compiled, copied


class _Tries:
    def __init__(self, start: Any):
        tokens, stop_tokens = start
        words = [token.encode("latin-1") for token in tokens]
        self._compiler = Compiler(Vocabulary(words, stop_tokens))

    def __call__(self, request: Any) -> tuple[str, int, int]:
        """Return why a grammar cannot be compiled, else "" with its bytes and those of a copy."""
        # Return the last grammar's memory first: this one would reuse it and seem small.
        give_back()
        before = limited.own_memory()[1]
        try:
            matcher = self._compiler.compile(*request)
        except ConfigError as error:
            return str(error), 0, 0
        compiled = limited.own_memory()[1]
        # Each answer copies its matcher, so a copy counts too.
        copies = [matcher.copy() for _ in range(COPIES)]
        copied = (limited.own_memory()[1] - compiled) // len(copies)
        return "", compiled - before, max(copied, 0)


if __name__ == "__main__":
    limited.answer_all(_Tries)
