"""Tables for people and for scripts."""

import io
import sys

import pytest
from rich.cells import cell_len

from maxstack.report.table import table


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_columns_are_aligned_to_their_side():
    assert table("lr", [("a", "1"), ("long", "1,000")], ("name", "bytes")) == (
        "  name  bytes\n  a         1\n  long  1,000"
    )


@pytest.mark.parametrize("variables", [{}, {"COLUMNS": "20"}, {"FORCE_COLOR": "1"}])
def test_no_cell_is_cut_folded_or_coloured_outside_a_terminal(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cell = "a path " + "x" * 5000
    assert table("ll", [("1", cell)], ("step", "where")).splitlines()[1] == f"  1     {cell}"


def test_brackets_and_colons_of_a_cell_are_its_text():
    assert table("l", [("float32[320, 32] [bold] :smile:",)]) == (
        "  float32[320, 32] [bold] :smile:"
    )


def test_wide_characters_keep_columns_aligned():
    lines = table("lr", [("漢字", "1"), ("abcd", "1")]).splitlines()
    assert cell_len(lines[0]) == cell_len(lines[1])


def test_a_terminal_shows_the_header_bold_and_cuts_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    shown = table("l", [("x" * 500,)], ("name",))
    assert "\033[1m" in shown and "x" * 500 in shown
