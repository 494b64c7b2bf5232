"""A small causal language model, lines of unequal length, and what Hugging Face's libraries keep per process."""

from __future__ import annotations

import contextlib
import os
import sys

import torch
from torch.nn.utils.rnn import pad_sequence

VOCABULARY, PAD, IGNORED = 19, 0, -100


def build():
    """Return a small GPT-2 without dropout, always with the same weights."""
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(
            n_positions=16, n_embd=8, n_layer=2, n_head=2, vocab_size=VOCABULARY, use_cache=False, **none
        )
    )


def lines(number=13):
    """Return lines of 2 to 12 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 13, (number,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, VOCABULARY, (n,), generator=generator)} for n in lengths]


def collate(samples):
    """Return a batch, padded to equal length."""
    rows = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    tokens = pad_sequence(rows, batch_first=True, padding_value=PAD)
    mask = torch.arange(tokens.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.where(mask, IGNORED)}


def tokens_of(batch):
    """Return the number of predicted tokens of a loader's batch."""
    return int((batch["labels"][:, 1:] != IGNORED).sum()) if batch.samples else 0


@contextlib.contextmanager
def separate_process():
    """Forget what Accelerate knows of this process before and after the block, and restore the environment after it."""
    environment = dict(os.environ)
    _forget()
    try:
        yield
    finally:
        _forget()
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def launched(rank, size):
    """Set the variables that a launcher sets, if there are several ranks; no more is known of earlier worlds."""
    with separate_process():
        if size > 1:
            place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            os.environ.update({name: str(value) for name, value in {**place, "OMP_NUM_THREADS": 1}.items()})
        yield


def _forget():
    state = sys.modules.get("accelerate.state")
    if state is not None:
        for each in (state.AcceleratorState, state.GradientState, state.PartialState):
            each._reset_state()
