"""The computing of a step without any exchange: forward, backward, when gradients are ready, the update.

Two models take turns, step by step. One trains by itself, as in one process. The other is wrapped by our engine, in a
block that keeps gradients to this rank: its backward adds gradients to the buckets, as every engine's does, and sends
nothing. A barrier before each step has all ranks compute at the same time, since they may share cores or memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from paceline.cost_model.piecewise_fit import fit_line
from paceline.cost_model.profile_entries import ModelStep, Parameter, Source
from paceline.parallel.comm import Comm
from paceline.parallel.data_parallel import DataParallel
from paceline.tools.bench.parts.device_clock import Moment, mark, now, of_all_ranks, seconds_between
from paceline.tools.bench.parts.workload import Workload, fingerprint, unit_of_parameter

__all__ = ["Wrapped", "measure_model"]

_WARM_UP = 2
_SWEEPS = (1, 4, 16)  # into how many parts an update is cut


class Wrapped:
    """A workload under the engine, which notes when gradients are ready.

    Attributes:
        model: the wrapped module, its buckets built.
        arrivals: names of parameters and the moments when their gradients were ready, in the latest backward.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        self._workload, self._device = workload, device
        self.model = DataParallel(workload.build(), sync="bucketed")
        self.arrivals: list[tuple[str, Moment]] = []
        self.model.backward(workload.loss_of(self.model))  # the first round builds the buckets
        self.model.zero_grad()
        for name, param in self.model.module.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._noting(name))

    def _noting(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self.arrivals.append((name, mark(self._device)))

        return note

    def step(self) -> tuple[float, float, dict[str, float]]:
        """Run forward and backward.

        Returns:
            The seconds of both; and for each parameter, from the beginning of backward until its gradient was ready,
            at its last arrival.
        """
        self.arrivals.clear()
        began = now(self._device)
        value = self._workload.loss_of(self.model)
        ran, start = now(self._device), mark(self._device)
        with self.model.accumulate():
            self.model.backward(value)
        ended = now(self._device)
        self.model.zero_grad()
        ready = {name: seconds_between(start, moment) for name, moment in self.arrivals}
        return ran - began, ended - ran, ready


@dataclass(frozen=True)
class _Steps:
    """Seconds of the slowest rank, by step: [steps, …]."""

    forward: torch.Tensor
    backward: torch.Tensor
    optimizer: torch.Tensor
    buffered: torch.Tensor
    ready: torch.Tensor


def measure_model(workload: Workload, device: str, steps: int, source: Source) -> ModelStep:
    """Return what the computing of a step takes; all ranks call it.

    Args:
        workload: what is trained. device: on which. steps: that are timed. source: what asked for it.
    """
    plain, wrapped = workload.build(), Wrapped(workload, device)
    optimizer = workload.optimizer([param for param in plain.parameters() if param.requires_grad])
    own = torch.zeros(steps, 3, dtype=torch.float64)
    names, rows = [name for name, param in plain.named_parameters() if param.requires_grad], []
    gc.collect()
    for step in range(-_WARM_UP, steps):
        parts = _plain_step(workload, plain, optimizer, device)
        dist.barrier()
        _, backward, ready = wrapped.step()
        if step >= 0:
            rows.append([backward, *(ready.get(name, backward) for name in names)])
            own[step] = torch.tensor(parts)
    found = _slowest_steps(own, torch.tensor(rows, dtype=torch.float64), device)
    call, byte = _update_line(workload, plain, device)
    return _entry(workload, plain, names, found, (call, byte), device, source)


def _plain_step(
    workload: Workload, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> tuple[float, float, float]:
    """Run a step of a model by itself; return the seconds of its parts on this rank."""
    dist.barrier()
    began = now(device)
    value = workload.loss_of(model)
    ran = now(device)
    value.backward()
    ended = now(device)
    optimizer.step()
    optimizer.zero_grad()
    return ran - began, ended - ran, now(device) - ended


def _slowest_steps(own: torch.Tensor, wrapped: torch.Tensor, device: str) -> _Steps:
    """Return for every step the seconds of the rank that took longest over it."""
    plain, buffered = of_all_ranks(own, device), of_all_ranks(wrapped, device)
    rows = torch.arange(len(own))
    one = plain[plain.sum(2).argmax(0), rows]
    two = buffered[buffered[:, :, 0].argmax(0), rows]
    return _Steps(one[:, 0], one[:, 1], one[:, 2], two[:, 0], two[:, 1:])


def _update_line(workload: Workload, model: torch.nn.Module, device: str) -> tuple[float, float]:
    """Return seconds of an update by itself, and of each byte of its parameters.

    All parameters' bytes are updated in so many parts, one after another, as a sharded optimizer does: what was
    updated before is no longer in the cache.
    """
    numel = sum(param.numel() for param in model.parameters() if param.requires_grad)
    flat = torch.randn(numel, device=device)
    times = []
    for parts in _SWEEPS:
        held = [torch.nn.Parameter(part) for part in flat.clone().chunk(parts)]
        optimizers = [workload.optimizer([param]) for param in held]
        for param in held:
            param.grad = torch.ones_like(param)
        seconds = []
        for _ in range(5):
            dist.barrier()
            began = now(device)
            for optimizer in optimizers:
                optimizer.step()
            seconds.append(now(device) - began)
        times.append(
            median(of_all_ranks(torch.tensor(seconds, dtype=torch.float64), device).amax(0).tolist()[1:])
        )
    line = fit_line(np.array(_SWEEPS, float), np.full(len(_SWEEPS), float(flat.nbytes)), np.array(times))
    return line.alpha, line.beta


def _entry(
    workload: Workload,
    model: torch.nn.Module,
    names: list[str],
    found: _Steps,
    update: tuple[float, float],
    device: str,
    source: Source,
) -> ModelStep:
    buffered = found.buffered.median().item()
    ready = found.ready.median(0).values.clamp(max=buffered).tolist()
    units, params = unit_of_parameter(model), dict(model.named_parameters())
    parameters = tuple(
        Parameter(name, params[name].nbytes, at, _kind(params[name]), units[name])
        for name, at in sorted(zip(names, ready, strict=True), key=lambda pair: pair[1])
    )
    whole = found.forward + found.backward
    low, high = whole.quantile(0.1).item(), whole.quantile(0.9).item()
    on_cpu = device == "cpu"
    return ModelStep(
        model=workload.name,
        fingerprint=fingerprint(model),
        batch=workload.batch,
        shape=workload.shape,
        device="cpu" if on_cpu else torch.cuda.get_device_name(),
        backend=Comm().backend,
        ranks=dist.get_world_size(),
        threads=torch.get_num_threads() if on_cpu else 0,
        forward=found.forward.median().item(),
        backward=found.backward.median().item(),
        buffered=buffered,
        optimizer=found.optimizer.median().item(),
        update_call=update[0],
        update_byte=update[1],
        spread=(high - low) / 2 / whole.median().item(),
        parameters=parameters,
        source=source,
    )


def _kind(param: torch.Tensor) -> str:
    return f"{param.device.type} {str(param.dtype).removeprefix('torch.')}"
