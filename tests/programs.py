"""The folder of compiled programs of all processes of the tests, which outlives the run: XLA's keys
are of a program's content, its options and the compiler's version."""

import shutil
import sys
import time
from pathlib import Path

import zstandard

FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "programs"
MOST = 4 << 30
"""Bytes after which the folder begins anew."""
LEAST = 0.05
"""Seconds to compile from which a program is kept: reading one takes some milliseconds."""
_BEGAN = time.time()


def read_from(folder):
    """Let jax, where it is imported, read and keep compiled programs in a folder, or in none."""
    if not (jax := sys.modules.get("jax")):
        return
    from jax.experimental.compilation_cache import compilation_cache

    from maxstack.hardware.compiling import keep_programs

    changes = jax.config.jax_compilation_cache_dir != folder
    keep_programs(folder)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST)
    if changes:
        compilation_cache.reset_cache()


def clear():
    """Remove programs of this run that are not whole, since jax neither replaces nor refuses them
    in silence, and all of them where they have become many."""
    files = [*FOLDER.glob("*-cache")]
    if sum(file.stat().st_size for file in files) > MOST:
        shutil.rmtree(FOLDER)
        return
    for file in files:
        if file.stat().st_mtime >= _BEGAN and not _is_whole(file):
            file.unlink()


def _is_whole(file):
    try:
        with file.open("rb") as packed, zstandard.open(packed) as whole:
            while whole.read(1 << 20):
                pass
    except (zstandard.ZstdError, EOFError):
        return False
    return file.stat().st_size > 0
