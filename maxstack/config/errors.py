"""The errors of maxstack.errors, by the name that most files import."""

from maxstack.errors import ConfigError, DataError

__all__ = ["ConfigError", "DataError"]
