"""What a rank does in one training step, for every way to synchronise: a program for
`paceline.cost_model.step_simulator` (pure).

These follow the engine step by step: `paceline.parallel.engine.launch_queue` launches,
`paceline.parallel.sharding.zero` updates part by part, FSDP2 gathers. Phases name whose time it is: forward,
backward, exposed (standing still, or launching), optimizer, gather (standing still for parameters that others updated).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.cost_model.bucket_layout import plan_buckets, update_parts
from paceline.cost_model.step_costs import ExchangePrice, StepCosts
from paceline.cost_model.step_simulator import Compute, Launch, Wait
from paceline.cost_model.step_strategy import NBYTES_A_NUMBER, StepStrategy

__all__ = ["StepProgram", "step_program"]

_LEDGER_NBYTES = 8


@dataclass
class StepProgram:
    """A step under construction.

    Attributes:
        costs: prices. way: how gradients are synchronised.
        steps: what the rank does.
        beyond: what of the calls was not measured, in words.
    """

    costs: StepCosts
    way: StepStrategy
    steps: list[Compute | Launch | Wait] = field(default_factory=list)
    beyond: dict[str, None] = field(default_factory=dict)
    _calls: int = 0

    def compute(self, seconds: float, phase: str) -> None:
        """Add computing."""
        self.steps.append(Compute(seconds, phase))

    def launch(self, op: str, nbytes: float, phase: str) -> int:
        """Add a call of so many bytes; return its key."""
        price = self.price(op)
        note = price.beyond(nbytes)
        if note:
            self.beyond[note] = None
        launched = price.channel.launch(self._calls, nbytes, phase)
        self.steps.append(launched)
        self._calls += 1
        return launched.key

    def reduce(self, nbytes: float) -> int:
        """Add the call that sums a bucket; return its key."""
        if self.way.compression == "none":
            return self.launch(
                "reduce-scatter" if self.way.strategy == "sharded" else "all-reduce", nbytes, "exposed"
            )
        packed = nbytes * NBYTES_A_NUMBER[self.way.compression] / NBYTES_A_NUMBER["none"]
        if self.way.strategy == "sharded":
            return self.launch("reduce-scatter", packed, "exposed")
        swap, publish = self.price("reduce-scatter").channel, self.price("all-gather").channel
        seconds, gap = (
            first(packed) + then(packed)
            for first, then in (
                (swap.seconds_of, publish.seconds_of),
                (swap.gap_of or swap.seconds_of, publish.gap_of or publish.seconds_of),
            )
        )
        self.steps.append(Launch(self._calls, seconds, gap, swap.launch_seconds, packed, "exposed"))
        self._calls += 1
        return self._calls - 1

    def wait(self, key: int, phase: str) -> None:
        """Add standing still until a call has ended."""
        self.steps.append(Wait(key, phase))

    def price(self, op: str) -> ExchangePrice:
        """Return the price of a call."""
        return self.costs.price(op, torchs=self.way.is_torchs)


def step_program(costs: StepCosts, way: StepStrategy) -> StepProgram:
    """Return what a rank does in one step.

    Args:
        costs: of the model, backend and network. way: how gradients are synchronised.

    Raises:
        UsageError: an exchange of it was not measured.
    """
    made = StepProgram(costs, way)
    if way.strategy == "full-shard":
        _full_shard(made)
        return made
    made.compute(costs.step.forward, "forward")
    ready = [each.ready for each in costs.step.parameters]
    buckets = plan_buckets(range(len(ready)), [r.nbytes for r in ready], [r.kind for r in ready], way.caps)
    sizes = [sum(ready[index].nbytes for index in members) for members in buckets]
    full = [max(ready[index].seconds for index in members) for members in buckets]
    keys = _backward(made, sizes, full)
    if way.strategy == "sharded":
        _sharded_update(made, sizes, keys)
    else:
        for key in keys if way.overlaps else ():
            made.wait(key, "exposed")
        made.compute(costs.step.optimizer, "optimizer")
    return made


def _backward(made: StepProgram, sizes: list[int], full: list[float]) -> list[int]:
    """Add backward and the calls of its buckets; return their keys.

    The engine's last bucket leaves when backward has ended, with the ledger or, sharded, right after it; that of
    torch's DDP when it is full.
    """
    whole, at, keys = made.costs.step.buffered, 0.0, []
    overlaps, last = made.way.overlaps, len(sizes) - 1
    for number, (nbytes, seconds) in enumerate(zip(sizes, full, strict=True)):
        ends = number == last and not made.way.is_torchs
        leaves = whole if ends or not overlaps else seconds
        made.compute(max(0.0, leaves - at), "backward")
        at = max(at, leaves)
        if ends and made.way.strategy == "sharded":
            ledger = made.launch("all-gather", _LEDGER_NBYTES * len(made.costs.step.parameters), "exposed")
            keys.append(made.reduce(nbytes))
            made.wait(ledger, "exposed")
            continue
        keys.append(made.reduce(nbytes))
        if not overlaps:
            made.wait(keys[-1], "exposed")
    made.compute(max(0.0, whole - at), "backward")
    return keys


def _sharded_update(made: StepProgram, sizes: list[int], keys: list[int]) -> None:
    """Add the update of a sharded optimizer: part by part wait, update the own shard, send it; then wait for all."""
    step, ranks, gathers = made.costs.step, made.costs.ranks, []
    for part in update_parts(sizes):
        for index in part:
            made.wait(keys[index], "exposed")
        made.compute(step.update_seconds(sum(sizes[index] for index in part) / ranks), "optimizer")
        gathers += [made.launch("all-gather", sizes[index], "optimizer") for index in part]
    for key in gathers:
        made.wait(key, "gather")


def _full_shard(made: StepProgram) -> None:
    """Add a step of FSDP2 whose calls block, as they do where there are no streams (CPU).

    Units are gathered before their forward and again before their backward (the root once), and reduce-scattered after
    it. Forward and backward are split between units by their bytes. Copying in and out is not counted.
    """
    step, ranks = made.costs.step, made.costs.ranks
    size_of: dict[int, int] = {}
    for each in step.parameters:
        size_of[each.unit] = size_of.get(each.unit, 0) + each.nbytes
    for unit in sorted(size_of):
        made.wait(made.launch("all-gather", size_of[unit], "gather"), "gather")
        made.compute(step.forward * size_of[unit] / step.nbytes, "forward")
    for unit in sorted(size_of, reverse=True):
        if unit:
            made.wait(made.launch("all-gather", size_of[unit], "gather"), "gather")
        made.compute(step.backward * size_of[unit] / step.nbytes, "backward")
        made.wait(made.launch("reduce-scatter", size_of[unit], "exposed"), "exposed")
    made.compute(step.optimizer / ranks, "optimizer")
