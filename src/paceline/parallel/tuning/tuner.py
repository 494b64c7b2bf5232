"""The tuner of ``sync="auto"``: finds the plan with the shortest steps during training, between optimizer steps.

    start    with `Sync()`, torch DDP's bucket size, the default that everything is compared with
    measure  when each gradient becomes ready, in one step; what a call costs, by a few calls
    race     a few plans (`candidates`) take turns of a few steps each; the slowest rank's time counts
    keep     the winner stays, is reported, and is kept for the next run of this model on these hosts (`tuning_cache`)
    watch    when steps get much slower or faster for long, the search starts again

All decisions are made at the ends of rounds, from numbers that all ranks have, so all ranks change plan at the same
step. A plan changes only when and in which pieces gradients are sent: on a backend that sums in one order (paceline)
the parameters are the same to the bit.

[Note: when a plan changes] At the end of ``step()`` if that leaves no gradients, otherwise at the beginning of the next
backward; never in forward, which one rank may run alone to evaluate. The step during which it changes pays for moving,
so it does not count.

[Note: sharding] Plans that shard the optimizer are tried only if `ShardedOptimizer`s update the model, each other
parameters. Their state then moves from layout to layout. Programs need no change, except that gradients are gone after
``step()``, as with ``"sharded"``.
"""

from __future__ import annotations

import statistics
import sys
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from datetime import UTC, datetime

import torch

from paceline.cost_model.backward_simulation import ReadyGradient
from paceline.parallel.engine.engine_protocols import ReshardableOptimizer
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.strategy import Sync
from paceline.parallel.tuning.candidates import CallCost, CandidateRace, candidate_plans
from paceline.parallel.tuning.tuning_cache import TuningCache, TuningResult
from paceline.world.accelerator import synchronize
from paceline.world.control_collectives import gather_rows

__all__ = ["DEFAULT", "Tuner", "max_over_ranks", "measure_call_cost"]

DEFAULT = Sync()

_SMALL_NBYTES, _MOST_NBYTES, _GROWTH = 4 << 10, 16 << 20, 8
_LONG_CALL = 0.05  # seconds of a call in which its fixed cost hardly counts
_SMALL_CALLS = 5

_ROUNDS = 4  # of the race
_STEPS_PER_TURN = 2  # that count, after one that pays for the change
_WINDOW = 20  # steps between two checks for drift
_DRIFT = 1.25  # ratio of step times that counts as drift
_DRIFT_WINDOWS = 3  # in a row

Search = Generator[Sync, float, None]
"""Yields the plan for the next step, and is sent the seconds of that step."""


def max_over_ranks(seconds: Sequence[float], comm: Comm) -> list[float]:
    """Return, number by number, the largest of all ranks."""
    rows = gather_rows(torch.tensor(seconds, dtype=torch.float64), comm.group)
    return torch.stack(rows).amax(0).tolist()


def measure_call_cost(comm: Comm, device: torch.device) -> CallCost:
    """Measure what an all-reduce costs per call and per byte; all ranks call this, with no other call in flight."""
    small = statistics.median(_seconds(comm, _SMALL_NBYTES, device) for _ in range(_SMALL_CALLS))
    nbytes, seconds = _SMALL_NBYTES, small
    while seconds < _LONG_CALL and nbytes * _GROWTH <= _MOST_NBYTES:
        nbytes *= _GROWTH
        seconds = min(_seconds(comm, nbytes, device) for _ in range(2))
    return CallCost(small, max(0.0, seconds - small) / max(nbytes - _SMALL_NBYTES, 1))


