"""Errors that a user can correct. This file imports nothing, so `--help` need not load more."""


class ConfigError(ValueError):
    """A user's mistake in a configuration: one paragraph that says what, where and what to do. Exit
    code 1."""

    exit_code = 1


class DataError(ValueError):
    """Data that cannot be used: one paragraph that names the file and record and says what to
    do. Exit code 2."""

    exit_code = 2
