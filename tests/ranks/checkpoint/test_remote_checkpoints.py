"""`Checkpoint` on ranks that save to a URL: resumed runs, what torch reads, and failures."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import paceline
from checkpoint_places import Place
from faulty_proxy import FaultyProxy
from paceline.checkpoint.storage import file_system
from paceline.checkpoint.storage.remote_folder import RemoteFolder
from paceline.errors import CheckpointError, UsageError
from rank_pool import RankError

KINDS = ["file", "sftp", "s3"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 300), nn.Linear(300, 1)

    def forward(self, x):
        return self.last(nn.functional.dropout(torch.tanh(self.first(x)), 0.25))


def train(rank, size, place: Place, stop=None, sync="sharded", **options):
    """Train for two epochs or up to a step; return losses, weights and the next random number."""
    paceline.init()
    torch.manual_seed(0)
    model = paceline.DataParallel(Net().double(), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
    data = torch.randn(61, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loader, losses = paceline.Loader(data, 4), []
    store = RemoteFolder(place.url, options=place.options, cache=place.cache)
    checkpoint = paceline.Checkpoint(store, model, optim, loader, every=3, **options)
    for batch in checkpoint.resume(loader, epochs=2):
        loss = model(batch).square().mean()
        model.backward(loss, samples=batch.samples)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item() * batch.samples)
        if checkpoint.step == stop:
            break
    checkpoint.close()
    return losses, [param.clone() for param in model.whole_parameters()], torch.rand(1).item()


def remote(place: Place) -> RemoteFolder:
    return place.store(reads_cache=False)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_from_a_url_is_bitwise_equal(pool, make_place, kind):
    whole = pool(2, "paceline").run(train, make_place(kind))
    place = make_place(kind)
    first = pool(2, "paceline").run(train, place, 8)
    rest = pool(2, "paceline").run(train, place)
    for rank in range(2):
        losses, weights, number = whole[rank]
        assert first[rank][0][:6] + rest[rank][0] == losses
        assert all(torch.equal(*pair) for pair in zip(rest[rank][1], weights, strict=True))
        assert rest[rank][2] == number
    assert len(remote(place).names()) == 2
    assert not [name for name in remote(place)._files.list() if not name.startswith("step-")]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_continues_on_other_numbers_of_ranks(pool, make_place, kind):
    place = make_place(kind)
    pool(3, "paceline").run(train, place, 3)
    pool(1, "paceline").run(train, place, 6)
    [(losses, *_), _] = pool(2, "paceline").run(train, place)
    assert remote(place).names()
    assert losses


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["memory", "file", "s3"])  # torch wants readinto(), which sshfs lacks
def test_torch_reads_a_dcp_checkpoint_from_its_url(make_place, kind):
    place = make_place(kind)
    model = Net()
    checkpoint = paceline.Checkpoint(place.store(), model, format="dcp")
    checkpoint.save(wait=True)
    checkpoint.close()
    location = remote(place).files("step-00000000").location
    state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    reader = FsspecReader(location, **place.options)
    dcp.load(state, storage_reader=reader, no_dist=True)
    for name, value in model.state_dict().items():
        assert torch.equal(state["model"][name], value), name


def other_rank_sees_another_place(rank, size, place: Place):
    paceline.init()
    url = place.url if rank == 0 else place.url + "-other"
    paceline.Checkpoint(RemoteFolder(url, options=place.options, cache=place.cache), Net())


def test_ranks_that_see_different_places_are_named(pool, make_place):
    place = make_place("file")
    with pytest.raises(RankError, match="its files are not there on rank 1"):
        pool(2).run(other_rank_sees_another_place, place)
    assert not [name for name in remote(place)._files.list() if not name.startswith("step-")]


def saved(place: Place, step: int) -> paceline.Checkpoint:
    checkpoint = paceline.Checkpoint(place.store(), Net())
    checkpoint.step = step
    checkpoint.save(wait=True)
    return checkpoint


def test_a_second_run_is_refused(make_place):
    place = make_place("file")
    checkpoint = saved(place, 1)
    with pytest.raises(CheckpointError, match="in use by this run"):
        paceline.Checkpoint(place.store(), Net())
    checkpoint.close()


def test_a_url_that_cant_be_opened_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="nothing://bucket/run"):
        paceline.Checkpoint("nothing://bucket/run", Net())
    assert list(Path().iterdir()) == []


def test_training_goes_on_while_the_store_is_away(make_place, s3, monkeypatch, caplog):
    with FaultyProxy(s3.port) as proxy:
        place = make_place("s3")
        through = Place(place.url, s3.options(proxy.port), place.cache)
        checkpoint = saved(through, 1)
        proxy.refuse()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(file_system, "RETRY_SECONDS", 1.0)
            checkpoint.step = 2
            checkpoint.save()
            checkpoint.wait()
        assert "the checkpoint of step 2 can't be written" in caplog.text
        assert "training continues" in caplog.text
        proxy.accept()
        assert place.store().names() == ["step-00000001"]
        checkpoint.step = 3
        checkpoint.save(wait=True)
        proxy.refuse()  # and is back in time
        timer = threading.Timer(2.0, proxy.accept)
        timer.start()
        checkpoint.step = 4
        checkpoint.save(wait=True)
        timer.join()
        checkpoint.close()
        assert place.store().names() == ["step-00000004", "step-00000003"]
