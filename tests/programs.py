"""The folder of compiled programs of all processes of the tests, which outlives the run: XLA's keys
are of a program's content, its options and the compiler's version."""

import os
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
CLEARED = FOLDER / "cleared"
"""Its time is that of the last look at the programs."""


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
    """Remove programs since the last look that are not whole, since jax neither replaces them nor
    refuses them in silence, and all where they have become many. Other runs may do so too."""
    began, last = time.time(), _stat(CLEARED).st_mtime
    sizes = {file: _stat(file) for file in FOLDER.glob("*-cache")}
    if sum(size.st_size for size in sizes.values()) > MOST:
        shutil.rmtree(FOLDER, ignore_errors=True)
        return
    for file, size in sizes.items():
        if size.st_mtime >= last and not _is_whole(file):
            file.unlink(missing_ok=True)
    if FOLDER.is_dir():
        CLEARED.touch()
        os.utime(CLEARED, (began, began))


def _stat(file):
    """What is known of a file; all zeros where it is gone."""
    try:
        return file.stat()
    except FileNotFoundError:
        return os.stat_result([0] * 10)


def _is_whole(file):
    """True unless a file is no zstandard frame up to its end, which a stream's reader passes
    over."""
    reader = zstandard.ZstdDecompressor().decompressobj()
    try:
        with file.open("rb") as packed:
            while part := packed.read(1 << 20):
                reader.decompress(part)
    except FileNotFoundError:
        return True  # another run removed it
    except zstandard.ZstdError:
        return False
    return reader.eof
