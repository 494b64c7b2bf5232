"""Hub and workers of these tests share the key of a job, as those of a launched job do."""

from __future__ import annotations

import pytest

from paceline._core.job_key import JobKey


@pytest.fixture(autouse=True)
def job_key(monkeypatch: pytest.MonkeyPatch) -> JobKey:
    key = JobKey.generate()
    for name, value in key.environment().items():
        monkeypatch.setenv(name, value)
    return key
