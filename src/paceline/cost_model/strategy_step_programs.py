"""Programs of a rank's training step per strategy, for `paceline.cost_model.step_simulator`.

They follow the engine: `paceline.parallel.engine.launch_queue` launches, `paceline.parallel.sharding.zero` updates part
by part, FSDP2 gathers. Phases assign the time: forward, backward, exposed (idle or launching), optimizer, gather (idle
until parameters arrive that other ranks updated).

[Note: steady state] The parameters that a sharded step gathers arrive during the next step's forward. So its program
begins with backward and update of the step before, which leave the gathers in flight as every step finds them: all of
them have ended before the next backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.cost_model.bucket_assignment import plan_buckets, update_parts
from paceline.cost_model.step_costs import ExchangePrice, StepCosts
from paceline.cost_model.step_simulator import Compute, Launch, Wait
from paceline.cost_model.step_strategy import ELEMENT_NBYTES, StepStrategy

__all__ = ["StepProgram", "step_program"]

_STATUS_NBYTES = 8


@dataclass
class StepProgram:
    """A step under construction.

    Attributes:
        costs: prices of the calls.
        strategy: of the step.
        steps: of the rank.
        beyond: notes on calls that lie beyond the measurements, in order, each once.
        earlier: number of `steps` that belong to the step before; see [Note: steady state].
        earlier_calls: number of calls that they launch.
    """

    costs: StepCosts
    strategy: StepStrategy
    steps: list[Compute | Launch | Wait] = field(default_factory=list)
    beyond: dict[str, None] = field(default_factory=dict)
    earlier: int = 0
    earlier_calls: int = 0
    _calls: int = 0

    def begin(self) -> None:
        """Begin the step: all that was added belongs to the one before."""
        self.earlier, self.earlier_calls = len(self.steps), self._calls

    def compute(self, seconds: float, phase: str) -> None:
        """Add computing."""
        self.steps.append(Compute(seconds, phase))

    def launch(self, op: str, nbytes: float, phase: str) -> int:
        """Add a call of `nbytes` and return its key."""
        price = self.price(op)
        note = price.beyond(nbytes)
        if note:
            self.beyond[note] = None
        return self._add(price.channel.launch(self._calls, nbytes, phase))

    def reduce(self, nbytes: float) -> int:
        """Add the call that reduces a bucket and return its key."""
        sharded = self.strategy.reduce_scatters
        if self.strategy.compression == "none":
            return self.launch("reduce-scatter" if sharded else "all-reduce", nbytes, "exposed")
        packed = nbytes * ELEMENT_NBYTES[self.strategy.compression] / ELEMENT_NBYTES["none"]
        if sharded:
            return self.launch("reduce-scatter", packed, "exposed")
        scatter, gather = (self.price(op).channel for op in ("reduce-scatter", "all-gather"))
        seconds = scatter.seconds_of(packed) + gather.seconds_of(packed)
        gap = sum((each.gap_of or each.seconds_of)(packed) for each in (scatter, gather))
        return self._add(
            Launch(self._calls, seconds, gap=gap, host=scatter.launch_seconds, nbytes=packed, phase="exposed")
        )

    def wait(self, key: int, phase: str) -> None:
        """Add waiting for the end of a call."""
        self.steps.append(Wait(key, phase))

    def price(self, op: str) -> ExchangePrice:
        """Return the price of a call."""
        return self.costs.price(op, torch_ddp=self.strategy.is_torch_ddp)

    def _add(self, call: Launch) -> int:
        self.steps.append(call)
        self._calls += 1
        return call.key


def step_program(costs: StepCosts, strategy: StepStrategy) -> StepProgram:
    """Return the program of one step.

    Raises:
        UsageError: one of its exchanges was not measured.
    """
    program = StepProgram(costs, strategy)
    if strategy.name == "full-shard":
        _full_shard(program)
        return program
    ready = [each.ready for each in costs.step.parameters]
    nbytes = [each.nbytes for each in ready]
    buckets = plan_buckets(
        range(len(ready)), nbytes, [each.kind for each in ready], strategy.caps(sum(nbytes))
    )
    sizes = [sum(ready[index].nbytes for index in members) for members in buckets]
    full = [max(ready[index].seconds for index in members) for members in buckets]
    if strategy.reduce_scatters:
        gathers = _sharded_update(program, sizes, _backward(program, sizes, full))
        program.begin()
        _forward(program, full, gathers)
        _sharded_update(program, sizes, _backward(program, sizes, full))
        return program
    program.compute(costs.step.forward, "forward")
    keys = _backward(program, sizes, full)
    for key in keys if strategy.overlaps else ():
        program.wait(key, "exposed")
    program.compute(costs.step.optimizer, "optimizer")
    return program


def _forward(program: StepProgram, full: list[float], gathers: dict[int, int]) -> None:
    """Add forward, which waits for the gather of each bucket where it first uses a parameter of it.

    Backward visits the layers in reverse: the bucket that is full last is used first.

    Args:
        program: to add to.
        full: seconds from the beginning of backward until a bucket is full.
        gathers: key of each bucket's gather.
    """
    step, now = program.costs.step, 0.0
    for index in sorted(gathers, key=lambda index: -full[index]):
        used = step.forward * max(0.0, 1 - full[index] / step.buffered)
        program.compute(max(0.0, used - now), "forward")
        now = max(now, used)
        program.wait(gathers[index], "gather")
    program.compute(step.forward - now, "forward")


def _backward(program: StepProgram, sizes: list[int], full: list[float]) -> list[int]:
    """Add backward and the calls of its buckets; return their keys.

    The engine launches its last bucket when backward has ended, with the ranks' status or, sharded, right after it;
    torch's DDP when it is full.
    """
    whole, now, keys = program.costs.step.buffered, 0.0, []
    strategy, last = program.strategy, len(sizes) - 1
    for number, (nbytes, seconds) in enumerate(zip(sizes, full, strict=True)):
        at_end = number == last and not strategy.is_torch_ddp
        launched = whole if at_end or not strategy.overlaps else seconds
        program.compute(max(0.0, launched - now), "backward")
        now = max(now, launched)
        if at_end and strategy.reduce_scatters:
            status_nbytes = _STATUS_NBYTES * len(program.costs.step.parameters)
            status = program.launch("all-gather", status_nbytes, "exposed")
            keys.append(program.reduce(nbytes))
            program.wait(status, "exposed")
            continue
        keys.append(program.reduce(nbytes))
        if not strategy.overlaps:
            program.wait(keys[-1], "exposed")
        elif strategy.frees_gradients and number > 1:
            program.wait(keys[number - 2], "exposed")
    program.compute(max(0.0, whole - now), "backward")
    return keys


def _sharded_update(program: StepProgram, sizes: list[int], keys: list[int]) -> dict[int, int]:
    """Add the update of a sharded optimizer; return the key of each bucket's gather.

    The last part, which the next forward uses first, is sent first. While its gradients are reduced, the others are
    updated.
    """
    step, ranks, gathers = program.costs.step, program.costs.ranks, dict[int, int]()
    parts = update_parts(sizes, accelerator=step.device != "cpu")
    for part in parts:
        for index in part:
            program.wait(keys[index], "exposed")
        program.compute(step.update_seconds(sum(sizes[index] for index in part) / ranks), "optimizer")
    for part in reversed(parts):
        gathers |= {index: program.launch("all-gather", sizes[index], "optimizer") for index in part}
    return gathers


def _full_shard(program: StepProgram) -> None:
    """Add a step of FSDP2 whose calls block, as they do without streams (CPU).

    Units are gathered before their forward and again before their backward (the root once), and reduce-scattered after
    it. Forward and backward are divided among units by bytes. Copies into and out of buffers are not counted.
    """
    step, size_of = program.costs.step, dict[int, int]()
    for each in step.parameters:
        size_of[each.unit] = size_of.get(each.unit, 0) + each.nbytes

    def call(op: str, unit: int, phase: str) -> None:
        program.wait(program.launch(op, size_of[unit], phase), phase)

    for unit in sorted(size_of):
        call("all-gather", unit, "gather")
        program.compute(step.forward * size_of[unit] / step.nbytes, "forward")
    for unit in sorted(size_of, reverse=True):
        if unit:
            call("all-gather", unit, "gather")
        program.compute(step.backward * size_of[unit] / step.nbytes, "backward")
        call("reduce-scatter", unit, "exposed")
    program.compute(step.optimizer / program.costs.ranks, "optimizer")
