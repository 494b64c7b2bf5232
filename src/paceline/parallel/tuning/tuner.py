"""What an all-reduce costs on this wire, from a few calls between two steps; all ranks find the same.

``sync="auto"``: on the run itself, between optimizer steps, the plan under which a step is shortest is found.

    start     as `Sync()`, torch DDP's bucket size, which everything is compared with
    look      one step in which is noted when each gradient is ready; a few calls tell what a call costs
    try       few plans (`candidate_plans`) take turns (`race`), a turn a few steps; the slowest rank's time counts
    settle    the winner stays, is told, and is kept for the next run of this model on these hosts (`remember`)
    watch     when steps get much slower or faster for long, it begins again

All of it is decided at the ends of rounds, from numbers that all ranks have, so that all change at the same step. A
plan changes nothing but when and in which pieces gradients are sent: on a backend that sums in rank order (paceline)
the parameters are the same to the bit.

[Note: when a plan changes] Between a step and the next forward, or at the beginning of backward on a rank that runs no
forward. The step during which it changes pays for moving, so it does not count.

[Note: sharding] Plans that shard the optimizer are tried only where a `ShardedOptimizer` alone updates the model. Its
state then moves from layout to layout. Nothing else of a program needs to differ, but that gradients are gone after
``step()``, as with ``"sharded"``.
"""

from __future__ import annotations

import statistics
import sys
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch

from paceline.cost_model.bucket_layout import ReadyGradient
from paceline.parallel.engine.comm import Comm
from paceline.parallel.strategy import Sync
from paceline.parallel.tuning.candidates import CallCost, CandidateRace, candidate_plans
from paceline.parallel.tuning.tuning_cache import TuningCache, TuningResult
from paceline.world.object_collectives import gather_rows

if TYPE_CHECKING:
    import torch

    from paceline.parallel.engine.reducer import Reducer
    from paceline.parallel.sharding.zero import ShardedOptimizer

__all__ = ["DEFAULT", "Tuner", "max_over_ranks", "measure_call_cost"]

_SMALL_NBYTES, _MOST_NBYTES, _FACTOR = 4 << 10, 16 << 20, 8


_LONG_ENOUGH = 0.05  # seconds of a call: what it costs to begin hardly counts any more


_TURNS = 5


def measure_call_cost(comm: Comm, device: torch.device) -> CallCost:
    """Return what a call costs, and a byte; all ranks call this, with nothing else under way."""
    small = statistics.median(_seconds(comm, _SMALL_NBYTES, device) for _ in range(_TURNS))
    nbytes, seconds = _SMALL_NBYTES, small
    while seconds < _LONG_ENOUGH and nbytes * _FACTOR <= _MOST_NBYTES:
        nbytes *= _FACTOR
        seconds = min(_seconds(comm, nbytes, device) for _ in range(2))
    return CallCost(small, max(0.0, seconds - small) / max(nbytes - _SMALL_NBYTES, 1))


def max_over_ranks(seconds: Sequence[float], comm: Comm) -> list[float]:
    """Return, number by number, the largest of all ranks."""
    rows = gather_rows(torch.tensor(seconds, dtype=torch.float64), comm.group)
    return torch.stack(rows).amax(0).tolist()


