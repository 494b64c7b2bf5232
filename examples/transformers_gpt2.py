"""Data-parallel training of a Hugging Face model: a small GPT-2 with random weights, on lines of Python.

torchrun --nproc-per-node 2 examples/transformers_gpt2.py

Lines have different lengths, so ranks have different numbers of tokens in a step. Each batch is weighted by the number
of tokens in its loss: the gradient is that of the mean over all tokens of all ranks, as in one process.
"""

from __future__ import annotations

import itertools
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import paceline

MAX_TOKENS, BATCH_SIZE, STEPS = 64, 16, 100
END_TOKEN, IGNORED_LABEL = 256, -100  # the 257th token; the label that the loss ignores


class Tokens(dict[str, Tensor]):
    """The model's keyword arguments; `samples` is the number of predicted tokens."""

    samples: int


def python_lines() -> list[Tensor]:
    """Return lines of the standard library's sources, one token per byte."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    lines = [line.strip() for source in sources for line in source.read_bytes().splitlines()]
    return [torch.tensor([*line[: MAX_TOKENS - 1], END_TOKEN]) for line in lines if len(line) > 4]


def collate_lines(lines: list[Tensor]) -> Tokens:
    """Return a batch of lines, padded to equal length."""
    tokens = torch.nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=END_TOKEN)
    lengths = torch.tensor([len(line) for line in lines])
    mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    batch = Tokens(input_ids=tokens, attention_mask=mask.long(), labels=tokens.where(mask, IGNORED_LABEL))
    predicted = batch["labels"][:, 1:] != IGNORED_LABEL  # every token but the first
    batch.samples = int(predicted.sum())
    return batch


def build() -> GPT2LMHeadModel:
    """Return the model with random weights; nothing is downloaded."""
    torch.manual_seed(0)
    size = {"n_positions": MAX_TOKENS, "n_embd": 96, "n_layer": 2, "n_head": 4, "vocab_size": END_TOKEN + 1}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**size, **no_dropout, bos_token_id=END_TOKEN, eos_token_id=END_TOKEN))
    model.loss_type = "ForCausalLM"
    return model


def train(
    net: GPT2LMHeadModel, steps: int = STEPS, batch_size: int = BATCH_SIZE, sync: str = "sharded"
) -> tuple[paceline.DataParallel, list[float]]:
    """Train on this rank; return the model and its losses."""
    world = paceline.init()
    model = paceline.DataParallel(net.to(world.device), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=2e-3, weight_decay=0.01)
    loader = paceline.Loader(python_lines(), batch_size, collate_fn=collate_lines)
    losses = []
    for batch in itertools.islice(loader, steps):
        inputs = {name: tensor.to(world.device) for name, tensor in batch.items()}
        loss = model(**inputs, use_cache=False).loss
        model.backward(loss, samples=batch.samples)
        model.clip_grad_norm_(1.0)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
        if world.rank == 0 and len(losses) % 20 == 0:
            print(f"step {len(losses)}/{steps}  loss {loss.item():.3f}", flush=True)
    return model, losses


if __name__ == "__main__":
    train(build())
    paceline.shutdown()
