"""Rewards that try to leave their sandbox, for test_sandbox.py."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def reaches(prompt, completion, row):
    """A server of the machine, by its address or by an abstract name."""
    found = 0.0
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", row["port"])),
        (socket.AF_UNIX, f"\0{row['name']}"),
    ):
        with socket.socket(family) as end:
            end.settimeout(5)
            found += not end.connect_ex(address)
    return found


def looks(prompt, completion, row):
    """Secrets of the process that began it, and of the home."""
    environments = b"".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/environ"))
    return {
        "environment": row["secret"].encode() in environments or row["secret"] in str(os.environ),
        "file": os.path.exists(row["file"]),
        "home": os.path.exists(row["home"]),
        "processes": len([*Path("/proc").glob("[0-9]*")]) > 4,
    }


def writes(prompt, completion, row):
    """1 for each place outside of the scratch that it can write to."""
    found = {}
    for folder in (row["folder"], os.getcwd(), sys.prefix, "/", "/usr", "/dev", "/etc", "/proc"):
        try:
            Path(folder, "written").write_text("x")
        except OSError:
            found[folder] = 0.0
        else:
            found[folder] = 1.0
    with tempfile.TemporaryFile() as file:
        file.write(b"x")
    return found


def fills(prompt, completion, row):
    """Without end."""
    for folder in ("/tmp", "/dev/shm"):
        try:
            with open(f"{folder}/all", "wb") as file:
                while True:
                    file.write(bytes(1 << 24))
        except OSError:
            assert os.path.getsize(f"{folder}/all") <= 1 << 28
            os.unlink(f"{folder}/all")
    raise OSError("full")


def bombs(prompt, completion, row):
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.01)


def shares(prompt, completion, row):
    """Three processes of which each has less than the limit."""
    eat = "import time; all = bytearray(150 << 20); time.sleep(60)"
    for each in [subprocess.Popen([sys.executable, "-S", "-c", eat]) for _ in range(3)]:
        each.wait()


def begins(prompt, completion, row):
    """The output of a program, as a reward of code has it."""
    words = [sys.executable, "-c", completion]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(done.stdout)
