import re
import subprocess
import sys

import pytest

from maxstack import cli
from maxstack.errors import ConfigError, DataError


def raising(error: BaseException):
    def command(argv):
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("a: wrong\nb: wrong"), 1, "error: a: wrong\nerror: b: wrong\n"),
        (DataError("file x is empty"), 2, "error: file x is empty\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(2), 1, ""),
        (SystemExit(0), 0, ""),
        (SystemExit(None), 0, ""),
        (SystemExit(42), 42, ""),
        (SystemExit("stopped"), 1, "stopped\n"),
    ],
)
def test_an_error_becomes_its_exit_code_and_one_paragraph(capsys, error, code, told):
    assert cli.run(raising(error), []) == code
    assert capsys.readouterr().err == told


def test_a_bug_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        cli.run(raising(ZeroDivisionError()), [])


def test_an_unknown_command_names_the_nearest(capsys):
    assert cli.main(["trian"]) == 1
    names = ", ".join(cli.COMMANDS)
    assert (
        capsys.readouterr().err
        == f"error: no command trian; the commands are {names}; did you mean train?\n"
    )


def test_help_lists_every_command_with_a_line_and_an_example(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert (
        all(f"{name} " in text and line in text for name, (_, line) in cli.COMMANDS.items())
        and "example: maxstack train" in text
    )


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly():
    command = [sys.executable, "-m", "maxstack.cli", "config", "schema"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        told = process.stderr.read()
        assert (process.wait(), told) == (141, "")


@pytest.mark.parametrize(
    "command",
    [
        ["import", "x" * 300, "--out", "o"],
        ["export", "x" * 300, "--out", "o"],
        ["config", "show", "file/c.yml"],
        ["score", "x" * 300, "--tokens", "file", "--out", "o.npz"],
    ],
)
def test_a_path_that_cannot_be_is_one_sentence(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert cli.main(command) == 1
    assert re.match(
        r"error: .*(too long|ot a directory|no .*file|no such folder)",
        capsys.readouterr().err.splitlines()[-1],
    )
