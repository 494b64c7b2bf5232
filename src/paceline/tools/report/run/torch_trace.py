"""Merges traces of ``torch.profiler`` into a run's timeline.

[Note: alignment] Both records name moments by the clock of their host. An event of ``torch.profiler`` is at
``baseTimeNanoseconds`` + ``ts`` µs in unix time; a step of Paceline begins at a unix time of the same clock, which both
read through offsets taken once per process, so the two agree to a few tenths of a millisecond.
Clocks of other hosts are moved to rank 0's by the offsets that the run measured, which is what places the steps too.
So the traces of several ranks line up with each other as well as the steps do.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.tools.report.run.perfetto_export import timeline_begin
from paceline.tools.report.run.trace_reader import RankTrace, clock_offset_at

__all__ = ["merge_torch_traces"]

Event = dict[str, Any]

_FIRST_PID = 1_000_000
_RANK_IN_NAME = re.compile(r"rank[_-]?(\d+)")
_REMEDY = "name a file that torch.profiler's export_chrome_trace wrote during this run"


def merge_torch_traces(
    trace: dict[str, Any], timelines: Mapping[int, RankTrace], files: Sequence[Path]
) -> dict[str, Any]:
    """Return the trace of a run with the events of ``torch.profiler`` beside each rank; see [Note: alignment].

    Args:
        trace: result of `trace_events` for the same timelines.
        timelines: each rank's steps.
        files: traces of one or several ranks, plain or ``.gz``. The rank is the one that the file records
            (``distributedInfo``), otherwise the number after "rank" in its name; a single file without either is rank
            0's.

    Raises:
        UsageError: a file can't be read, is of an unknown rank, or does not overlap the run in time.
    """
    events = list(trace["traceEvents"])
    begin = timeline_begin(timelines)
    used: set[int] = set()
    pid = _FIRST_PID
    flows: dict[tuple[object, ...], int] = {}
    for file in files:
        content = _read(file)
        rank = _rank(file, content, alone=len(files) == 1)
        if rank in used or rank not in timelines:
            known = ", ".join(map(str, sorted(timelines)))
            problem = "another file is of this rank too" if rank in used else f"the run has ranks {known}"
            raise UsageError(f"{file} is a trace of rank {rank}, but {problem}", remedy=_REMEDY)
        used.add(rank)
        aligned = _Aligned(file, content, rank, timelines[rank], begin, pid, flows)
        events += aligned.events()
        pid += 1 + len(aligned.pids)
    return {**trace, "traceEvents": events}


class _Aligned:
    """The events of one file on the run's clock, with process ids of their own.

    Args:
        file: for messages.
        content: its JSON object.
        rank: the rank it is of.
        timeline: the rank's steps.
        begin: when the run's earliest step began, in unix seconds of rank 0's clock.
        first_pid: first free process id.
        flows: new ids of arrows, by file and old id; extended.
    """

    def __init__(
        self,
        file: Path,
        content: Mapping[str, Any],
        rank: int,
        timeline: RankTrace,
        begin: float,
        first_pid: int,
        flows: dict[tuple[object, ...], int],
    ) -> None:
        self._file, self._rank, self._timeline, self._begin = file, rank, timeline, begin
        self._base = float(content.get("baseTimeNanoseconds") or 0) / 1e9
        self._recorded = [each for each in content["traceEvents"] if isinstance(each, dict)]
        self._first_pid, self._flows = first_pid, flows
        self.pids: dict[object, int] = {}

    def events(self) -> list[Event]:
        """Return the events; all processes and tracks have names."""
        timed = [each for each in self._recorded if each.get("ph") != "M" and _is_number(each.get("ts"))]
        slices = [each for each in timed if each.get("ph") == "X" and each.get("cat") != "Trace"]
        if not self._timeline.steps or not slices:
            raise UsageError(f"{self._file} or the timeline of rank {self._rank} is empty", remedy=_REMEDY)
        first, last = (pick(self._at(each["ts"]) for each in slices) for pick in (min, max))
        steps = self._timeline.steps
        if last < 1e6 * (steps[0].start - self._begin) or first > 1e6 * (steps[-1].end - self._begin):
            apart = abs(first / 1e6 - (steps[0].start - self._begin))
            raise UsageError(
                f"{self._file} does not overlap the steps of rank {self._rank}: it begins {apart:,.0f} s apart",
                remedy=_REMEDY,
            )
        moved = [self._moved(each) for each in timed]
        return [*self._metadata(moved), *moved]

    def _at(self, ts: float) -> float:
        """Return microseconds since the run began, on rank 0's clock."""
        unix = self._base + ts / 1e6
        marks = self._timeline.clock_marks
        return round(1e6 * (unix - clock_offset_at(marks, unix) - self._begin), 3)

    def _moved(self, event: Event) -> Event:
        new = {**event, "pid": self._pid(event.get("pid")), "ts": self._at(event["ts"])}
        if "id" in event:
            key = (self._file, event.get("cat"), event["id"])
            new["id"] = self._flows.setdefault(key, 1 + len(self._flows))
            if event.get("ph") in ("s", "t", "f"):
                new["cat"] = f"torch {event.get('cat', 'flow')}"
        return new

    def _pid(self, pid: object) -> int:
        return self.pids.setdefault(pid, self._first_pid + len(self.pids))

    def _metadata(self, moved: Sequence[Event]) -> Iterator[Event]:
        """Yield the names of processes and tracks as recorded, and of those without one."""
        names: dict[tuple[object, object], str] = {}
        processes: dict[object, str] = {}
        labels: dict[object, str] = {}
        for event in self._recorded:
            if event.get("ph") != "M" or event.get("pid") not in self.pids:
                continue
            args, pid = event.get("args") or {}, event.get("pid")
            match event.get("name"):
                case "thread_name":
                    names[self._pid(pid), event.get("tid")] = str(args.get("name"))
                case "process_name":
                    processes[self._pid(pid)] = str(args.get("name"))
                case "process_labels":
                    labels[self._pid(pid)] = str(args.get("labels"))
        for old, pid in self.pids.items():
            what = " ".join(filter(None, [labels.get(pid), processes.get(pid)])) or str(old)
            yield _meta("process_name", pid, 0, name=f"rank {self._rank}, torch: {what}")
            yield _meta("process_sort_index", pid, 0, sort_index=2 * self._rank + 1)
        for pid, tid in dict.fromkeys((event["pid"], event.get("tid")) for event in moved):
            yield _meta("thread_name", pid, tid, name=names.get((pid, tid), f"track {tid}"))


def _meta(kind: str, pid: int, tid: object, /, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _read(file: Path) -> Mapping[str, Any]:
    try:
        raw = file.read_bytes()
        content = json.loads(gzip.decompress(raw) if file.suffix == ".gz" else raw)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{file} can't be read as a trace: {error}", remedy=_REMEDY) from error
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise UsageError(f"{file} is no trace of torch.profiler: it has no traceEvents", remedy=_REMEDY)
    return content


def _rank(file: Path, content: Mapping[str, Any], *, alone: bool) -> int:
    info = content.get("distributedInfo")
    if isinstance(info, Mapping) and isinstance(info.get("rank"), int):
        return info["rank"]
    if match := _RANK_IN_NAME.search(file.name):
        return int(match[1])
    if alone:
        return 0
    raise UsageError(
        f"{file} does not say which rank it is of",
        remedy='profile after init_process_group, or name files by rank, such as "torch-rank3.json"',
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