def _seconds(comm: Comm, nbytes: int, device: torch.device) -> float:
    """Return the seconds of an all-reduce on the slowest rank."""
    flat = comm.allocate(nbytes // 4, torch.float32, device).zero_()
    started = time.perf_counter()
    comm.all_reduce(flat).wait()
    synchronize(device)
    return max_over_ranks([time.perf_counter() - started], comm)[0]


class Tuner:
    """Finds the plan with the shortest steps, while the model trains.

    Args:
        engine: of the model, in a world of two ranks or more.

    Attributes:
        target: the plan for the next step.
        settled: the chosen plan and its measurements; None while candidates are tried.
        sentences: all messages so far: the choice, its gain, the measurements.
        tell: called with each message on rank 0; by default prints to stderr.
    """

    def __init__(self, engine: Reducer) -> None:
        self.target = DEFAULT
        self.settled: TuningResult | None = None
        self.sentences: list[str] = []
        self.tell: Callable[[str], object] = lambda text: print(text, file=sys.stderr)
        self._engine_ref = weakref.ref(engine)
        self._comm = engine.comm
        self._optimizers: list[weakref.ref[ReshardableOptimizer]] = []
        self._others = False  # an optimizer that can't update shards has stepped the model
        self._cache = TuningCache(engine.slots, engine.comm)
        self._search: Search | None = None
        self._since: float | None = None

    @property
    def _engine(self) -> Reducer:
        engine = self._engine_ref()
        assert engine is not None, "the engine makes the call"
        return engine

    @property
    def _attached(self) -> list[ReshardableOptimizer]:
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    # ------------------------------------------------------------------ called by the engine and the optimizer

    def attach(self, optimizer: ReshardableOptimizer) -> None:
        """Register an optimizer that updates this model."""
        self._optimizers.append(weakref.ref(optimizer))

    def optimizer_stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that `optimizer` is about to update this model."""
        self._others |= not any(each.includes(optimizer) for each in self._attached)

    def round_ended(self) -> None:
        """Record the duration of a step, and decide on the next plan; all ranks call this after every round."""
        now = time.perf_counter()
        before, self._since = self._since, now
        if self._search is None:
            self._search = self._run()
            next(self._search)
        elif before is not None and self._engine.plan == self.target:  # see [Note: when a plan changes]
            self.target = self._search.send(now - before)
            self._since = time.perf_counter()

    def apply_pending_plan(self, *, if_empty: bool = False) -> None:
        """Switch the engine to the target plan, `if_empty` only if it has no gradients to move.

        All ranks call this, while none of the gradients wait for a round.
        """
        engine = self._engine
        if engine.plan == self.target or not engine.has_buckets or (if_empty and not engine.empty):
            return
        if "optimizer" not in (engine.plan.shard, self.target.shard):
            engine.change_plan(self.target)
            return
        optimizers = self._attached
        if optimizers and engine.empty and all(optimizer.movable for optimizer in optimizers):
            states = [optimizer.gather_state() for optimizer in optimizers]
            engine.change_plan(self.target)
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.resume_state(state)

    # ------------------------------------------------------------------ the search

    def _run(self) -> Search:
        """Search, keep the result, watch for drift, and search again when step times have drifted."""
        yield DEFAULT  # most optimizers make their state in the first step
        self.settled = self._cached_result()
        usual = None if self.settled is None else self.settled.step_seconds
        while True:
            if self.settled is None:
                self.settled = yield from self._find()
            yield from self._watch(self.settled.plan, usual)
            self.settled, usual = None, None

    def _find(self) -> Generator[Sync, float, TuningResult]:
        """Measure, race the candidates, and return the result."""
        if self._engine.plan != DEFAULT:
            yield DEFAULT
        self._engine.ready_times = {}
        yield DEFAULT
        plans = self._candidates()
        race = CandidateRace(len(plans), _ROUNDS)
        while (turn := race.turn) is not None:
            yield plans[turn]
            seconds = yield from _steps(plans[turn], _STEPS_PER_TURN)
            race.record(min(max_over_ranks(seconds, self._comm)))
        return self._conclude(plans, race)

    def _watch(self, plan: Sync, usual: float | None) -> Search:
        """Return when step times have drifted from `usual` for long; None: from those of the first window."""
        yield plan
        drifted, now = 0, 0.0
        while drifted < _DRIFT_WINDOWS:
            seconds = yield from _steps(plan, _WINDOW)
            (now,) = max_over_ranks([statistics.median(seconds)], self._comm)
            usual = now if usual is None else usual
            drifted = drifted + 1 if max(now / usual, usual / now) > _DRIFT else 0
        self._report(f"steps take {now:.3g} s, up or down from {usual:.3g} s: the search begins again")

    def _candidates(self) -> Sequence[Sync]:
        """Return the plans to try, the same on all ranks; ends the recording of ready times."""
        engine = self._engine
        times, engine.ready_times = engine.ready_times or {}, None
        began = min(times.values(), default=0.0)
        seconds = [times.get(index, began) - began for index in engine.order]
        ready: list[ReadyGradient] = []
        for index, own in zip(engine.order, max_over_ranks(seconds, self._comm), strict=True):
            view = engine.slots[index].view
            at = max(own, ready[-1].seconds if ready else 0.0)
            ready.append(ReadyGradient(view.nbytes, at, f"{view.dtype} on {view.device}"))
        price = measure_call_cost(self._comm, engine.device)
        return candidate_plans(ready, price, may_shard=self._may_shard())

    def _may_shard(self) -> bool:
        """Return whether plans that shard the optimizer can be tried; see [Note: sharding]."""
        attached = self._attached
        if not attached or self._others or not self._engine.consumers.disjoint:
            return False
        return all(each.can_shard for each in attached)

    # ------------------------------------------------------------------ results

    def _cached_result(self) -> TuningResult | None:
        """Return and report an earlier run's result if it is usable."""
        result = self._cache.read()
        if result is None or (result.plan.shard == "optimizer" and not self._may_shard()):
            return None
        self._report(
            f"{result.plan.label}, found for this model on these hosts on {result.date}: a step took "
            f"{result.step_seconds:.3g} s then, {result.default_seconds:.3g} s with {DEFAULT.label}"
        )
        return result

    def _conclude(self, plans: Sequence[Sync], race: CandidateRace) -> TuningResult:
        """Return, report and keep the result of a race."""
        winner = race.winner
        rows = tuple(
            {"plan": plan.label, "seconds": seconds, "ratio": race.score(number)}
            for number, (plan, seconds) in enumerate(zip(plans, race.seconds, strict=True))
        )
        result = TuningResult(
            plan=plans[winner],
            step_seconds=race.step_seconds(winner),
            default_seconds=race.step_seconds(0),
            ratio=race.score(winner),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            rows=rows,
        )
        file = self._cache.write(result)
        self._report(result.sentence + (f" Kept in {file}." if file else ""))
        return result

    def _report(self, text: str) -> None:
        self.sentences.append(f'sync="auto": {text}')
        if self._comm.rank == 0:
            self.tell(self.sentences[-1])


def _steps(plan: Sync, count: int) -> Generator[Sync, float, list[float]]:
    """Run `count` steps with `plan`, and return their seconds."""
    seconds = [0.0] * count
    for at in range(count):
        seconds[at] = yield plan
    return seconds
