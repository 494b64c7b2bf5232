"""Program for torch's DistributedDataParallel in the style of nanoGPT: micro-steps that set the flag of the model."""

import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH, HEADS, CONTEXT, VOCABULARY = 32, 2, 16, 31
MICRO_STEPS, WARMUP = 3, 5


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        """Return the next layer's input."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(heads.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.down(F.gelu(self.up(self.between(x)))))


class GPT(nn.Module):
    """Predicts the next token; the embedding is also the output layer."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, tokens, targets):
        """Return logits and loss."""
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(folder, resume=""):
    """Train for 50 steps of three micro-steps, with a checkpoint of the raw model; or resume from one."""
    ddp = int(os.environ.get("RANK", -1)) != -1
    dist.init_process_group(backend="gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1337 + rank)
    text = torch.randint(0, 7, (4000,), generator=torch.Generator().manual_seed(0)).cumsum(0) % VOCABULARY

    def get_batch():
        starts = torch.randint(len(text) - CONTEXT, (4,))
        return (torch.stack([text[at + shift : at + shift + CONTEXT] for at in starts]) for shift in (0, 1))

    model = GPT()
    decayed = [param for param in model.parameters() if param.dim() >= 2]
    others = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    first = 0
    if resume:
        checkpoint = torch.load(f"{resume}/ckpt.pt")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["step"]
    model = DDP(model)
    raw_model = model.module
    losses = []

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        found = torch.stack([model(*get_batch())[1] for _ in range(2)])
        model.train()
        return found.mean().item()

    x, y = get_batch()
    for step in range(first, 50):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / 50)))
        if step % 20 == 0 and rank == 0:
            losses.append(estimate_loss())
            saved = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, f"{folder}/ckpt.pt")
        for micro_step in range(MICRO_STEPS):
            if ddp:
                model.require_backward_grad_sync = micro_step == MICRO_STEPS - 1
            _, loss = model(x, y)
            loss = loss / MICRO_STEPS
            x, y = get_batch()
            scaler.scale(loss).backward()
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    losses = main(*sys.argv[1:])
