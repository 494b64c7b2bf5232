"""Paceline's strategies for Lightning Fabric and Trainer against the same training written with Paceline alone."""

from __future__ import annotations

import contextlib
import os
import warnings

import pytest
import torch

import paceline
import unequal_rows as problem
from paceline.errors import UsageError

CLIP = 0.5


@contextlib.contextmanager
def launched(rank, size):
    """Set the variables of torchrun, by which Lightning knows its place."""
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "tests"}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in place:
            os.environ.pop(name, None)


def fabric_of(size, strategy):
    from lightning.fabric import Fabric

    import paceline.integrations.lightning  # noqa: F401 — registers the name

    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy)
    fabric.launch()
    return fabric


def fabric_strategy(sync):
    from paceline.integrations.lightning import PacelineFabricStrategy

    return PacelineFabricStrategy(sync=sync)


def prepared(fabric):
    net = problem.build()
    optim = torch.optim.AdamW(problem.groups(net), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 2, gamma=0.5)
    return *fabric.setup(net, optim, scheduler=scheduler), paceline.Loader(problem.Numbers(), batch_size=3)


def fabricated(fabric, model, optim, scheduler, loader, *, epochs=2):
    for _ in range(epochs):
        for step, batch in enumerate(loader, 1):
            last = step % 3 == 0 or step == len(loader)
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(problem.loss_of(model, batch), samples=batch.samples, model=model)
            if last:
                fabric.clip_gradients(model, optim, max_norm=CLIP)
                optim.step()
                scheduler.step()
                optim.zero_grad()


def train_with_fabric(rank, size, sync):
    with launched(rank, size):
        fabric = fabric_of(size, "paceline" if sync == "bucketed" else fabric_strategy(sync))
        model, *rest = prepared(fabric)
        fabricated(fabric, model, *rest)
        ours, expected = model._forward_module, problem.plain(sync)
        assert fabric.world_size == size
        assert ours.engine.step == expected.engine.step
        assert problem.largest_gap(ours, expected) < 1e-12
        return ours.whole_parameters()


def gap_from_one_process(found, ranks):
    alone = problem.plain("bucketed", batch_size=3 * ranks).whole_parameters()
    return max((a - b).abs().max().item() for a, b in zip(found, alone, strict=True))


@pytest.mark.parametrize(("ranks", "sync"), [(2, "bucketed"), (2, "sharded"), (2, "full-shard")])
def test_fabric_has_the_weights_of_paceline_alone(pool, ranks, sync):
    found = pool(ranks, "paceline").run(train_with_fabric, sync)[0]
    assert gap_from_one_process(found, ranks) < 1e-12


def resume_fabric(rank, size, path, sync, resumed_sync):
    with launched(rank, size):
        fabric = fabric_of(size, fabric_strategy(sync))
        first = prepared(fabric)
        fabricated(fabric, *first, epochs=1)
        names = ("model", "optimizer", "scheduler", "loader")
        fabric.save(path, dict(zip(names, first, strict=True)))
        fabricated(fabric, *first, epochs=1)
        again = fabric_of(size, fabric_strategy(resumed_sync))
        second = prepared(again)
        again.load(path, dict(zip(names, second, strict=True)))
        fabricated(again, *second, epochs=1)
        return problem.largest_gap(first[0]._forward_module, second[0]._forward_module)


@pytest.mark.parametrize(("sync", "resumed"), [("sharded", "sharded"), ("full-shard", "sharded")])
def test_a_checkpoint_of_fabric_resumes(pool, tmp_path, sync, resumed):
    gaps = pool(2, "paceline").run(resume_fabric, str(tmp_path / "state.ckpt"), sync, resumed)
    assert max(gaps) < 1e-12


def module_of(*, manual=False):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization = problem.build(), not manual

        def training_step(self, batch, batch_idx):
            loss = problem.loss_of(self.net, batch)
            self.log("loss", loss, sync_dist=True, batch_size=3)
            if not manual:
                return {"loss": loss, "samples": batch.samples}
            optim = self.optimizers()
            optim.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optim, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
            optim.step()
            self.lr_schedulers().step()
            return None

        def validation_step(self, batch, batch_idx):
            self.log("held out", problem.loss_of(self.net, batch), sync_dist=True, batch_size=3)

        def configure_optimizers(self):
            optim = torch.optim.AdamW(problem.groups(self.net), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optim, 2, gamma=0.5)
            return [optim], [{"scheduler": scheduler, "interval": "step"}]

    return Module()


