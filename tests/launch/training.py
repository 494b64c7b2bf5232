"""Small training with the same result after any restart: ranks record their steps, and a digest at the end.

python training.py FOLDER STEPS SECONDS_A_STEP
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch

import paceline

folder, steps, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
world = paceline.init(timeout=60.0)
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
)
model = paceline.DataParallel(net, sync="sharded")
optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
data = torch.randn(8 * steps, 8, generator=torch.Generator().manual_seed(1))
loader = paceline.Loader(data, batch_size=4)
every = int(os.environ.get("SAVE_EVERY", "1"))
checkpoint = paceline.Checkpoint(folder / "checkpoint", model, optim, loader, every=every)


def note(**what):
    """Append a record of this rank and process."""
    place = {name: getattr(world, name) for name in ("rank", "size", "nodes", "backend")}
    with open(folder / "notes.jsonl", "a") as file:
        file.write(json.dumps(what | place | {"pid": os.getpid()}) + "\n")


for batch in checkpoint.resume(loader, epochs=4):
    note(step=checkpoint.step)
    model.backward(model(batch).square().mean(), samples=batch.samples)
    optim.step()
    optim.zero_grad()
    if checkpoint.step >= steps:
        break
    time.sleep(pause)
checkpoint.close()
flat = torch.cat([one.detach().flatten() for one in net.parameters()])
note(digest=hashlib.sha256(flat.numpy().tobytes()).hexdigest(), words=sys.argv[4:])
paceline.shutdown()
