"""A program that ends while other ranks have not written their part of a checkpoint: it waits, but not for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from checkpoint_places import Place, save

_PROGRAM = """
import sys, time, logging
from functools import partial
import torch
from checkpoint_places import Place
from paceline.checkpoint import background_saver
from paceline.checkpoint.checkpoint_contents import CheckpointContents
from paceline.checkpoint.storage import remote_attempt
from pathlib import Path
from written_checkpoints import state_of

url, cache, is_local, seconds = sys.argv[1:]
background_saver._EXIT_SECONDS = remote_attempt._EXIT_SECONDS = float(seconds)
logging.basicConfig(level=logging.WARNING, format="%(message)s")
store = Place(url, {}, Path(cache), is_local == "True").store()
store.prepare()
lock = store.lock()
shared = {"container": "safetensors", "aliases": {}, "optimizers": {}}
save = background_saver.BackgroundSave(
    partial(store.begin, 7, "mark"),
    CheckpointContents(state_of({"model.a": torch.ones(3)}), {}, shared, {}),
    {"step": 7, "facts": {}, "written": {}, **shared},
    began=time.perf_counter(), rank=0, ranks=3, remove_old=lambda: None, unchanged={}, earlier="", lock=lock,
)
assert not save.wait_written()
print("written", flush=True)
raise RuntimeError("a peer is lost")
"""


@contextmanager
def program(place: Place, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Rank 0 of three, the only one that writes, once it has written its part and ends."""
    words = [place.url, str(place.cache), str(place.is_local), str(seconds)]
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("kind", ["local", "file"])
def test_it_gives_up_once_says_so_and_leaves_what_was_complete(make_place, kind):
    place = make_place(kind)
    store = place.store()
    store.prepare()
    with closing(store.lock()):
        save(store, 5)
    with program(place, 0.5) as process:
        _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert error.count("the checkpoint of step 7 is lost, and earlier ones stay: rank ") == 1
    assert "has not written its part within 0.5 s of the end of this program" in error
    assert place.store().names() == ["step-00000005"]
    again = place.store()
    again.prepare()
    with closing(again.lock()):
        again.remove_incomplete()
    assert again.names() == ["step-00000005"]


@pytest.mark.parametrize("kind", ["local", "file"])
def test_it_can_be_interrupted(make_place, kind):
    place = make_place(kind)
    with program(place, 1e6) as process:
        for _ in range(600):  # the first may arrive before it waits
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=0.2)
                break
    assert process.returncode is not None
    assert place.store().names() == []
