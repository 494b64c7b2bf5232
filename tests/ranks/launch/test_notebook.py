"""`paceline.launch_notebook` in a real kernel: the recipe, an error in a rank, an interrupt, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import pickle
import tempfile
import threading
import time
from pathlib import Path

import pytest

import paceline
from paceline.errors import RankFailed, UsageError
from paceline.launch.process.notebook_rank import read_pickle

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("cloudpickle")

RECIPE = Path(__file__).parents[3] / "docs" / "recipes" / "notebook.ipynb"
RANK = "paceline.launch.process.notebook_rank"
FOLDERS = os.path.join(tempfile.gettempdir(), "paceline-notebook-*")


def ranks_of(kernel):
    """Return the processes of ranks that descend from the kernel, and their folders."""
    found = []
    for path in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError):
            command = Path(path, "cmdline").read_bytes().decode().split("\0")
            parent = int(Path(path, "stat").read_text().rpartition(")")[2].split()[1])
            if RANK in command and parent == kernel:
                found.append(int(Path(path).name))
    return found


def text_of(cell):
    return "".join(each.text for each in cell.outputs if each.output_type == "stream")


@pytest.fixture
def notebook(monkeypatch):
    """Return a notebook, and a client whose kernel runs."""
    for name in ("RANK", "WORLD_SIZE", "PACELINE_INIT_METHOD"):
        monkeypatch.delenv(name, raising=False)
    before = set(glob.glob(FOLDERS))
    book = nbformat.read(RECIPE, as_version=4)
    client = nbclient.NotebookClient(
        book, timeout=120, resources={"metadata": {"path": tempfile.gettempdir()}}
    )
    with client.setup_kernel():
        kernel = client.km.provisioner.process.pid
        yield book, client, kernel
        assert not ranks_of(kernel)
    assert set(glob.glob(FOLDERS)) <= before


ADDED = '''
import time

class Divided(ValueError):
    """Raised by a rank."""

def divides(value):
    world = paceline.init(device="cpu")
    print("output of rank", world.rank)
    if world.rank == 1:
        raise Divided(value)  # this line
    torch.distributed.barrier()

def waits():
    world = paceline.init(device="cpu")
    print("rank", world.rank, "waits")
    time.sleep(100)

try:
    paceline.launch_notebook(divides, (5,))
except paceline.errors.RankFailed as error:
    print(error.rank, type(error.__cause__) is Divided, error.__cause__.args)
    print(error)
'''


def test_the_recipe_then_an_error_and_an_interrupt(notebook):
    book, client, kernel = notebook
    code = [(at, cell) for at, cell in enumerate(book.cells) if cell.cell_type == "code"]
    for at, cell in code:
        client.execute_cell(cell, at)
    losses = text_of(code[-2][1]).splitlines()
    assert [line.partition(": ")[0] for line in losses] == [f"rank 0 of 2, epoch {n}" for n in range(20)]
    assert float(losses[-1].split()[-1]) < float(losses[0].split()[-1])
    assert any("image/png" in each.get("data", {}) for each in code[-1][1].outputs)
    assert not ranks_of(kernel)

    book.cells.append(nbformat.v4.new_code_cell(ADDED))
    failed = text_of(client.execute_cell(book.cells[-1], len(book.cells) - 1))
    assert failed.startswith("output of rank 0\n1 True (5,)\n[rank 1] ")
    assert "Divided: 5" in failed
    assert "    raise Divided(value)  # this line" in failed
    assert "output of the rank:\noutput of rank 1" in failed
    assert "the other ranks (0) have been ended" in failed

    book.cells.append(nbformat.v4.new_code_cell("paceline.launch_notebook(waits)"))
    cell, ended = book.cells[-1], []

    def interrupts():
        deadline = time.monotonic() + 60
        while "waits" not in text_of(cell) and time.monotonic() < deadline:
            time.sleep(0.05)
        ended.extend(ranks_of(kernel))
        asyncio.run(client.km._async_interrupt_kernel())

    thread = threading.Thread(target=interrupts)
    thread.start()
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyboardInterrupt"):
        client.execute_cell(cell, len(book.cells) - 1)
    thread.join()
    assert text_of(cell) == "rank 0 waits\n"
    assert len(ended) == 2
    assert not any(os.path.exists(f"/proc/{rank}") for rank in ended)


def exits(rank):
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), 9)


def test_a_killed_rank_is_named(tmp_path):
    with pytest.raises(RankFailed, match="SIGKILL") as caught:
        paceline.launch_notebook(exits, (1,), nproc_per_node=2)
    assert caught.value.rank == 1


@pytest.mark.parametrize("opened", ["folder", "file", "link"])
def test_pickles_that_others_can_change_are_not_read(tmp_path, opened):
    folder = tmp_path / "meeting"
    folder.mkdir(mode=0o700)
    path = folder / "result"
    path.write_bytes(pickle.dumps("an object"))
    assert read_pickle(path) == "an object"
    if opened == "link":
        (tmp_path / "link").symlink_to(folder)
        path = tmp_path / "link" / "result"
    else:
        (folder if opened == "folder" else path).chmod(0o777)
    with pytest.raises(UsageError, match="not this user's alone"):
        read_pickle(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("given", ["folder", "file"])
def test_pickles_of_another_user_are_not_read(tmp_path, given):
    folder = tmp_path / "meeting"
    folder.mkdir(mode=0o700)
    path = folder / "result"
    path.write_bytes(pickle.dumps("an object"))
    os.chown(folder if given == "folder" else path, 65534, -1)
    with pytest.raises(UsageError, match="not this user's alone"):
        read_pickle(path)


def test_what_cannot_run_is_refused():
    with pytest.raises(UsageError, match=r"launch_notebook\(\) of a int"):
        paceline.launch_notebook(3)
    with pytest.raises(UsageError, match="nproc_per_node=0"):
        paceline.launch_notebook(print, nproc_per_node=0)
    with pytest.raises(UsageError, match=r"(?s)can't be sent to other processes.*inside the function"):
        paceline.launch_notebook(print, (threading.Lock(),))


def test_one_rank_and_output_without_an_end_of_line(capsys):
    def work():
        print("no end of line", end="")
        return os.environ["WORLD_SIZE"]

    assert paceline.launch_notebook(work, nproc_per_node=1) == "1"
    assert capsys.readouterr().out == "no end of line"
