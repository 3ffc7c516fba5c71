"""Arrays of .npz files, of which each entry may be compressed."""

import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

from maxstack.config import storage
from maxstack.data.copies import check_growth
from maxstack.data.files import one_line
from maxstack.errors import DataError


def read_arrays(path: str, names: Sequence[str], most: int | None = None) -> list[np.ndarray]:
    """Return the arrays of these names. DataError if the file cannot be read, has others, or would
    become more than `most` bytes, by default more than `copies.limit_growth` allows."""
    try:
        with storage.open_file(path) as file:
            with zipfile.ZipFile(file) as held:
                compressed = sum(entry.compress_size for entry in held.infolist())
                size = sum(entry.file_size for entry in held.infolist())
            check_growth(path, compressed, size, most)
            with np.load(file, allow_pickle=False) as arrays:
                return [arrays[name] for name in names]
    except KeyError as error:
        raise DataError(f"{path}: {error.args[0]}; it must hold {' and '.join(names)}") from error
    except DataError:
        raise
    except (OSError, ValueError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not a readable .npz file: {one_line(error)}") from error
