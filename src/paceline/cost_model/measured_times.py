"""The times that ``paceline bench collectives`` wrote, as points to fit, checked field by field.

A row counts if its result was right and two ranks or more took part. Where an operation was measured in several
types, float32 counts, or else the first one: a type changes what is added, not what is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.collectives.closed_form_cost import CLOSED_FORMS
from paceline.cost_model.algorithm_terms import OPS, USUAL, AlgorithmTerms
from paceline.cost_model.fit_measurements import MeasuredPoint
from paceline.cost_model.json_fields import Fields, read_result
from paceline.cost_model.profile_entries import CallCost, Source

__all__ = ["KIND", "SCHEMA", "Measured", "Measurement", "load_measured_times", "pooled"]

KIND, SCHEMA = "bench-collectives", 1
_CALL_NBYTES = 1024
_SCHEDULE = "schedule:"


@dataclass(frozen=True)
class Measured:
    """The times of one operation on one backend.

    Attributes:
        backend: such as ``"gloo"``, or ``"schedule:ring"`` for a schedule of ours.
        op: such as ``"all-reduce"``.
        points: sizes, ranks and median times.
        wrong: rows that were left out because their result was wrong.
    """

    backend: str
    op: str
    points: tuple[MeasuredPoint, ...]
    wrong: int = 0

    @property
    def forms(self) -> Sequence[AlgorithmTerms] | None:
        """The forms to choose from: those of its algorithm for a schedule of ours, else None for all."""
        name = self.backend.removeprefix(_SCHEDULE)
        if name == self.backend or (self.op, name) not in CLOSED_FORMS:
            return None
        return (AlgorithmTerms(name), AlgorithmTerms(name, shared=True))


@dataclass(frozen=True)
class Measurement:
    """One result file.

    Attributes:
        command: what made it.
        network: what carried the bytes, such as ``"loopback"``.
        machine: facts that bear on times.
        groups: by backend and operation, in the order of the file.
    """

    command: str
    network: str
    machine: dict[str, Any]
    groups: tuple[Measured, ...]

    def calls(self, source: Source) -> list[CallCost]:
        """Return what calls cost: of each operation and number of ranks the smallest size, if it is 1 KiB or less."""
        found = []
        for group in self.groups:
            for ranks in sorted({point.ranks for point in group.points}):
                least = min((p for p in group.points if p.ranks == ranks), key=lambda point: point.nbytes)
                if least.nbytes <= _CALL_NBYTES:
                    found.append(
                        CallCost(
                            *(group.backend, self.network, group.op, ranks),
                            *(least.nbytes, least.seconds, source),
                        )
                    )
        return found


def load_measured_times(path: str | Path) -> Measurement:
    """Return the measurement in a file.

    Raises:
        UsageError: the file can't be read, is no result of ``paceline bench collectives``, is of a newer schema, or a
            field is missing or wrong.
    """
    top = read_result(path, KIND, SCHEMA, "measurement of collectives", _REMEDY)
    network = top.fields("settings").text("network")
    return Measurement(top.text("command"), network, top.mapping("machine"), _groups(list(top.rows("rows"))))


def pooled(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Return one measurement for each network, its points those of all files: a run may hold one number of ranks only.

    Commands are joined by "; "; facts of the machine are those of the first file.
    """
    of_network: dict[str, list[Measurement]] = {}
    for each in measurements:
        of_network.setdefault(each.network, []).append(each)
    return [_joined(network, several) for network, several in of_network.items()]


def _joined(network: str, several: Sequence[Measurement]) -> Measurement:
    of_key: dict[tuple[str, str], Measured] = {}
    for group in (group for each in several for group in each.groups):
        before = of_key.get((group.backend, group.op), Measured(group.backend, group.op, ()))
        of_key[group.backend, group.op] = replace(
            before, points=before.points + group.points, wrong=before.wrong + group.wrong
        )
    commands = dict.fromkeys(each.command for each in several)
    return Measurement("; ".join(commands), network, several[0].machine, tuple(of_key.values()))


_REMEDY = "name a file that paceline bench collectives wrote with --json"


def _groups(rows: Sequence[Fields]) -> tuple[Measured, ...]:
    """Return the rows by backend and operation."""
    of_key: dict[tuple[str, str], list[tuple[str, bool, MeasuredPoint]]] = {}
    for row in rows:
        op = row.text("op")
        if op not in USUAL:
            raise row.wrong("op", f"one of {', '.join(OPS)}")
        point = MeasuredPoint(
            row.whole("nbytes", least=1), row.whole("ranks", least=1), row.positive("median_s")
        )
        kept = of_key.setdefault((row.text("backend"), op), [])
        if point.ranks > 1:
            kept.append((row.text("dtype"), row.flag("correct"), point))
    return tuple(_group(*key, kept) for key, kept in of_key.items())


def _group(backend: str, op: str, rows: Sequence[tuple[str, bool, MeasuredPoint]]) -> Measured:
    dtypes = [dtype for dtype, _, _ in rows]
    chosen = "float32" if "float32" in dtypes or not dtypes else dtypes[0]
    of_dtype = [(correct, point) for dtype, correct, point in rows if dtype == chosen]
    points = tuple(point for correct, point in of_dtype if correct)
    return Measured(backend, op, points, len(of_dtype) - len(points))
