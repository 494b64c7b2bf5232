"""Program for torch's DistributedDataParallel with a GAN's two models, by the class's full name."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.parallel


def main(folder):
    """Train for 50 steps: the judge on real and made points, then the maker through the frozen judge."""
    dist.init_process_group(backend="gloo")
    torch.manual_seed(dist.get_rank())
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    judge = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(2, 16)), nn.ReLU(), nn.Linear(16, 1)
    )
    maker = torch.nn.parallel.DistributedDataParallel(maker)
    judge = nn.parallel.DistributedDataParallel(judge, broadcast_buffers=False)
    of_maker, of_judge = (torch.optim.Adam(each.parameters(), lr=1e-3) for each in (maker, judge))
    losses = []
    for _ in range(50):
        for param in judge.parameters():
            param.requires_grad = True
        of_judge.zero_grad()
        points = maker(torch.randn(8, 4))
        real = F.softplus(-judge(torch.randn(8, 2) + 1)).mean()
        real.backward()
        made = F.softplus(judge(points.detach())).mean()
        made.backward()
        of_judge.step()
        for param in judge.parameters():
            param.requires_grad = False
        of_maker.zero_grad()
        fooled = F.softplus(-judge(points)).mean()
        fooled.backward()
        of_maker.step()
        losses += [real.item(), made.item(), fooled.item()]
    if dist.get_rank() == 0:
        torch.save({"maker": maker.state_dict(), "judge": judge.state_dict()}, f"{folder}/models.pt")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    losses = main(*sys.argv[1:])
