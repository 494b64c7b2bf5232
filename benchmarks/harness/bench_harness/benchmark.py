"""A benchmark as one program: measure, fill the tables of its README, draw its charts, and be one of its ranks.

A program declares what it does by decorators, and each becomes a command of it::

    bench = Benchmark(__file__, docs=["drift.md"])

    @bench.run          # python benchmarks/step/step.py run [options]: measures, writes the result
    @bench.rank         # what each rank of the measurement does; `start_ranks` starts them
    @bench.tables       # … table: fills the generated blocks of README.md and of pages in docs/
    @bench.charts       # … chart: draws PNGs beside the results

    if __name__ == "__main__":
        bench.main()
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import typer

from bench_harness.lab_run import RESULT
from bench_harness.markdown import fill
from paceline._core.files import write_json, write_text
from paceline.errors import PacelineError
from paceline.launch.process.local_ranks import run_ranks
from paceline.testing.netlab import Lab
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.bench.step.step_worker import print_tick
from paceline.tools.report.charts.chart_style import Chart
from paceline.tools.result_files import check_writable, result_head

__all__ = ["Benchmark"]

F = TypeVar("F", bound=Callable[..., Any])

_DOCS = Path(__file__).parents[3] / "docs"


class Benchmark:
    """The commands of a benchmark's program, and the files of its folder.

    Args:
        program: ``__file__`` of the program. Results, charts and README.md lie in its folder.
        docs: pages in docs/ that have generated blocks too.

    Attributes:
        folder: of the program.
        tick: in a rank's function, reports one finished turn to the progress bar of `start_ranks`.
    """

    def __init__(self, program: str, *, docs: Sequence[str] = ()) -> None:
        self.folder = Path(program).resolve().parent
        self.tick = print_tick
        self._program = Path(program).resolve()
        self._pages = [self.folder / "README.md", *(_DOCS / page for page in docs)]
        self._app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
        self._app.callback()(lambda: None)  # commands keep their names where there is only one

    # ------------------------------------------------------------------ declaring commands

    def run(self, function: F) -> F:
        """Make `function` the command ``run``: its parameters are options, as typer reads them."""
        self._app.command("run")(function)
        return function

    def rank(self, function: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
        """Make `function` what each rank does: it takes the job of `start_ranks`; what rank 0 returns is its result.

        Ranks run on one thread.
        """

        @self._app.command("rank", hidden=True)
        def rank(job_file: Path) -> None:
            torch.set_num_threads(1)
            job = json.loads(job_file.read_text(encoding="utf-8"))
            found = function(job["job"])
            if found is not None:
                Path(job["out"]).write_text(json.dumps(found), encoding="utf-8")

        return function

    def tables(self, function: Callable[[], Mapping[str, str]]) -> Callable[[], Mapping[str, str]]:
        """Make the command ``table`` of `function`, which returns Markdown by name of the generated block."""

        @self._app.command("table")
        def table() -> None:
            """Fill the tables of README.md and of the manual from the results."""
            texts = {page: page.read_text(encoding="utf-8") for page in self._pages}
            for name, block in function().items():
                places = [page for page, text in texts.items() if f"<!-- {name}: begin -->" in text]
                for page in places or self._pages[:1]:  # `fill` raises if there is no place
                    texts[page] = fill(texts[page], name, block)
            for page, text in texts.items():
                write_text(page, text)
                print(page)

        return function

    def charts(self, function: Callable[[], Mapping[str, Chart]]) -> Callable[[], Mapping[str, Chart]]:
        """Make the command ``chart`` of `function`, which returns charts by file name."""

        @self._app.command("chart")
        def chart() -> None:
            """Draw the charts of the results."""
            for name, drawn in function().items():
                print(drawn.save(self.folder / name))

        return function

    def main(self) -> None:
        """Run the command that the command line names; a Paceline error ends the program with its message."""
        try:
            self._app()
        except PacelineError as error:
            sys.exit(str(error))

    # ------------------------------------------------------------------ results

    def read(self, name: str) -> dict[str, Any]:
        """Return the result ``<name>.json`` of this folder."""
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))

    def find(self, pattern: str = "*") -> dict[str, dict[str, Any]]:
        """Return the results of this folder whose name matches the glob `pattern`, by name."""
        return {path.stem: self.read(path.stem) for path in sorted(self.folder.glob(f"{pattern}.json"))}

    def output(self, chosen: Path | None, name: str) -> Path:
        """Return where the result goes, after checking that it can be written.

        Args:
            chosen: by the user; None: ``<name>.json`` in the benchmark's folder.

        Raises:
            UsageError: it can't be written.
        """
        path = chosen or self.folder / f"{name}.json"
        check_writable(path, make_folder=True)
        return path

    def write(
        self,
        path: Path,
        kind: str,
        settings: Mapping[str, Any],
        *,
        packages: Iterable[str] = ("paceline", "torch"),
        **parts: Any,
    ) -> dict[str, Any]:
        """Write a result and return it: head (kind, command, machine, versions of packages), settings, then `parts`."""
        head = result_head(kind, packages, command=_command(sys.argv))
        result = head | {"settings": dict(settings)} | parts
        write_json(path, result)
        print(path)
        return result

    def write_computed(self, path: Path, kind: str, **parts: Any) -> None:
        """Write a result that is the same on every machine: a head without machine and versions, then `parts`."""
        head = result_head(kind, (), machine={}, command=_command(sys.argv))
        del head["machine"]
        write_json(path, head | parts)
        print(path)

    # ------------------------------------------------------------------ ranks

    def start_ranks(
        self,
        job: Mapping[str, Any],
        ranks: int,
        *,
        rate: str | None = None,
        per_host: int = 1,
        turns: int = 0,
        title: str = "",
        timeout: float | None = None,
    ) -> Any:
        """Start the ranks of a measurement, show their progress, and return what rank 0 returned.

        Args:
            job: for the function declared by `rank`; must be JSON.
            ranks: on this machine, or, with `rate`, hosts of a lab with `per_host` ranks each.
            rate: of the links between the hosts, such as ``"1Gbit/s"``; None: all ranks on this machine.
            turns: how often rank 0 calls `tick`. title: of the progress bar.
            timeout: seconds until ranks on this machine count as hung.

        Raises:
            RankFailed, HostFailed: a rank failed. LabError: no lab can be made here.
        """
        with self.job(job) as (program, result):
            if rate is None:
                run_ranks(program, ranks, env={"OMP_NUM_THREADS": "1"}, timeout=timeout)
            else:
                shown = ", ".join(filter(None, [title, f"{ranks} hosts", rate]))
                with Lab(ranks, rate) as lab, ProgressBar(shown, turns) as tick:
                    lab.start_torchrun(program, ranks_per_host=per_host).follow(tick, turns)
            return result()

    def run_in_lab(
        self, lab: Lab, job: Mapping[str, Any], tick: Callable[[], object], per_host: int = 1
    ) -> Any:
        """Run ranks on all hosts of a lab, for programs that do so several times, and return what rank 0 returned.

        Args:
            job: for the function declared by `rank`.
            tick: called when rank 0 calls `tick`. per_host: ranks on each host.

        Raises:
            HostFailed: a rank failed.
        """
        with self.job(job) as (program, result):
            lab.start_torchrun(program, ranks_per_host=per_host).follow(tick)
            return result()

    @contextmanager
    def job(self, job: Mapping[str, Any]) -> Iterator[tuple[list[str], Callable[[], Any]]]:
        """Write a job for ranks to a file; yield the program of a rank, and a function that returns rank 0's result."""
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            job_file, out = Path(folder, "job.json"), Path(folder, "out.json")
            job_file.write_text(json.dumps({"job": job, "out": str(out)}), encoding="utf-8")
            program = [str(self._program), "rank", str(job_file)]
            yield program, lambda: json.loads(out.read_text(encoding="utf-8"))

    # ------------------------------------------------------------------ other processes

    def process(self, function: F) -> F:
        """Make `function` what a process started by `command` does; `lab_run.results` returns what it returned."""

        @self._app.command(function.__name__, hidden=True)
        def process(arguments: str) -> None:
            found = function(*json.loads(arguments))
            if found is not None:
                print(f"{RESULT}{json.dumps(found)}", flush=True)

        return function

    def command(self, function: Callable[..., Any], *arguments: Any) -> list[str]:
        """Return the command line, as `Lab.start` takes it, that runs a `process` with arguments that are JSON."""
        return [str(self._program), function.__name__, json.dumps(arguments)]


def _command(argv: Sequence[str]) -> str:
    """Return a command line without options that name a place on this machine only."""
    words: list[str] = []
    for word in argv[1:]:
        option, _, value = word.rpartition("=")
        if os.path.isabs(value):
            if not option and words and words[-1].startswith("--"):
                words.pop()
            continue
        words.append(word)
    return shlex.join(["python", os.path.relpath(argv[0], _DOCS.parent), *words])
