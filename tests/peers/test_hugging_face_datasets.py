"""`paceline.Loader` and `PacelineTrainer` on data sets of Hugging Face's `datasets`, map-style and streamed."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_transformers_trainer import largest_gap, trainer_of, weights

import hugging_face as hf
import paceline


def dataset(number=13):
    """Return lines with a further column, which the model does not accept."""
    import datasets

    datasets.disable_progress_bars()
    rows = [
        {"input_ids": line["input_ids"].tolist(), "number": at} for at, line in enumerate(hf.lines(number))
    ]
    return datasets.Dataset.from_list(rows)


def numbers(samples):
    return torch.tensor([int(sample["number"]) for sample in samples])


def loader_of(kind):
    if kind == "map":
        return paceline.Loader(dataset(), batch_size=2, collate_fn=numbers)
    stream = dataset().to_iterable_dataset(num_shards=2).shuffle(seed=4, buffer_size=5)
    return paceline.Loader(stream, batch_size=2, block=2, stream="whole", collate_fn=numbers)


def served(loader, steps=None):
    """Return what each of the next steps serves this rank."""
    found = []
    for batch in loader:
        found.append(batch.tolist() if batch.samples else [])
        if len(found) == steps:
            break
    return found


def serve_and_resume(rank, size, kind):
    loader = loader_of(kind)
    first = served(loader, 2)
    state = loader.state_dict()
    again = loader_of(kind)
    again.load_state_dict(state)
    rest = served(again)
    assert first + rest == served(loader_of(kind))
    return sorted(itertools.chain(*first, *rest))


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_every_row_is_served_once_and_resumed(pool, kind):
    assert sorted(itertools.chain(*pool(3, "paceline").run(serve_and_resume, kind))) == list(range(13))


def trained(rank, size, kind, folder):
    with hf.launched(rank, size):
        data = dataset()
        if kind == "stream":
            data = data.to_iterable_dataset(num_shards=2)
        options = {"max_steps": 2, "remove_unused_columns": True, "per_device_train_batch_size": 4 // size}
        trainer = trainer_of(folder, "sharded", data=data, gradient_accumulation_steps=1, **options)
        trainer.train()
        return [param.double() for param in weights(trainer)]


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_trainer_learns_the_same_on_any_number_of_ranks(pool, tmp_path, kind):
    found = pool(2, "paceline").run(trained, kind, str(tmp_path))[0]
    assert largest_gap(found, trained(0, 1, kind, str(tmp_path))) < 1e-6
