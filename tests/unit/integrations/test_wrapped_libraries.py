"""Parts of the integrations that need no ranks: errors of an import, and a stream's position under Lightning."""

from __future__ import annotations

import pytest
from torch.utils.data import IterableDataset

import paceline
from paceline.integrations.wrapped_models import missing_library


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'lightning'"), "which is not installed"),
        (
            ImportError("cannot import name 'DDPStrategy'"),
            "whose installed version does not fit: cannot import name",
        ),
    ],
)
def test_a_library_of_another_version_is_not_called_missing(error, reason):
    message = str(missing_library("paceline.integrations.lightning", "lightning", error))
    assert f"needs lightning, {reason}" in message


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_the_batch_that_lightning_fetched_ahead_is_not_behind_the_saved_position():
    stream_loader = pytest.importorskip("paceline.integrations.lightning")._StreamLoader

    def loader():
        return stream_loader(paceline.Loader(Numbers(), batch_size=2, stream="whole", shuffle=False))

    first = loader()
    batches = iter(first)
    taken = [next(batches).tolist() for _ in range(3)]
    assert taken == [[0, 1], [2, 3], [4, 5]]
    state = first.state_dict()  # Lightning trains on the second while it holds the third
    resumed = loader()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[4, 5], [6, 7], [8, 9]]
