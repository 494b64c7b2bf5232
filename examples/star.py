"""A worker of asynchronous training: start `paceline hub` first, then this program on as many machines as you like.

paceline hub &
python examples/star.py tcp://127.0.0.1:7077
"""

import sys

import torch

import paceline
from paceline.tools.models import corpus as corpora
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.models.token_windows import HeldOutWindows, TrainingWindows

STEPS, BATCH = 300, 8


def main(hub: str, key: str | None = None) -> None:
    """Train beside a star."""
    size, corpus = gpt_size("tiny"), corpora.load_corpus(None)
    model = GPT(size)
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    batches = TrainingWindows(corpus.train, BATCH, size.context, seed=torch.seed() % 2**31)
    held_out = HeldOutWindows(corpus.held_out, 16, size.context, limit=64)

    def score() -> float:
        losses = [token_loss(model(batch.inputs), batch.targets).item() for batch in held_out.rounds()]
        return sum(losses) / len(losses)

    with paceline.AsyncDataParallel(model, optim, hub, every=20, delay=5, score=score, key=key) as star:
        for step in range(STEPS):
            batch = batches.at(step)
            value = token_loss(model(batch.inputs), batch.targets)
            value.backward()
            optim.step()
            optim.zero_grad()
            star.loss = value.item()
            if step % 20 == 19:
                print(f"step {step + 1}: loss {value.item():.3f}, centres taken in {star.counts.taken}")
    with torch.no_grad():
        print(f"held-out loss of the centre: {score():.3f}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: star.py HUB_ADDRESS [KEY_FILE]")
    main(*sys.argv[1:3])
