"""GPT-2 of transformers: trained on several ranks, exported, loaded by transformers; imported by ranks in parts."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    logging,
)  # imports of seconds, before a case counts

import paceline
from hugging_face import build, collate, lines
from paceline.checkpoint.interop.safetensors_reader import SafetensorsReader


def train(rank, size, folder, sync, container):
    """Make two steps, save; return the whole weights."""
    paceline.init()
    net = build()
    assert isinstance(net, GPT2LMHeadModel)
    config = net.config
    config.update({"bos_token_id": 0, "eos_token_id": 0})
    model = paceline.DataParallel(net, sync=sync)
    optimizer = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    with paceline.Checkpoint(folder / "run", model, optimizer, format=container) as checkpoint:
        for step in range(2):
            batch = collate(lines()[(2 * step + rank) * 3 :][:3])
            model.backward(model(**batch).loss, samples=3)
            optimizer.step()
            optimizer.zero_grad()
        checkpoint.save(wait=True)
    names = [name for name, _ in model.module.named_parameters()]
    weights = dict(zip(names, model.whole_parameters(), strict=True))
    if rank == 0:
        paceline.export_weights(folder / "run", folder / "out", max_shard="2kB", config=config)
    return {name: tensor.clone() for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("ranks", "sync", "container"),
    [
        (2, "full-shard", "paceline"),
        (2, "full-shard", "dcp"),
        (2, "bucketed", "paceline"),
        (3, "sharded", "dcp"),
    ],
)
def test_transformers_loads_a_trained_model_to_the_bit(pool, tmp_path, capfd, ranks, sync, container):
    trained = pool(ranks).run(train, tmp_path, sync, container)[0]
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
    logging.set_verbosity_warning()
    logging.disable_progress_bar()
    capfd.readouterr()
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    written = capfd.readouterr()
    assert (written.out, written.err) == ("", "")
    assert not any(info.values()), info
    found = dict(loaded.named_parameters())
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], trained[name]) for name in trained)
    assert not torch.equal(found["transformer.wte.weight"], build().transformer.wte.weight)


def take_in(rank, size, folder, sync):
    """Import a folder into a model of zeros; return the whole weights, and elements read and held."""
    paceline.init()
    net = build()
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    model = paceline.DataParallel(net, sync=sync)
    read, count = SafetensorsReader.read, []

    def counted(self, reads):
        count.extend(each.box.numel for each in reads)
        read(self, reads)

    SafetensorsReader.read = counted
    try:
        paceline.import_weights(model, folder)
    finally:
        SafetensorsReader.read = read
    own = sum(
        (param.to_local() if isinstance(param, DTensor) else param).numel()
        for param in model.module.parameters()
    )
    return [param.clone() for param in model.whole_parameters()], sum(count), own


@pytest.mark.parametrize(("ranks", "sync"), [(2, "full-shard"), (3, "full-shard"), (2, "sharded")])
def test_ranks_read_what_they_hold(pool, tmp_path, ranks, sync):
    net = build()
    net.save_pretrained(tmp_path, max_shard_size="2KB")
    whole = sum(param.numel() for param in net.parameters())
    for weights, read, own in pool(ranks).run(take_in, tmp_path, sync):
        assert all(map(torch.equal, weights, net.parameters()))
        assert read == own
        assert (own < whole) == (sync == "full-shard")
