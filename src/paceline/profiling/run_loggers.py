"""`Logger`: what receives a run's metrics; `LoggerGroup`: several of them, none of which can stop the run."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from paceline.errors import UsageError

__all__ = ["Logger", "LoggerGroup", "new_run_id"]

log = logging.getLogger("paceline.profiling")

_RETRY_SECONDS = 60.0  # least pause after a failure
_MAX_SLOWDOWN = 0.05  # share of the run's time that a logger may take
_SLOW_SECONDS = 5.0  # in all: below this no logger counts as slow


@runtime_checkable
class Logger(Protocol):
    """Receives the configuration and the metrics of a run, on rank 0.

    `paceline.integrations.loggers` has implementations for TensorBoard, W&B, MLflow and Prometheus; any object with
    these three methods is one.

    Example:
        >>> class Lines:
        ...     def start(self, config): print("run", config["run_id"])
        ...     def log(self, metrics, step): print(step, dict(metrics))
        ...     def finish(self, failed): print("failed" if failed else "finished")
        >>> isinstance(Lines(), Logger)
        True
    """

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin or resume a run.

        Args:
            config: facts of the run, which may be nested. `paceline.Profiler` passes the content of ``run.json`` and
                ``"folder"``; ``"run_id"`` is the same when the run is resumed.

        Raises:
            UsageError: the logger can't work with its arguments on this machine; the run does not begin.
        """
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step; after a restart, steps since the checkpoint are logged again."""
        ...

    def finish(self, failed: bool) -> None:
        """End the run; `failed`: by an exception."""
        ...


class LoggerGroup:
    """Passes a run's metrics to loggers; a logger that raises or is slow is reported, and the run continues.

    After an exception a warning is logged, once per logger. Its metrics are dropped for a minute, or for 20 times the
    duration of the failed call, whichever is longer; then it is called again. `finish` logs how many steps it missed. A
    logger that takes over 5 % of the run's time is reported once, too.

    Used by one rank: call it on rank 0 alone.

    Args:
        loggers: called in this order.

    Raises:
        UsageError: one is not a `Logger`.

    Example:
        >>> class Lines:
        ...     def start(self, config): pass
        ...     def log(self, metrics, step): print(step, dict(metrics))
        ...     def finish(self, failed): pass
        >>> group = LoggerGroup([Lines()])
        >>> group.start({"run_id": "a"})
        >>> group.log({"loss": 2.5, "note": "text is left out"}, step=1)
        1 {'loss': 2.5}
        >>> group.finish()
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        for each in loggers:
            if not isinstance(each, Logger) or isinstance(each, type):
                shown = repr(each) if isinstance(each, str | type) else f"a {type(each).__name__}"
                raise UsageError(
                    f"{shown} is no logger",
                    remedy="pass an object with start(config), log(metrics, step) and finish(failed), such as "
                    "paceline.integrations.loggers.TensorBoardLogger()",
                )
        self._loggers = [_GuardedLogger(each) for each in loggers]

    def start(self, config: Mapping[str, Any]) -> None:
        """Start all loggers; one that can't start now is tried again later.

        Args:
            config: facts of the run, see `Logger.start`.

        Raises:
            UsageError: by a logger.
        """
        for each in self._loggers:
            each.start(config)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Pass the values that are numbers to all loggers."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, Real) and not isinstance(value, bool)
        }
        for each in self._loggers:
            each.log(numbers, step)

    def finish(self, failed: bool = False) -> None:
        """End the run of all loggers; `failed`: by an exception."""
        for each in self._loggers:
            each.finish(failed)


def new_run_id() -> str:
    """Return a random id for ``run.json``, by which loggers recognise a run that is resumed."""
    return secrets.token_hex(6)


class _GuardedLogger:
    """A logger whose exceptions and duration are logged, once each."""

    def __init__(self, logger: Logger) -> None:
        self._logger, self._name = logger, type(logger).__name__
        self._config: Mapping[str, Any] = {}
        self._started = self._reported_failure = self._reported_slow = False
        self._missed, self._retry_at = 0, -math.inf
        self._began, self._seconds = time.monotonic(), 0.0

    def start(self, config: Mapping[str, Any]) -> None:
        self._config, self._began = config, time.monotonic()
        self._call(self._start)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        def work() -> None:
            if not self._started:
                self._start()
            self._logger.log(metrics, step)

        before = time.monotonic()
        if before < self._retry_at or not self._call(work):
            self._missed += 1
        self._report_slow(time.monotonic() - before)

    def finish(self, failed: bool) -> None:
        if self._started:
            self._call(lambda: self._logger.finish(failed))
        if self._missed:
            log.warning("%s has no metrics of %d logged steps", self._name, self._missed)
        self._started, self._missed = False, 0

    def _start(self) -> None:
        self._logger.start(self._config)
        self._started = True

    def _call(self, work: Callable[[], object]) -> bool:
        """Return whether `work` succeeded."""
        before = time.monotonic()
        try:
            work()
        except UsageError:
            if not self._started:
                raise
            self._failed(before)
        except Exception:  # noqa: BLE001 — of any library: the training goes on
            self._failed(before)
        else:
            return True
        return False

    def _failed(self, before: float) -> None:
        now = time.monotonic()
        self._retry_at = now + max(_RETRY_SECONDS, (now - before) / _MAX_SLOWDOWN)
        if not self._reported_failure:
            self._reported_failure = True
            log.warning(
                "%s failed; the training goes on, and it is called again later", self._name, exc_info=True
            )

    def _report_slow(self, seconds: float) -> None:
        self._seconds += seconds
        elapsed = time.monotonic() - self._began
        if not self._reported_slow and self._seconds > max(_SLOW_SECONDS, _MAX_SLOWDOWN * elapsed):
            self._reported_slow = True
            log.warning(
                "%s took %.1f s of %.1f s so far, for which the training waited: log less often",
                self._name, self._seconds, elapsed,
            )  # fmt: skip
