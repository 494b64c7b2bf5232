"""`PacelineTrainer` against the same training written with Paceline alone, on the same ranks and on one."""

from __future__ import annotations

import contextlib

import pytest
import torch

import hugging_face as hf
import paceline
from paceline.errors import UsageError

SETTINGS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "max_grad_norm": 0.5,
    "learning_rate": 0.01, "optim": "adamw_torch", "adam_epsilon": 1e-4, "lr_scheduler_type": "constant",
    "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
    "data_seed": 3, "remove_unused_columns": False, "log_level": "error",
}  # fmt: skip


def trainer_of(folder, sync="bucketed", *, net=None, data=None, **changed):
    from transformers import TrainingArguments

    from paceline.integrations.transformers import PacelineTrainer

    args = TrainingArguments(str(folder), **{**SETTINGS, **changed})
    return PacelineTrainer(
        hf.build() if net is None else net,
        args,
        train_dataset=hf.lines() if data is None else data,
        eval_dataset=hf.lines(6),
        data_collator=hf.collate,
        sync=sync,
    )


def weights(trainer):
    return [param.detach().clone() for param in trainer.model_wrapped.whole_parameters()]


def plain(net, sync, *, batch_size=2, accumulate=2, epochs=2, clip=0.5, bf16=False):
    """Train with Paceline alone; return the weights and every step's loss."""
    model = paceline.DataParallel(net, sync=sync)
    trained = [param for param in model.parameters() if param.requires_grad]
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, trained, lr=0.01, eps=1e-4, weight_decay=0.0)
    loader = paceline.Loader(hf.lines(), batch_size, collate_fn=hf.collate, seed=3)
    losses, own = [], 0.0
    for _ in range(epochs):
        for step, batch in enumerate(loader, 1):
            last = step % accumulate == 0 or step == len(loader)
            tokens = hf.tokens_of(batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**batch, num_items_in_batch=torch.tensor(tokens)).loss if tokens else None
            own += loss.item() * tokens if tokens else 0.0
            with contextlib.nullcontext() if last else model.accumulate():
                model.backward(loss, samples=tokens)
            if last:
                model.clip_grad_norm_(clip)
                optim.step()
                optim.zero_grad()
                losses.append(own / model.samples)
                own = 0.0
    return model.whole_parameters(), losses


def largest_gap(these, others):
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(these, others, strict=True))


def trained(rank, size, sync, folder):
    with hf.launched(rank, size):
        trainer = trainer_of(folder, sync)
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        expected, parts = plain(hf.build(), sync)
        gap = largest_gap(weights(trainer), expected)
        assert gap <= (1e-7 if sync == "full-shard" else 0.0)
        return logged, parts, [param.double() for param in expected]


@pytest.mark.parametrize(
    ("ranks", "sync"),
    [(2, "bucketed"), (3, "sharded"), (2, "full-shard"), pytest.param(2, "auto", marks=pytest.mark.thorough)],
)
def test_same_weights_and_loss_as_paceline_alone(pool, tmp_path, ranks, sync):
    results = pool(ranks, "paceline").run(trained, sync, tmp_path)
    mean_losses = [sum(parts) for parts in zip(*(parts for _, parts, _ in results), strict=True)]
    for logged, _, _ in results:
        assert logged == pytest.approx(mean_losses, abs=1e-4)  # Trainer rounds to 4 digits
    batches = {2: 4, 3: 6}[ranks]
    alone, _ = plain(hf.build(), "bucketed", batch_size=batches)
    assert largest_gap(results[0][2], alone) < 1e-6


def resumed(rank, size, sync, folder):
    from transformers import GPT2LMHeadModel

    with hf.launched(rank, size):
        trainer = trainer_of(folder, sync, save_strategy="steps", save_steps=1)
        trainer.train()
        again = trainer_of(folder, sync)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-1")  # of two steps per epoch
        from_file = GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-4").parameters()
        on_one_rank = trainer_of(
            folder, "bucketed"
        )  # the state of a sharded optimizer loads without sharding
        on_one_rank.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
        return [
            largest_gap(weights(trainer), each) for each in (weights(again), from_file, weights(on_one_rank))
        ]


