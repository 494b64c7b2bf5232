"""A worker of asynchronous training. Start a hub, then this program any number of times.

paceline hub serve &
python examples/asynchronous.py runs/hub

On other machines, with a hub that was started with --bind 'tcp://*:7077' and a copy of its runs/hub/keys/worker.key:

python examples/asynchronous.py tcp://192.168.1.5:7077 worker.key
"""

import sys

import torch

import paceline
from paceline.tools.models.corpus import load_corpus
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.models.token_windows import HeldOutWindows, TrainingWindows

STEPS, BATCH_SIZE = 300, 8


def main(hub: str, key: str | None = None) -> None:
    """Train with the other workers of the hub."""
    size, corpus = gpt_size("tiny"), load_corpus(None)
    model = GPT(size)
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    batches = TrainingWindows(corpus.train, BATCH_SIZE, size.context, seed=torch.seed() % 2**31)
    held_out = HeldOutWindows(corpus.held_out, 16, size.context, limit=64)

    def score() -> float:
        losses = [token_loss(model(batch.inputs), batch.targets).item() for batch in held_out.rounds()]
        return sum(losses) / len(losses)

    with paceline.AsyncDataParallel(model, optim, hub, every=20, delay=5, score=score, key=key) as worker:
        for step in range(STEPS):
            batch = batches.at(step)
            loss = token_loss(model(batch.inputs), batch.targets)
            loss.backward()
            optim.step()
            optim.zero_grad()
            worker.loss = loss.item()
            if step % 20 == 19:
                applied = worker.counts.taken
                print(f"step {step + 1}: loss {loss.item():.3f}, global parameters applied {applied} times")
    with torch.no_grad():
        print(f"held-out loss of the global parameters: {score():.3f}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: asynchronous.py HUB_FOLDER_OR_ADDRESS [KEY_FILE]")
    main(*sys.argv[1:3])
