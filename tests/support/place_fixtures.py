"""Fixtures of tests of checkpoints: places to keep them, and servers for those; imported by conftest.py."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoint_places import KINDS, Place
from s3_server import S3Server
from sftp_server import SftpServer

__all__ = ["make_place", "memory", "place", "s3", "sftp_session"]


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    pytest.importorskip("moto.server", reason="moto or flask is not installed")
    server = S3Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def sftp_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    """An SFTP server that no test kills."""
    pytest.importorskip("sshfs", reason="sshfs is not installed")
    server = SftpServer(tmp_path_factory.mktemp("sftp"))
    yield server
    server.close()


@pytest.fixture
def make_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    """`make_place("s3")` returns a new, empty place."""
    made: list[Place] = []

    def make(kind: str) -> Place:
        unique, cache = uuid.uuid4().hex[:12], tmp_path / "cache"
        if kind == "local":
            place = Place(str(tmp_path / unique), {}, cache, is_local=True)
        elif kind == "memory":
            place = Place(f"memory://{unique}/run", {}, cache)
        elif kind == "file":
            place = Place(f"file://{tmp_path}/served/{unique}/run", {}, cache)
        elif kind == "sftp":
            server = request.getfixturevalue("sftp_session")
            place = Place(f"{server.url}-{unique}", {}, cache)
        else:
            server = request.getfixturevalue("s3")
            place = Place(f"s3://{server.new_bucket()}/runs/a", server.options(), cache)
        made.append(place)
        return place

    yield make
    for place in made:
        for close in place.closers:
            close()
        if place.url.startswith("memory:"):
            import fsspec

            with contextlib.suppress(FileNotFoundError):
                fsspec.filesystem("memory").rm(place.url.rpartition("/")[0], recursive=True)
        shutil.rmtree(place.cache, ignore_errors=True)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, make_place: Callable[[str], Place]) -> Place:
    """A new place of each kind."""
    return make_place(request.param)


@pytest.fixture
def memory(make_place: Callable[[str], Place]) -> Place:
    """A new place in memory."""
    return make_place("memory")
