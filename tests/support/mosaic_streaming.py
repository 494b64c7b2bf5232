"""Mosaic's StreamingDataset in ranks of the tests.

Its package imports torchvision for classes of image data sets that no test uses, and a torchvision that fits every
torch can't be installed. So `streaming.base`, which has everything else, is imported without the package's own
`__init__`.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import importlib
import importlib.util
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["installed", "streaming_base", "streaming_ranks"]


def installed() -> bool:
    """Return whether Mosaic's streaming, and what it imports, are installed."""
    return all(
        importlib.util.find_spec(name) for name in ("streaming", "catalogue", "brotli", "snappy", "zstd")
    )


def streaming_base() -> Any:
    """Return the module `streaming.base`."""
    if "streaming" not in sys.modules:
        spec = importlib.util.find_spec("streaming")
        package = ModuleType("streaming")
        package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations)
        sys.modules["streaming"] = package
    return importlib.import_module("streaming.base")


@contextmanager
def streaming_ranks(folder: Path) -> Iterator[Any]:
    """Provide `streaming.base` on a rank; afterwards nothing of its data sets is left, in memory or in files.

    Args:
        folder: the same on all ranks; it gives its name to a folder for the files by which they exclude each other.
            That one has a short path, since it also holds the sockets by which workers send batches.
    """
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir(), f"mosaic-{name}")
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    folder.mkdir(exist_ok=True)
    logging.getLogger("streaming").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield streaming_base()
    finally:
        tempfile.tempdir = before
        gc.collect()  # data sets of this case, whose iterators' threads have ended
        shared_memory = importlib.import_module("streaming.base.shared.memory").SharedMemory
        for each in gc.get_objects():
            if isinstance(each, shared_memory):
                each.cleanup()
                atexit.unregister(each.cleanup)
        shutil.rmtree(folder, ignore_errors=True)
