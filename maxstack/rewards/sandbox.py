"""A sandbox for the processes of rewards: without network, environment and home, by bubblewrap
(github.com/containers/bubblewrap) and Linux's namespaces. It is no virtual machine: the kernel is
shared."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import maxstack
from maxstack.errors import ConfigError, shortened

SYSTEM = (
    "/usr /bin /sbin /lib /lib32 /lib64 /nix/store /etc/alternatives /etc/localtime "
    "/etc/ld.so.cache /etc/ld.so.conf /etc/ld.so.conf.d"
)
"""Paths of the system that programs need; those that are missing are left out."""
SCRATCH = 1 << 28
"""Bytes of /tmp and of /dev/shm, which alone can be written to; they are memory."""
_TRIAL = 60.0
"""Seconds in which a first sandbox must have begun and ended."""


def prefix() -> list[str]:
    """Return the words before a command that run it in a sandbox, which can read the system's
    programs, Python's packages and the working folder. ConfigError where none can begin."""
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError(
            "rollout.sandbox: needs bubblewrap, which is not installed: apt install bubblewrap, or "
            "dnf install bubblewrap; or, for rewards that you trust with your files, network and "
            "environment, set it to false"
        )
    words = [
        program,
        *"--unshare-all --die-with-parent --cap-drop ALL --proc /proc --dev /dev".split(),
        *f"--size {SCRATCH} --tmpfs /dev/shm --size {SCRATCH} --tmpfs /tmp".split(),
    ]
    for path in SYSTEM.split():
        words += ["--ro-bind-try", path, path]
    places = _import_paths()
    whole = {*places.values()}
    # A folder inside another one comes with it.
    for real in sorted(whole):
        if not whole.intersection(map(str, Path(real).parents)):
            words += ["--ro-bind", real, real]
    for path, real in places.items():
        if path != real and not whole.intersection(map(str, Path(path).parents)):
            # Under the name by which Python knows it, since sys.path has that.
            words += ["--symlink", real, path]
    # Read-only last: mount points and links are made in / before.
    words += [*"--remount-ro /dev --remount-ro / --chdir".split(), os.getcwd(), "--"]
    # Tried once here: a kernel that refuses namespaces would end every worker with a bare exit
    # code.
    _check(words)
    return words


def environment() -> dict[str, str]:
    """Return all environment variables of the processes in a sandbox."""
    package = str(Path(maxstack.__file__).parent.parent)
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONPATH": package,
        "PYTHONNOUSERSITE": "1",  # in the scratch one call could plant code for the next
    }


def _import_paths() -> dict[str, str]:
    """Map each path that code is imported from to its real path. ConfigError where the home lies in
    one of them."""
    package = str(Path(maxstack.__file__).parent.parent)
    found = {os.getcwd(), sys.prefix, sys.base_prefix, package, *sys.path} - {""}
    places = {os.path.abspath(path): os.path.realpath(path) for path in found}
    home = Path.home().resolve()
    for real in places.values():
        if home.is_relative_to(real):
            raise ConfigError(
                f"rollout.sandbox: code is imported from {real}, so rewards would see your home, "
                f"{home}; start in a folder that holds no more than they may read"
            )
    return {path: real for path, real in places.items() if os.path.exists(real)}


def _check(words: list[str]) -> None:
    """ConfigError where a sandbox cannot begin."""
    try:
        subprocess.run(
            [*words, sys.executable, "-S", "-E", "-c", ""],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=_TRIAL,
            env=environment(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = " ".join(f"{getattr(error, 'stderr', None) or error}".split())
        raise ConfigError(
            f"rollout.sandbox: {shortened(said, 300)}; the kernel, or the container around this "
            "process, must allow namespaces of users (sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu, a seccomp profile with "
            "unshare and mount in Docker)"
        ) from error
