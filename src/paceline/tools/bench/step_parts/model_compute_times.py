"""Compute times of a step without communication: forward, backward, readiness of gradients, optimizer update.

Two models run interleaved, step by step. One trains as in a single process. The other is wrapped by Paceline's engine,
in a block that keeps gradients local: its backward adds gradients to the buckets, as every engine's does, and sends
nothing. A barrier before each step makes all ranks compute at the same time, since they may share cores or memory.
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
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.gradient_collectives import Comm
from paceline.tools.bench.device_clock import Moment, gather_ranks, mark, now, seconds_between, slowest_rank
from paceline.tools.bench.step_parts.training_workload import Workload, model_fingerprint, unit_of_parameter

__all__ = ["WrappedModel", "measure_model_step"]

_WARM_UP = 2
_UPDATE_PARTS = (1, 4, 16)  # numbers of parts into which an update is split
_UPDATES = 5  # of each


class WrappedModel:
    """A workload under the engine, which records when gradients are ready.

    Attributes:
        model: the wrapped module, its buckets built.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        self._workload, self._device = workload, device
        self.model = DataParallel(workload.build(), sync="bucketed")
        self._ready: list[tuple[str, Moment]] = []
        self.model.backward(workload.loss_of(self.model))  # the first round builds the buckets
        self.model.zero_grad()
        for name, param in self.model.module.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._recorder(name))

    def _recorder(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda _: self._ready.append((name, mark(self._device)))

    def step(self) -> tuple[float, float, dict[str, float]]:
        """Run forward and backward.

        Returns:
            The seconds of both, and for each parameter those from the start of backward until its gradient was ready,
            the last time it was.
        """
        self._ready.clear()
        began = now(self._device)
        value = self._workload.loss_of(self.model)
        ran, start = now(self._device), mark(self._device)
        with self.model.accumulate():
            self.model.backward(value)
        ended = now(self._device)
        self.model.zero_grad()
        ready = {name: seconds_between(start, moment) for name, moment in self._ready}
        return ran - began, ended - ran, ready


@dataclass(frozen=True)
class _ComputeTimes:
    """Seconds of the slowest rank, by step: ``[steps, …]``."""

    forward: torch.Tensor
    backward: torch.Tensor
    optimizer: torch.Tensor
    buffered: torch.Tensor
    ready: torch.Tensor


def measure_model_step(workload: Workload, device: str, steps: int, source: Source) -> ModelStep:
    """Return the compute times of a step; a collective.

    Args:
        workload: the training.
        device: to compute on.
        steps: number of timed steps.
        source: records how the measurement was started.
    """
    plain, wrapped = workload.build(), WrappedModel(workload, device)
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
    times = _slowest_steps(own, torch.tensor(rows, dtype=torch.float64), device)
    return _model_step(workload, plain, names, times, device=device, source=source)


def _plain_step(
    workload: Workload, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> tuple[float, float, float]:
    """Run a step in a single process; return this rank's seconds of forward, backward and optimizer."""
    dist.barrier()
    began = now(device)
    value = workload.loss_of(model)
    ran = now(device)
    value.backward()
    ended = now(device)
    optimizer.step()
    optimizer.zero_grad()
    return ran - began, ended - ran, now(device) - ended


def _slowest_steps(own: torch.Tensor, wrapped: torch.Tensor, device: str) -> _ComputeTimes:
    """Return for every step the seconds of the slowest rank."""
    plain, buffered = gather_ranks(own, device), gather_ranks(wrapped, device)
    rows = torch.arange(len(own))
    one = plain[plain.sum(2).argmax(0), rows]
    two = buffered[buffered[:, :, 0].argmax(0), rows]
    return _ComputeTimes(one[:, 0], one[:, 1], one[:, 2], two[:, 0], two[:, 1:])


def _fit_update(workload: Workload, model: torch.nn.Module, device: str) -> tuple[float, float]:
    """Return the seconds of an optimizer call, and of each byte of its parameters.

    All parameters are updated in parts, one after another, as by a sharded optimizer: the part updated before is no
    longer in the cache.
    """
    numel = sum(param.numel() for param in model.parameters() if param.requires_grad)
    flat = torch.randn(numel, device=device)
    times = []
    for parts in _UPDATE_PARTS:
        held = [torch.nn.Parameter(part) for part in flat.clone().chunk(parts)]
        optimizers = [workload.optimizer([param]) for param in held]
        for param in held:
            param.grad = torch.ones_like(param)
        seconds = []
        for _ in range(_UPDATES):
            dist.barrier()
            began = now(device)
            for optimizer in optimizers:
                optimizer.step()
            seconds.append(now(device) - began)
        times.append(median(slowest_rank(seconds, device)[1:]))
    nbytes = np.full(len(_UPDATE_PARTS), float(flat.nbytes))
    line = fit_line(np.array(_UPDATE_PARTS, float), nbytes, np.array(times))
    return line.alpha, line.beta


def _model_step(
    workload: Workload,
    model: torch.nn.Module,
    names: list[str],
    times: _ComputeTimes,
    *,
    device: str,
    source: Source,
) -> ModelStep:
    update_call, update_byte = _fit_update(workload, model, device)
    buffered = times.buffered.median().item()
    ready = times.ready.median(0).values.clamp(max=buffered).tolist()
    units, params = unit_of_parameter(model), dict(model.named_parameters())
    whole = times.forward + times.backward
    low, high = whole.quantile(0.1).item(), whole.quantile(0.9).item()
    on_cpu = device == "cpu"
    return ModelStep(
        model=workload.name,
        fingerprint=model_fingerprint(model),
        batch=workload.batch,
        shape=workload.shape,
        device="cpu" if on_cpu else torch.get_device_module(device).get_device_name(),
        backend=Comm().backend,
        ranks=dist.get_world_size(),
        threads=torch.get_num_threads() if on_cpu else 0,
        forward=times.forward.median().item(),
        backward=times.backward.median().item(),
        buffered=buffered,
        optimizer=times.optimizer.median().item(),
        update_call=update_call,
        update_byte=update_byte,
        spread=(high - low) / 2 / whole.median().item(),
        parameters=tuple(
            Parameter(name, params[name].nbytes, at, _kind(params[name]), units[name])
            for name, at in sorted(zip(names, ready, strict=True), key=lambda pair: pair[1])
        ),
        source=source,
    )


def _kind(param: torch.Tensor) -> str:
    return f"{param.device.type} {str(param.dtype).removeprefix('torch.')}"
