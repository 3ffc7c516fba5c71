"""Rewards that try to leave their sandbox, for test_sandbox.py."""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

_PIDFD_GETFD, _PTRACE_SEIZE, _GET_KEYRING_ID, _SESSION = 438, 0x4206, 0, -3
_KEYCTL = {"x86_64": 250, "aarch64": 219}


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
    environments = b""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(PermissionError):
            environments += path.read_bytes()
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


def intrudes(prompt, completion, row):
    """What a program that it begins takes from the processes around it."""
    done = subprocess.run([sys.executable, __file__], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def intrude():
    """Files that others hold, and their memory, descriptors and registers; process 1 is
    bubblewrap's, which may hold /dev/null and what tells it of an end."""
    found = dict.fromkeys(("files", "memory", "descriptors", "traced"), 0)
    library = ctypes.CDLL(None)
    for pid in {int(path.name) for path in Path("/proc").glob("[0-9]*")} - {os.getpid()}:
        with contextlib.suppress(PermissionError):
            held = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
            found["files"] += len(held - {"/dev/null", "anon_inode:[eventfd]"})
        if pid == 1:
            continue
        with contextlib.suppress(PermissionError), open(f"/proc/{pid}/mem", "r+b", 0):
            found["memory"] += 1
        handle = os.pidfd_open(pid)
        numbers = range(64)
        taken = [library.syscall(_PIDFD_GETFD, handle, number, 0) >= 0 for number in numbers]
        found["descriptors"] += sum(taken)
        found["traced"] += library.ptrace(_PTRACE_SEIZE, pid, None, None) == 0
    return found


def adds(prompt, completion, row):
    """An answer to what is asked next."""
    threading.Timer(0.1, forge).start()
    return 1.0


def forges(prompt, completion, row):
    """An answer of its own beside the one that follows."""
    forge()
    return 0.0


def forge(**keys):
    for each in gc.get_objects():
        if type(each).__name__ == "Channel":
            with contextlib.suppress(EOFError):
                each.send({"value": 1000.0, "components": {}, **keys})


def lies(prompt, completion, row):
    """An answer to its own request that is not one of a reward."""
    frame = sys._getframe()
    while "request" not in frame.f_locals:
        frame = frame.f_back
    forge(id=frame.f_locals["request"]["id"], **row)


def plants(prompt, completion, row):
    """Code that Python outside of virtual environments runs whenever it starts."""
    folder = Path(f"/tmp/.local/lib/python3.{sys.version_info.minor}/site-packages")
    folder.mkdir(parents=True)
    (folder / "usercustomize.py").write_text("print('planted')")
    words = [os.path.realpath(sys.executable), "-c", ""]
    return float(len(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout))


def stops(prompt, completion, row):
    """The clock of its worker."""
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(60)


def waits(prompt, completion, row):
    time.sleep(2.5)
    return 1.0


def session(*_):
    """The number of the keyring of the session, negative where there is none."""
    call = _KEYCTL.get(os.uname().machine, -1)
    return float(ctypes.CDLL(None).syscall(call, _GET_KEYRING_ID, _SESSION, 0))


if __name__ == "__main__":
    print(json.dumps(intrude()))