def trainer_of(size, strategy, folder, **options):
    import lightning

    import paceline.integrations.lightning  # noqa: F401 — registers the name

    quiet = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
    }  # fmt: skip
    settings = {"max_epochs": 2, "accumulate_grad_batches": 3, "gradient_clip_val": CLIP} | quiet | options
    return lightning.Trainer(
        accelerator="cpu", devices=size, strategy=strategy, default_root_dir=folder, **settings
    )


def strategy_of(sync):
    from paceline.integrations.lightning import PacelineStrategy

    return PacelineStrategy(sync=sync)


def largest_gap(module, expected):
    pairs = zip(module.net.parameters(), expected, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def train_with_lightning(rank, size, sync, folder):
    with launched(rank, size):
        module = module_of()
        trainer = trainer_of(size, "paceline" if sync == "bucketed" else strategy_of(sync), folder)
        path = f"{folder}/last.ckpt"
        held_out = torch.utils.data.DataLoader(problem.Numbers(), batch_size=3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, paceline.Loader(problem.Numbers(), batch_size=3), held_out)
        assert {"loss", "held out"} <= trainer.callback_metrics.keys()
        assert not [each for each in caught if "lr_scheduler" in str(each.message)]
        expected = problem.plain(sync)
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=False)
        wanted = zip(saved["state_dict"].values(), expected.whole_parameters(), strict=True)
        assert max((a - b).abs().max().item() for a, b in wanted) < 1e-12
        assert len(saved["optimizer_states"][0]["state"]) == 4
        return expected.whole_parameters()


@pytest.mark.parametrize(("ranks", "sync"), [(2, "bucketed"), (3, "sharded"), (2, "full-shard")])
def test_lightning_has_the_weights_of_paceline_alone(pool, tmp_path, ranks, sync):
    found = pool(ranks, "paceline").run(train_with_lightning, sync, str(tmp_path))[0]
    assert gap_from_one_process(found, ranks) < 1e-12


def resume_lightning(rank, size, folder):
    from lightning.pytorch.callbacks import ModelCheckpoint

    with launched(rank, size):
        every_step = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        loader = paceline.Loader(problem.Numbers(), batch_size=3)
        options = {"callbacks": [every_step], "enable_checkpointing": True}
        trainer_of(size, strategy_of("sharded"), folder, **options).fit(module_of(), loader)
        module, loader = module_of(), paceline.Loader(problem.Numbers(), batch_size=3)
        path = f"{folder}/step=1.ckpt"  # of two steps per epoch
        trainer = trainer_of(size, strategy_of("sharded"), folder)
        trainer.fit(module, loader, ckpt_path=path, weights_only=False)
        assert trainer.global_step == 4
        return largest_gap(module, problem.plain("sharded").whole_parameters())


def test_a_checkpoint_of_lightning_resumes_within_an_epoch(pool, tmp_path):
    assert max(pool(2, "paceline").run(resume_lightning, str(tmp_path))) < 1e-12


def optimize_manually(rank, size, sync, folder):
    with launched(rank, size):
        module = module_of(manual=True)
        loader = paceline.Loader(problem.Numbers(), batch_size=3)
        trainer = trainer_of(
            size, strategy_of(sync), folder, accumulate_grad_batches=1, gradient_clip_val=None
        )
        trainer.fit(module, loader)
        return largest_gap(module, problem.plain(sync, accumulate=1).whole_parameters())


@pytest.mark.parametrize("sync", ["bucketed", "sharded"])
def test_manual_optimization(pool, tmp_path, sync):
    assert max(pool(2, "paceline").run(optimize_manually, sync, str(tmp_path))) < 1e-12


def test_what_they_can_not_keep_is_refused():
    from paceline.integrations.lightning import PacelineFabricStrategy, PacelineStrategy

    for strategy in (PacelineFabricStrategy, PacelineStrategy):
        with pytest.raises(UsageError, match="find_unused_parameters"):
            strategy(find_unused_parameters=True)
        with pytest.raises(UsageError, match="did you mean 'sharded'"):
            strategy("shardd")