def _seconds(comm: Comm, nbytes: int, device: torch.device) -> float:
    """Return what an all-reduce takes on the slowest rank."""
    flat = comm.allocate(nbytes // 4, torch.float32, device).zero_()
    started = time.perf_counter()
    comm.all_reduce(flat).wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max_over_ranks([time.perf_counter() - started], comm)[0]


DEFAULT = Sync()


_MEASURED = 2  # steps of a turn that count; the one before pays for the change


_ROUNDS = 4


_WINDOW = 20  # steps between two looks at whether step time has moved


_MOVED = 1.25


_FOR_LONG = 3  # windows in a row


Course = Generator[Sync, float, None]
"""Yields the plan to go on with, and is sent the seconds of the step that was made with it."""


class Tuner:
    """Finds the plan under which a model's steps are shortest, while it trains.

    Args:
        engine: of the model, in a world of two ranks or more.

    Attributes:
        wanted: the plan that the engine shall have from the next step on.
        settled: what is known of it; None while candidates are tried.
        sentences: what was told so far: what was chosen, what that gains, how it was found.
        tell: how rank 0 says a sentence; by default on stderr.
    """

    def __init__(self, engine: Reducer) -> None:
        self.wanted = DEFAULT
        self.settled: TuningResult | None = None
        self.sentences: list[str] = []
        self.tell: Callable[[str], object] = _on_stderr
        self._engine_ref = weakref.ref(engine)
        self._comm = engine.comm
        self._optimizers: list[weakref.ref[ShardedOptimizer]] = []
        self._others = False  # an optimizer that can't update shards has stepped the model
        self._memory = TuningCache(engine.slots, engine.comm)
        self._course: Course | None = None
        self._since: float | None = None

    @property
    def _engine(self) -> Reducer:
        engine = self._engine_ref()
        assert engine is not None, "it is the engine that calls"
        return engine

    # ------------------------------------------------------------------ what the engine and the optimizer tell

    def attach(self, optimizer: ShardedOptimizer) -> None:
        """Take note of an optimizer that updates this model."""
        self._optimizers.append(weakref.ref(optimizer))

    def optimizer_stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note that `optimizer` is about to update this model."""
        attached = [reference() for reference in self._optimizers]
        self._others |= not any(each is not None and each.includes(optimizer) for each in attached)

    def round_ended(self) -> None:
        """Take note that all ranks have ended a round, and decide what to do next."""
        now = time.perf_counter()
        before, self._since = self._since, now
        if self._course is None:
            self._course = self._whole_course()
            next(self._course)
        elif before is not None and self._engine.plan == self.wanted:  # see [Note: when a plan changes]
            self.wanted = self._course.send(now - before)
            self._since = time.perf_counter()

    def apply_pending_plan(self) -> None:
        """Have the engine take up the wanted plan; called when none of its gradients wait for a round."""
        engine = self._engine
        if engine.plan == self.wanted or not engine.settled:
            return
        if "optimizer" not in (engine.plan.shard, self.wanted.shard):
            engine.change_plan(self.wanted)
            return
        (optimizer,) = (reference() for reference in self._optimizers)
        if optimizer is not None and optimizer.movable and engine.dropped:
            state = optimizer.gather_state()
            engine.change_plan(self.wanted)
            optimizer.resume_state(state)

    # ------------------------------------------------------------------ the course of it

    def _whole_course(self) -> Course:
        """Search, settle, watch, and begin again when steps have become much slower or faster."""
        yield DEFAULT  # most optimizers make their state in the first step
        self.settled = self._remembered()
        usual = None if self.settled is None else self.settled.step_seconds
        while True:
            if self.settled is None:
                self.settled = yield from self._search()
            yield from self._watch(self.settled.plan, usual)
            self.settled, usual = None, None

    def _search(self) -> Generator[Sync, float, TuningResult]:
        """Look, try, and return what was found."""
        if self._engine.plan != DEFAULT:
            yield DEFAULT
        self._engine.arrivals = {}
        yield DEFAULT
        plans = self._candidates()
        race = CandidateRace(len(plans), _ROUNDS)
        while (turn := race.turn) is not None:
            yield plans[turn]
            laps = yield from _steps(plans[turn], _MEASURED)
            race.record(min(max_over_ranks(laps, self._comm)))
        return self._found(plans, race)

    def _watch(self, plan: Sync, usual: float | None) -> Course:
        """Return when steps have become much slower or faster for long than `usual`; None: than at the beginning."""
        yield plan
        moved, now = 0, 0.0
        while moved < _FOR_LONG:
            laps = yield from _steps(plan, _WINDOW)
            (now,) = max_over_ranks([statistics.median(laps)], self._comm)
            usual = now if usual is None else usual
            moved = moved + 1 if max(now / usual, usual / now) > _MOVED else 0
        self._tell(f"steps take {now:.3g} s, where {usual:.3g} s were usual: the search begins again")

    def _candidates(self) -> Sequence[Sync]:
        """Return the plans to try, the same on all ranks; ends the noting of arrivals."""
        engine = self._engine
        arrivals, engine.arrivals = engine.arrivals or {}, None
        began = min(arrivals.values(), default=0.0)
        seconds = [arrivals.get(index, began) - began for index in engine.order]
        ready: list[ReadyGradient] = []
        for index, own in zip(engine.order, max_over_ranks(seconds, self._comm), strict=True):
            view = engine.slots[index].view
            at = max(own, ready[-1].seconds if ready else 0.0)
            ready.append(ReadyGradient(view.nbytes, at, f"{view.dtype} on {view.device}"))
        price = measure_call_cost(self._comm, engine.device)
        return candidate_plans(ready, price, may_shard=self._may_shard())

    def _may_shard(self) -> bool:
        """Tell whether plans that shard the optimizer can be tried; see [Note: sharding]."""
        attached = [reference() for reference in self._optimizers]
        if len(attached) != 1 or self._others:
            return False
        return attached[0] is not None and attached[0].can_shard

    # ------------------------------------------------------------------ what was found

    def _remembered(self) -> TuningResult | None:
        """Return what an earlier run found, where that can be used."""
        tuned = self._memory.read()
        if tuned is None or (tuned.plan.shard == "optimizer" and not self._may_shard()):
            return None
        self._tell(
            f"{tuned.plan.words}, found for this model on these hosts on {tuned.date}: a step took "
            f"{tuned.step_seconds:.3g} s then, {tuned.default_seconds:.3g} s with {DEFAULT.words}"
        )
        return tuned

    def _found(self, plans: Sequence[Sync], race: CandidateRace) -> TuningResult:
        """Return the result of a race, told and kept."""
        winner = race.winner
        rows = tuple(
            {"plan": plan.words, "seconds": seconds, "ratio": race.score(number)}
            for number, (plan, seconds) in enumerate(zip(plans, race.seconds, strict=True))
        )
        date = datetime.now(UTC).isoformat(timespec="seconds")
        times = race.step_seconds(winner), race.step_seconds(0), race.score(winner)
        tuned = TuningResult(plans[winner], *times, date, rows)
        kept = self._memory.write(tuned)
        self._tell(" ".join(filter(None, (tuned.sentence, f"Kept in {kept}." if kept else ""))))
        return tuned

    def _tell(self, text: str) -> None:
        self.sentences.append(f'sync="auto": {text}')
        if self._comm.rank == 0:
            self.tell(self.sentences[-1])


def _on_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def _steps(plan: Sync, count: int) -> Generator[Sync, float, list[float]]:
    """Go on with `plan`, and return the seconds of so many steps."""
    seconds = [0.0] * count
    for at in range(count):
        seconds[at] = yield plan
    return seconds
