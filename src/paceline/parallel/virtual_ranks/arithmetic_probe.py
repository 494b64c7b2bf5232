"""Whether processors compute the same bits: a digest of what a few typical operations return here.

Virtual ranks make a result independent of the number of ranks, but not of the processor: other vector units, numbers of
threads or libraries for matrices add in other orders. The digest covers matrix products, convolution, attention, norms,
reductions and elementary functions, forward and backward, in a few milliseconds. Equal digests are no proof.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os

import torch
from torch import Tensor
from torch.nn import functional

from paceline.parallel.gradient_collectives import Comm
from paceline.world.control_collectives import gather_texts
from paceline.world.rendezvous import format_ranks

__all__ = ["compare_arithmetic", "describe_arithmetic", "warn_of_other_arithmetic"]

log = logging.getLogger("paceline.parallel")


def describe_arithmetic(device: torch.device) -> dict[str, str]:
    """Return the digest of this process's arithmetic on `device`, and what it may depend on."""
    kind = torch.backends.cpu.get_cpu_capability()
    if device.type != "cpu":
        kind = str(getattr(torch.get_device_module(device), "get_device_name", lambda _: device.type)(device))
    return {
        "digest": _digest(device),
        "processor": kind,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
    }


def _digest(device: torch.device) -> str:
    drawn = torch.Generator().manual_seed(0)
    state = torch.random.get_rng_state()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn).to(device).requires_grad_()

    rows, weights, image, kernel = draw(67, 259), draw(301, 259), draw(3, 5, 17, 19), draw(7, 5, 3, 3)
    heads, gain = draw(2, 3, 33, 16), draw(301)
    hidden = functional.linear(rows, weights)
    results = [
        hidden,
        functional.gelu(hidden).sum(0),
        functional.layer_norm(hidden, [301], gain, gain),
        functional.softmax(hidden, -1),
        functional.conv2d(image, kernel, padding=1),
        functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
        torch.tanh(hidden) * torch.exp(-hidden.square()) + torch.rsqrt(1 + hidden.square()),
        functional.cross_entropy(hidden, torch.arange(67, device=device)),
        draw(40_001).sum(),
    ]
    inputs = [rows, weights, image, kernel, heads, gain]
    results += torch.autograd.grad([each.square().mean() for each in results], inputs)
    torch.random.set_rng_state(state)
    digest = hashlib.blake2b(digest_size=8)
    for each in results:
        digest.update(each.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _describe(facts: dict[str, str]) -> str:
    return f"{facts['processor']}, threads: {facts['threads']}, torch {facts['torch']}"


def compare_arithmetic(comm: Comm, device: torch.device) -> dict[str, str]:
    """Return this rank's arithmetic; rank 0 warns if ranks differ. All ranks call this."""
    own = describe_arithmetic(device)
    if comm.size == 1:
        return own
    every = [json.loads(text) for text in gather_texts(json.dumps([own, os.uname().nodename]), comm.group)]
    first, here = every[0]
    others = [rank for rank, (facts, _) in enumerate(every) if facts["digest"] != first["digest"]]
    if others and comm.rank == 0:
        facts, host = every[others[0]]
        log.warning(
            "rank %s on %s (%s) computes other bits than rank 0 on %s (%s): the result will depend on which rank "
            "computes what; use equal processors and threads",
            format_ranks(others),
            host,
            _describe(facts),
            here,
            _describe(first),
        )
    return own


def warn_of_other_arithmetic(now: dict[str, str], saved: dict[str, str]) -> None:
    """Warn if a checkpoint was computed with another arithmetic than this process's."""
    if saved and now["digest"] != saved.get("digest"):
        log.warning(
            "the checkpoint was computed on a processor that gives other bits (%s; here %s): this run will not end "
            "with those of an uninterrupted one",
            _describe(saved),
            _describe(now),
        )
