"""Exit codes of a training process, beside 0: done, 1: a user's mistake and 2: bad data, which are
the `exit_code` of their errors."""

RETRY = 42
"""Stopped by a signal, hung, or lost one of its processes: the same command resumes."""
CRASHED = 70
"""An error that is not the user's mistake: the same command may resume."""
