"""`Checkpoint` with Mosaic's StreamingDataLoader: its state is that of all ranks, and can be dealt to others."""

from __future__ import annotations

from collections import Counter

import pytest

import paceline
from loader_run import LoaderRun
from mosaic_streaming import installed, streaming_base, streaming_ranks
from paceline.errors import UsageError

pytestmark = pytest.mark.skipif(not installed(), reason="Mosaic's streaming is not installed")

SAMPLES = 48


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Two streams of 24 samples each, in shards of a few."""
    folder = tmp_path_factory.mktemp("shards")
    for number in range(2):
        with streaming_base().MDSWriter(
            out=str(folder / str(number)), columns={"x": "int"}, size_limit=100
        ) as writer:
            for sample in range(SAMPLES // 2):
                writer.write({"x": SAMPLES // 2 * number + sample})
    return folder


def train(rank, size, folder, shards, batch, stop, options):
    """Train, or return why the checkpoint is refused."""
    paceline.init()
    with streaming_ranks(folder.parent / "locks") as streaming:
        streams = [streaming.Stream(local=str(shards / str(number))) for number in range(2)]
        settings = {
            "batching_method": options.get("batching", "random"),
            "shuffle": True,
            "num_canonical_nodes": 2,
        }
        data = streaming.StreamingDataset(
            streams=streams, batch_size=batch, shuffle_block_size=1000, **settings
        )
        loader = streaming.StreamingDataLoader(data, batch_size=batch, num_workers=options.get("workers", 0))
        run = LoaderRun(folder, loader, every=options.get("every", 2))
        if options.get("refused"):
            return run.refusal()
        return run.train(epochs=2, stop=stop), run.resumed_step, run.weights


def world(size):
    """Return the environment by which Mosaic knows the ranks."""
    return [
        {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        for rank in range(size)
    ]


def run(pool, size, *arguments):
    return pool(size).run(train, *arguments, env=world(size))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("every", "stop"), [(2, 3), (6, 7), (4, 7)])
def test_every_rank_continues_with_its_next_batch(pool, tmp_path, shards, workers, every, stop):
    options = {"workers": workers, "every": every}
    whole = run(pool, 2, tmp_path / "whole", shards, 4, None, options)
    served, steps = [[], []], []
    for until in (stop, stop + 2, None):
        parts = run(pool, 2, tmp_path / "parts", shards, 4, until, options)
        steps.append(parts[0][1])
        served = [served[rank][: steps[-1]] + parts[rank][0] for rank in range(2)]
    assert steps[0] == 0 < steps[1] <= steps[2]
    for rank in range(2):
        assert served[rank] == whole[rank][0]
        assert parts[rank][2] == whole[rank][2]
        assert len(served[rank]) == 2 * SAMPLES // 8


# ------------------------------------------------------------------ another number of ranks


def global_batches(results):
    """Return the sorted numbers that all ranks got in each step."""
    return [sorted(number for row in step for number in row[1]) for step in zip(*results, strict=True)]


@pytest.mark.parametrize(("ranks", "batch"), [((2, 3, 1), (4, 4, 8)), ((3, 2, 2), (4, 6, 6))])
def test_the_rest_of_an_epoch_is_dealt_to_other_ranks(pool, tmp_path, shards, ranks, batch):
    """Every sample once; with the same number of samples per step the same samples in each step."""
    served, steps = [], []
    for size, each, stop in zip(ranks, batch, (3, 4, None), strict=True):
        options = {"every": 1, "workers": 2 if stop == 4 else 0}
        results = run(pool, size, tmp_path / "parts", shards, each, stop, options)
        steps.append(results[0][1])
        served = served[: steps[-1]] + global_batches([result[0] for result in results])
        epochs = [row[0] for row in results[0][0]]
    assert steps == [0, 2, 3]
    first = served[: len(served) - epochs.count(1)]
    assert Counter(number for numbers in first for number in numbers) == dict.fromkeys(range(SAMPLES), 1)
    if len({size * each for size, each in zip(ranks, batch, strict=True)}) == 1:
        whole = run(pool, ranks[0], tmp_path / "whole", shards, batch[0], None, {})
        assert served == global_batches([result[0] for result in whole])


@pytest.mark.parametrize("batching", ["stratified", "per_stream"])
def test_orders_of_global_batches_need_the_same_number_of_samples_per_step(pool, tmp_path, shards, batching):
    """3 ranks with 2 samples each go on as 2 ranks with 3, but not with 4."""
    options = {"batching": batching}
    first = run(pool, 3, tmp_path / "parts", shards, 2, 3, options)
    for message in run(pool, 2, tmp_path / "parts", shards, 4, None, options | {"refused": True}):
        assert (
            "the loader 'loader', a StreamingDataLoader, was saved by 3 ranks with 6 samples per step"
            in message
        )
        assert f"with batching_method={batching!r} its state can't be dealt to 2 with 8" in message
        assert "resume on 3 ranks" in message
    rest = run(pool, 2, tmp_path / "parts", shards, 3, None, options)
    whole = run(pool, 3, tmp_path / "whole", shards, 2, None, options)
    served = global_batches([result[0] for result in first])[:2] + global_batches(
        [result[0] for result in rest]
    )
    assert served == global_batches([result[0] for result in whole])


def test_an_order_of_batches_of_ranks_is_refused(pool, tmp_path, shards):
    options = {"batching": "device_per_stream"}
    run(pool, 3, tmp_path, shards, 2, 3, options)
    for message in run(pool, 2, tmp_path, shards, 3, None, options | {"refused": True}):
        assert "with batching_method='device_per_stream' its state can't be dealt to 2" in message


def bare(rank, size, folder, shards):
    paceline.init()
    with streaming_ranks(folder / "locks") as streaming:
        data = streaming.StreamingDataset(local=str(shards / "0"), batch_size=4)
        messages = []
        for objects in ([data], []):
            with pytest.raises(UsageError) as caught:
                LoaderRun(folder / f"run{len(messages)}", data, *objects).train()
            messages.append(str(caught.value))
        return messages


def test_a_dataset_without_its_loader_is_refused(pool, tmp_path, shards):
    """It does not know how many samples were used."""
    for messages in pool(2).run(bare, tmp_path, shards, env=world(2)):
        assert len(messages) == 2
        for message in messages:
            assert (
                "the state_dict() of loader, a StreamingDataset, needs num_samples and from_beginning"
                in message
            )
            assert "streaming.StreamingDataLoader" in message