@pytest.mark.parametrize("sync", ["sharded", pytest.param("full-shard", marks=pytest.mark.thorough)])
def test_a_checkpoint_resumes_within_an_epoch(pool, tmp_path, sync):
    for gaps in pool(2, "paceline").run(resumed, sync, str(tmp_path)):
        assert max(gaps) <= 1e-6


def adapted(rank, size, folder):
    from peft import LoraConfig, PeftModel, get_peft_model

    def adapter():
        net = hf.build()
        torch.manual_seed(1)
        return get_peft_model(net, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))

    with hf.launched(rank, size):
        trainer = trainer_of(folder, "sharded", net=adapter(), save_strategy="steps", save_steps=3)
        trainer.train()
        again = trainer_of(folder, "sharded", net=adapter())
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
        loaded = PeftModel.from_pretrained(hf.build(), f"{folder}/checkpoint-4").parameters()
        start, expected = list(adapter().parameters()), plain(adapter(), "sharded")[0]
        assert 0 < sum(not torch.equal(a, b) for a, b in zip(start, expected, strict=True)) < len(start)
        return [largest_gap(weights(trainer), each) for each in (expected, weights(again), loaded)]


def test_lora_adapters_train_and_resume(pool, tmp_path):
    for gaps in pool(2, "paceline").run(adapted, str(tmp_path)):
        assert max(gaps) <= 1e-7


def evaluated(rank, size, folder):
    with hf.launched(rank, size):
        options = {"eval_strategy": "epoch", "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 1}
        whole = trainer_of(folder, per_device_train_batch_size=4 // size, **options)
        whole.train()
        half = trainer_of(folder, "sharded", bf16=True)
        half.train()
        assert largest_gap(weights(half), plain(hf.build(), "sharded", bf16=True)[0]) < 1e-6
        assert largest_gap(weights(half), plain(hf.build(), "sharded")[0]) > 1e-4
        losses = [entry["eval_loss"] for entry in whole.state.log_history if "eval_loss" in entry]
        return [param.double() for param in weights(whole)], losses


def test_evaluation_label_smoothing_and_mixed_precision(pool, tmp_path):
    (found, losses), _ = pool(2, "paceline").run(evaluated, str(tmp_path))
    expected, _ = evaluated(0, 1, str(tmp_path))
    assert len(losses) == 2
    assert largest_gap(found, expected) < 1e-6


REFUSED = {
    "fsdp": {"fsdp_config": {"min_num_params": 1}, "fsdp": "full_shard"},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "train_sampling_strategy": {"train_sampling_strategy": "group_by_length"},
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "layerwise": {"optim": "galore_adamw_layerwise", "optim_target_modules": ["attn"]},
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_settings_that_it_can_not_keep_are_refused(tmp_path, name):
    with hf.launched(0, 1), pytest.raises(UsageError, match=name):
        trainer_of(tmp_path, **REFUSED[name])


@pytest.mark.parametrize("name", ["label_smoothing_factor", "load_best_model_at_end"])
def test_settings_that_it_can_not_keep_with_full_shard_are_refused(tmp_path, name):
    value = {"label_smoothing_factor": 0.1, "load_best_model_at_end": True}[name]
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", name: value}
    with hf.launched(0, 1), pytest.raises(UsageError, match=name):
        trainer_of(tmp_path, "full-shard", **options)


def test_an_unknown_strategy_is_refused(tmp_path):
    with hf.launched(0, 1), pytest.raises(UsageError, match="did you mean 'sharded'"):
        trainer_of(tmp_path, "shardd")


def test_in_one_process(tmp_path):
    with hf.launched(0, 1):
        trainer = trainer_of(tmp_path)
        trainer.train()
    assert all(map(torch.equal, weights(trainer), plain(hf.build(), "bucketed")[0]))
