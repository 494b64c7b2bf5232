"""Callbacks of futures of collectives."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading, time
import torch
from paceline.backends.async_work import CollectiveWork

work, begun = CollectiveWork([torch.ones(1)]), threading.Event()

def callback(future):
    begun.set()
    time.sleep(0.5)
    {then}
    print("returned", flush=True)

work.get_future().then(callback)
threading.Thread(target=work.finish, daemon=True).start()
begun.wait()
"""


@pytest.mark.parametrize("then", ["pass", "work.get_future().then(lambda _: None)"])
def test_a_callback_returns_before_the_interpreter_ends(then):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(then=then)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "returned\n", "")
