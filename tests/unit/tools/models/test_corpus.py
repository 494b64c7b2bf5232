"""Corpora: sources, held-out parts, and refused data."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import UsageError
from paceline.tools.models import corpus as corpora
from paceline.tools.models.corpus import Corpus


def held_together(corpus):
    return bytes(corpus.train) + bytes(corpus.held_out)


def test_standard_library_is_real_text_and_the_same_each_time():
    one, two = corpora.load_corpus(), corpora.load_corpus()
    assert one.fingerprint == two.fingerprint
    assert one.vocabulary == 256
    assert "standard library" in one.name
    assert 2_000_000 < len(one.train) + len(one.held_out) <= corpora.STDLIB_NBYTES
    assert len(one.held_out) == pytest.approx(len(one.train) / 9, rel=1e-3)
    text = held_together(one).decode(errors="replace")
    assert text.count("\ndef ") > 1000


def test_standard_library_keeps_whole_files_under_its_limit():
    root = Path(sysconfig.get_path("stdlib"))
    text = held_together(corpora.standard_library(limit_nbytes=300_000))
    assert len(text) <= 300_000
    (dataclasses,) = [path.read_bytes() for path in root.glob("dataclasses.py")]
    everything = held_together(corpora.standard_library(limit_nbytes=10**9))
    assert dataclasses in everything
    assert everything.startswith(text)


def test_file_is_mapped_and_split_once(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(100)) * 10)
    corpus = corpora.load_corpus(path)
    assert isinstance(corpus.train, np.memmap)
    assert held_together(corpus) == path.read_bytes()
    assert (len(corpus.train), len(corpus.held_out)) == (900, 100)


def test_folder_reads_text_in_order_of_path(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("two ")
    (tmp_path / "a.txt").write_text("one ")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "z.md").write_text("three")
    assert held_together(corpora.load_corpus(tmp_path)) == b"one two three"


def test_token_file_knows_its_vocabulary(tmp_path):
    path = tmp_path / "words.bin"
    np.array([5, 300, 7] * 20, dtype="<u2").tofile(path)
    corpus = corpora.load_corpus(path)
    assert corpus.vocabulary == 301
    assert not corpus.is_text
    assert (len(corpus.train), len(corpus.held_out)) == (54, 6)
    assert corpus.decode([5, 300]) == "5 300"


@pytest.mark.parametrize("name", [".", "train.bin"])
def test_nanogpt_folder_holds_out_its_val_bin(tmp_path, name):
    np.arange(40, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(90, 99, dtype="<u2").tofile(tmp_path / "val.bin")
    corpus = corpora.load_corpus(tmp_path / name)
    assert list(corpus.train) == list(range(40))
    assert list(corpus.held_out) == list(range(90, 99))
    assert corpus.vocabulary == 99


def test_fingerprint_changes_with_a_byte_a_moved_split_and_a_type(tmp_path):
    tokens = np.zeros(1000, np.uint8)
    changed = tokens.copy()
    changed[500] = 1
    corpus = Corpus("a", tokens[:900], tokens[900:])
    assert corpus.fingerprint == Corpus("b", tokens[:900], tokens[900:]).fingerprint
    assert corpus.fingerprint != Corpus("a", changed[:900], changed[900:]).fingerprint
    assert corpus.fingerprint != Corpus("a", tokens[:800], tokens[800:]).fingerprint
    wide = tokens.astype(np.uint16)
    assert corpus.fingerprint != Corpus("a", wide[:900], wide[900:]).fingerprint


def test_text_there_and_back():
    corpus = Corpus("a", np.zeros(1, np.uint8), np.zeros(1, np.uint8))
    assert corpus.decode(corpus.encode("für ☂")) == "für ☂"
    assert corpus.decode([255, 65]) == "�A"


def empty(tmp_path):
    (tmp_path / "empty.txt").touch()
    return tmp_path / "empty.txt"


def odd(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"123")
    return tmp_path / "odd.bin"


def no_text(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    return tmp_path


def not_there(tmp_path):
    return tmp_path / "nowhere"


def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (empty, "empty file"),
        (odd, "3 bytes: not whole 16-bit"),
        (no_text, "holds no text"),
        (not_there, "no such file or folder"),
        (pipe, "no such file or folder"),
    ],
)
def test_unreadable_data_is_refused(tmp_path, make, message):
    with pytest.raises(UsageError, match=message):
        corpora.load_corpus(make(tmp_path))


def test_folder_that_is_too_large_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x" * 11)
    monkeypatch.setattr(corpora, "FOLDER_NBYTES", 10)
    with pytest.raises(UsageError, match="join its files"):
        corpora.load_corpus(tmp_path)


def test_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UsageError, match="no Python sources"):
        corpora.load_corpus()


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [
        (10 * 3 + 1, 100, None),
        (10 * 8 + 1, 11, None),
        (10 * 8 + 1, 10, "holds out 10 tokens"),
        (10 * 8, 100, "7 windows of 10, but 4 ranks x 2 windows"),
        (10 * 3 + 1, 100, "more ranks than data: 4 ranks, but a has 31 tokens to train on, 3 windows"),
        (0, 0, "more ranks than data"),
    ],
)
def test_check_names_missing_requirements(train, held_out, message):
    corpus = Corpus("a", np.zeros(train, np.uint8), np.zeros(held_out, np.uint8))
    if message is None:
        corpora.check_corpus(corpus, batch=1, context=10, ranks=3)
    else:
        with pytest.raises(UsageError, match=message):
            corpora.check_corpus(corpus, batch=2, context=10, ranks=4)
