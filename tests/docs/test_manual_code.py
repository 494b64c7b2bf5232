"""The Python of the manual runs: every block in a world of one, a page's blocks one after another.

A block that can't run here says why: `<!-- not run: needs two hosts -->` stands before it.
"""

from __future__ import annotations

import ast
import shutil

import pytest
import torch.distributed as dist
from manual import PAGES, ROOT, blocks, name
from prelude import names

import paceline
from hugging_face import separate_process

PYTHON = {page: [block for block in blocks(page) if block.language == "python"] for page in PAGES}
FILES = {
    "docs/profile.md": {
        "profile.json": "tests/docs/profile.json",
        "last-week.json": "benchmarks/collectives/fit/profile.json",
    },
    "docs/step-time.md": {"profile.json": "tests/docs/profile.json"},
}


@pytest.fixture
def world_of_one(tmp_path, monkeypatch):
    """An empty folder to work in, and a world that torch.distributed can be started in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_INIT_METHOD", f"file://{tmp_path}/meet")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    with separate_process():
        yield
    paceline.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.run for block in PYTHON[page])], ids=name
)
def test_the_python_of_a_page_runs(page, world_of_one):
    for there, here in FILES.get(name(page), {}).items():
        shutil.copy(ROOT / here, there)
    known = names()
    for block in PYTHON[page]:
        if block.run:
            text = "\n" * block.line + block.text
            exec(compile(text, name(page), "exec"), known)


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON[page]], ids=name)
def test_code_that_is_not_run_parses(page):
    for block in PYTHON[page]:
        ast.parse(block.text, block.place)
