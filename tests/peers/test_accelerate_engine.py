"""`PacelineAccelerator` against the same training written with Paceline alone, and what else Accelerate offers."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

import hugging_face as hf
import paceline
from paceline.errors import UsageError
from unequal_rows import Numbers, build, groups, largest_gap, loss_of, plain


def accelerator_of(sync="bucketed", **options):
    from paceline.integrations.accelerate import PacelineAccelerator

    return PacelineAccelerator(sync=sync, cpu=True, **options)


def prepared(sync):
    accelerator = accelerator_of(sync, gradient_accumulation_steps=3)
    net = build()
    optim = torch.optim.AdamW(groups(net), lr=0.01)
    optim, model, loader = accelerator.prepare(optim, net, paceline.Loader(Numbers(), batch_size=3))
    return accelerator, model, optim, loader, torch.optim.lr_scheduler.StepLR(optim, 2, gamma=0.5)


def accelerated(accelerator, model, optim, loader, scheduler, *, epochs=2):
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch), samples=batch.samples)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optim.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optim.zero_grad()


def train(rank, size, sync):
    with hf.launched(rank, size):
        accelerator, model, *rest = prepared(sync)
        accelerated(accelerator, model, *rest)
        assert accelerator.num_processes == size
        assert accelerator.unwrap_model(model) is model.module
        expected = plain(sync)
        assert model.engine.step == expected.engine.step
        assert largest_gap(model, expected) < 1e-12
        return model.whole_parameters()


@pytest.mark.parametrize(("ranks", "sync"), [(2, "bucketed"), (3, "sharded"), (2, "full-shard")])
def test_same_weights_as_paceline_alone(pool, ranks, sync):
    found = pool(ranks, "paceline").run(train, sync)[0]
    alone = plain("bucketed", batch_size=3 * ranks).whole_parameters()
    assert max((a - b).abs().max().item() for a, b in zip(found, alone, strict=True)) < 1e-12


def resume(rank, size, folder, keep_engines=True):
    with hf.launched(rank, size):
        accelerator, *first = prepared("sharded")
        accelerator.register_for_checkpointing(first[-1])
        accelerated(accelerator, *first, epochs=1)
        accelerator.save_state(folder)
        step, total = first[0].engine.step, first[0].engine.weights.reference
        accelerated(accelerator, *first, epochs=1)
        if rank == 0 and not keep_engines:
            Path(folder, "paceline_engines.json").unlink()
    with hf.launched(rank, size):
        accelerator, *second = prepared("sharded")
        accelerator.register_for_checkpointing(second[-1])
        accelerator.load_state(folder)
        if keep_engines:
            assert (second[0].engine.step, second[0].engine.weights.reference) == (step, total)
        accelerated(accelerator, *second, epochs=1)
    return largest_gap(first[0], second[0])


def test_save_state_resumes(pool, tmp_path):
    assert pool(2, "paceline").run(resume, str(tmp_path)) == [0.0, 0.0]


def test_a_state_of_accelerate_alone_resumes_to_rounding(pool, tmp_path):
    gaps = pool(2, "paceline").run(resume, str(tmp_path), False)
    assert max(gaps) < 1e-12


def metrics(rank, size):
    with hf.launched(rank, size):
        accelerator = accelerator_of("sharded", mixed_precision="bf16")
        net = build().float()
        model, loader = accelerator.prepare(net, torch.utils.data.DataLoader(Numbers(), batch_size=3))
        with torch.no_grad():
            found = torch.cat([accelerator.gather_for_metrics(model(x.float())) for x, _ in loader])
        inputs = torch.stack([x for x, _ in Numbers()]).float()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected = net(inputs)
        return found.shape == expected.shape and bool(
            (found.sort(0)[0] - expected.sort(0)[0]).abs().max() < 1e-2
        )


def test_mixed_precision_and_gathered_metrics(pool):
    assert all(pool(2, "paceline").run(metrics))


def test_what_it_can_not_keep_is_refused():
    from accelerate.utils import DistributedDataParallelKwargs

    with hf.launched(0, 1):
        with pytest.raises(UsageError, match="fsdp_plugin"):
            accelerator_of(fsdp_plugin=object())
        with pytest.raises(UsageError, match="communication hook 'fp16'"):
            accelerator_of(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")])
        with pytest.raises(UsageError, match="did you mean 'sharded'"):
            accelerator_of("shardd")
        accelerator = accelerator_of("sharded")
        with pytest.raises(UsageError, match="prepare the model before its optimizer"):
            accelerator.prepare(torch.optim.AdamW(build().parameters()))
        with pytest.raises(UsageError, match="samples= with 0 wrapped models"):
            accelerator.backward(torch.ones((), requires_grad=True), samples=1)


def counts_ranks(rank, size):
    with hf.launched(0, 1):  # without the variables of a launcher
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(variable, None)
        with pytest.raises(UsageError, match="counts 1 ranks, and the process group has 2"):
            accelerator_of()


def test_a_world_that_accelerate_does_not_know_is_refused(pool):
    pool(2, "paceline").run(counts_ranks)


@pytest.mark.parametrize("library", ["accelerate", "transformers", "lightning"])
def test_a_missing_library_is_named_with_the_extra(monkeypatch, library):
    module = f"paceline.integrations.{library}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for known in [name for name in sys.modules if name == library or name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        UsageError, match=f"{module} needs {library}.*\n.*pip install 'paceline\\[integrations\\]'"
    ):
        importlib.import_module(module)
