"""Checkpoints that the run that writes them removes while others read them: a newer one is read, never wrong bytes."""

from __future__ import annotations

import pytest
import torch

from paceline.checkpoint.interop.weights_source import use_checkpoint
from paceline.checkpoint.newest_checkpoint import find_resume_point
from paceline.checkpoint.parts.state_parts import StateParts, TensorPart
from paceline.errors import DamagedCheckpoint
from written_checkpoints import write_checkpoint

NBYTES = 5 << 20  # two blocks of a download


def tensor(step, number):
    generator = torch.Generator().manual_seed(10 * step + number)
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=generator)


class Run:
    """A run that keeps one checkpoint, of two tensors, each in a file of its own."""

    def __init__(self, place):
        self.store = place.owned()
        self.step = 4
        self.save()

    def save(self):
        earlier = self.store.names()
        self.step += 1
        parts = StateParts(0)
        for number in range(2):
            part = TensorPart.whole(f"weight{number}", tensor(self.step, number))
            parts.add(part, file=f"{number}.safetensors", label=part.name)
        write_checkpoint(self.store, self.step, [parts])
        self.store.remove(earlier)


def reading(run, times):
    """Return what reads a checkpoint, and lets the run save once it has read the first part; `times` times."""
    left = [times]

    def read(reader):
        found = [reader.tensor("weight0")]
        if left[0]:
            left[0] -= 1
            run.save()
        found.append(reader.tensor("weight1"))
        for number in range(2):
            assert torch.equal(found[number], tensor(reader.manifest.step, number))
        return reader.manifest.step

    return read


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", ["memory", "local", "file", "s3"])
def test_a_resuming_run_takes_the_checkpoint_that_has_replaced_it(make_place, kind, cached):
    place = make_place(kind)
    run = Run(place)
    store = place.store(reads_cache=cached)
    found = find_resume_point(store, 0, lambda text: [text], reading(run, 2))
    assert found.plan == 7
    assert found.files.name == "step-00000007"
    assert [each.path.rpartition("/")[2] for each in found.skipped] == ["step-00000005", "step-00000006"]
    assert all("is missing" in each.why for each in found.skipped)


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_an_export_takes_the_checkpoint_that_has_replaced_it(make_place, kind):
    place = make_place(kind)
    run = Run(place)
    assert use_checkpoint(place.url, reading(run, 1)) == 6
    path = f"{place.url}/step-00000006"
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        use_checkpoint(path, reading(run, 1))


@pytest.mark.parametrize("kind", ["memory", "file", "s3"])
def test_an_open_remote_file_that_is_removed_is_not_found(make_place, kind):
    place = make_place(kind)
    run = Run(place)
    store = place.store(reads_cache=False)
    name = store.names()[0]
    file = store.files(name).open("mark/1.safetensors")
    run.save()
    with pytest.raises(FileNotFoundError, match=name):
        file.read_into(0, memoryview(bytearray(8)))
    file.close()
