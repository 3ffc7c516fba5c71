"""Where the time of a training step goes, from a trace and the text of its program."""

from maxstack.profile.analysis import Summary, summary

__all__ = ["Summary", "summary"]
