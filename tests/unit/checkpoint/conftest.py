"""Fixtures of tests of checkpoints, see place_fixtures.py."""

from __future__ import annotations

from place_fixtures import make_place, memory, place, s3, sftp_session  # noqa: F401
