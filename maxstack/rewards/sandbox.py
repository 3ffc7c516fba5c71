"""A place for the processes of rewards without network, environment and home, which bubblewrap
(github.com/containers/bubblewrap) makes of Linux's namespaces. The kernel is shared: it is no
virtual machine."""

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
"""What programs need of the system, where it is there."""
SCRATCH = 1 << 28
"""Bytes of /tmp and of /dev/shm, the only places where files can be written; they are memory."""
_ANSWER = 60.0
"""Seconds in which a sandbox must have begun and ended."""


def prefix() -> list[str]:
    """The words before a command that run it in a sandbox, which reads the system's programs,
    Python's packages and the working folder. ConfigError where there is none, with the reason."""
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError(
            "rollout.sandbox: needs bubblewrap, which is not installed: apt install bubblewrap, or "
            "dnf install bubblewrap; or leave the sandbox out, for rewards that you trust with "
            "your files, network and environment"
        )
    words = [
        program,
        *"--unshare-all --die-with-parent --cap-drop ALL --proc /proc --dev /dev".split(),
        *f"--size {SCRATCH} --tmpfs /dev/shm --size {SCRATCH} --tmpfs /tmp".split(),
    ]
    for path in SYSTEM.split():
        words += ["--ro-bind-try", path, path]
    places = _imported()
    whole = {*places.values()}
    for real in sorted(whole):
        if not whole.intersection(map(str, Path(real).parents)):
            words += ["--ro-bind", real, real]
    for path, real in places.items():
        if path != real and not whole.intersection(map(str, Path(path).parents)):
            words += ["--symlink", real, path]
    words += [*"--remount-ro /dev --remount-ro / --chdir".split(), os.getcwd(), "--"]
    _check(words)
    return words


def environment() -> dict[str, str]:
    """All variables of the processes in a sandbox."""
    package = str(Path(maxstack.__file__).parent.parent)
    found = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONPATH": package}
    return found | {"PYTHONNOUSERSITE": "1"}  # of the scratch, where one call plants for the next


def _imported() -> dict[str, str]:
    """Folders and files that code is imported from, by their paths: where each is without symbolic
    links. ConfigError where the home is in one of them."""
    package = str(Path(maxstack.__file__).parent.parent)
    found = {os.getcwd(), sys.prefix, sys.base_prefix, package, *sys.path} - {""}
    places = {os.path.abspath(path): os.path.realpath(path) for path in found}
    home = Path.home().resolve()
    for real in places.values():
        if home.is_relative_to(real):
            raise ConfigError(
                f"rollout.sandbox: code is imported from {real}, so that rewards would see your "
                f"home, {home}; start in a folder that holds no more than they may read"
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
            timeout=_ANSWER,
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
