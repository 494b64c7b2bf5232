"""Advice for a slow network: what to send and how often, with the cost of each option (pure).

A rank sends, per direction, 2(N−1)/N × bytes per element × parameters for one exchange, which takes T_comm at the
measured rate. Gradients that are sent every step overlap with backward, about half of a step. Parameters that are sent
every H steps don't overlap, unless they are merged τ steps later: then they overlap with these τ steps.

    rule of thumb   T_comm ≤ share × H × T_step     decides H without overlap
    with a delay    T_comm / P ≤ τ × T_step          decides τ for P fragments, and
                    T_comm ≤ 0.9 × H × T_step        decides H: the network is nearly always busy

The advice is the option with the least effect on the loss for which ranks wait at most `share` of a step. The time of
compressing is not included: see benchmarks/codecs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from paceline._core.format import format_percent, format_ratio, format_seconds
from paceline.cost_model.step_strategy import ELEMENT_NBYTES
from paceline.errors import UsageError

__all__ = ["LOSS_EFFECTS", "NetworkAdvice", "SyncOption", "advise_network", "exchange_nbytes"]

BACKWARD_SHARE = 0.5
"""Part of a step during which gradients can be sent: backward without its beginning."""

_BUSY = 0.9
_FRAGMENTS = 4
_AVERAGED_UP_TO = 10
"""Beyond it, an outer momentum: long trainings gain from it (see `LOSS_EFFECTS`), short ones lose."""

_EVERY = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 125, 150, 200, 250, 300, 400, 500)

# Held-out loss after the same number of steps, compared with float32 gradients every step, of the reference model
# `mini` with 4 ranks and 600 steps: benchmarks/slow-networks, loss against bytes. On long trainings see arXiv
# 2311.08105 and 2501.18512. Keys: compression, and the least H (+ τ) that an entry applies to.
LOSS_EFFECTS: dict[tuple[str, int], str] = {
    ("none", 1): "none: exact",
    ("bf16", 1): "none visible",
    ("int8", 1): "none visible",
    ("int4", 1): "1 % higher in a training of 600 steps",
    ("int4", 2): "1 to 3 % higher in a training of 600 steps, at twice the learning rate",
    ("int4", 6): "about 5 % higher in a training of 600 steps, at twice the learning rate",
    ("int4", 15): "12 to 25 % higher in a training of 600 steps; hardly so in reports of very long ones",
}


@dataclass(frozen=True, kw_only=True)
class SyncOption:
    """An option to synchronise, with its expected cost.

    Attributes:
        compression: of gradients, or of pseudo-gradients: ``"none"``, ``"bf16"``, ``"int8"``, ``"int4"``.
        every: H; 1: gradients every step.
        fragments: parts that are sent in turn.
        delay: τ, steps from sending to merging.
        nbytes: that a rank sends in one direction, per step on average.
        comm_seconds: of sending them, per step on average.
        exposed_seconds: of it that ranks wait, per step on average.
        step_seconds: of a whole step.
        effect: on the loss.
        speedup: over float32 gradients every step.
    """

    compression: str
    every: int
    fragments: int
    delay: int
    nbytes: float
    comm_seconds: float
    exposed_seconds: float
    step_seconds: float
    effect: str
    speedup: float = 1.0

    @property
    def severity(self) -> tuple[int, int]:
        """Order of the harm to the loss; a delay counts like a larger H."""
        if self.every == 1:
            return 1, list(ELEMENT_NBYTES).index(self.compression)
        return 2, self.every + self.delay

    @property
    def outer(self) -> str:
        """Outer update of parameters that are sent every `every` steps."""
        return "average" if self.every <= _AVERAGED_UP_TO else "diloco"

    @property
    def waiting_share(self) -> float:
        """Share of a step in which ranks wait."""
        return self.exposed_seconds / self.step_seconds

    @property
    def gain(self) -> str:
        """The speed-up as text."""
        return f"{format_ratio(self.speedup)} faster"

    @property
    def flags(self) -> str:
        """Options of ``paceline train`` that select it; empty for the default."""
        options = [] if self.compression == "none" else [f"--compression {self.compression}"]
        if self.every > 1:
            options = [f"--every {self.every} --outer {self.outer}", *options]
        if self.fragments > 1:
            options.append(f"--fragments {self.fragments}")
        if self.delay:
            options.append(f"--delay {self.delay}")
        return " ".join(options)

    @property
    def name(self) -> str:
        """Data that are sent, and when, as text."""
        kind = {"none": "float32", "bf16": "bfloat16"}.get(self.compression, self.compression)
        if self.every == 1:
            return f"{kind} gradients every step"
        parts = f" in {self.fragments} fragments" if self.fragments > 1 else ""
        late = f", {self.delay} step{'s' * (self.delay > 1)} late" if self.delay else ""
        return f"{kind} parameters every {self.every} steps{parts}{late}"


@dataclass(frozen=True, kw_only=True)
class NetworkAdvice:
    """Result of `advise_network`.

    Attributes:
        parameters: of the model.
        ranks: that synchronise.
        bytes_per_second: of a rank.
        step_seconds: of a step without synchronisation.
        share: of a step that ranks may wait.
        options: all that were compared, the mildest first.
        chosen: the mildest for which ranks wait at most `share`; if there is none, the fastest.
        enough: whether ranks wait at most `share` with it.
        further: the next one that is faster, at more risk for the loss; None: there is none.
    """

    parameters: int
    ranks: int
    bytes_per_second: float
    step_seconds: float
    share: float
    options: tuple[SyncOption, ...]
    chosen: SyncOption
    enough: bool
    further: SyncOption | None

    def facts(self) -> dict[str, object]:
        """Return the advice for JSON."""
        options = [
            {"name": option.name, "flags": option.flags, **asdict(option), "chosen": option is self.chosen}
            for option in self.options
        ]
        names = ("parameters", "ranks", "bytes_per_second", "step_seconds", "share", "enough")
        return {
            **{name: getattr(self, name) for name in names},
            "options": options,
            "advice": list(self.sentences),
        }

    @property
    def sentences(self) -> tuple[str, ...]:
        """The advice as text."""
        plain, chosen = self.options[0], self.chosen
        first = (
            f"{plain.name} take {format_seconds(plain.comm_seconds)} on this network, computing "
            f"takes {format_seconds(self.step_seconds)}."
        )
        if chosen is plain:
            second = (
                f"Ranks wait {format_percent(plain.waiting_share)} of a step for them: no remedy is needed."
            )
        else:
            second = (
                f"Use {chosen.name} ({chosen.flags}): ranks wait {format_percent(chosen.waiting_share)} of a step, "
                f"which takes {format_seconds(chosen.step_seconds)}, {chosen.gain}. The loss: {chosen.effect}."
            )
            if not self.enough:
                second += f" That exceeds the limit of {format_percent(self.share)}: the network is too slow."
        if self.further is None:
            return first, second
        more = self.further
        third = f"Faster still: {more.name} ({more.flags}), {more.gain}. The loss: {more.effect}."
        return first, second, third


def exchange_nbytes(parameters: int, ranks: int, compression: str = "none") -> float:
    """Return the bytes that a rank sends, in one direction, to exchange all parameters once.

    Example:
        >>> exchange_nbytes(1_000_000, ranks=4), exchange_nbytes(1_000_000, ranks=4, compression="bf16")
        (6000000.0, 3000000.0)
    """
    return 2 * (ranks - 1) / ranks * ELEMENT_NBYTES[compression] * parameters


def advise_network(
    parameters: int,
    ranks: int,
    bytes_per_second: float,
    step_seconds: float,
    share: float = 0.1,
    layers: int | None = None,
) -> NetworkAdvice:
    """Advise what to send and how often, so that ranks wait at most `share` of a step.

    Args:
        parameters: of the model.
        ranks: that synchronise over the network.
        bytes_per_second: that a rank can send while it receives at the same rate, with all ranks active.
        step_seconds: of a step without synchronisation.
        share: of a step that ranks may wait, above 0, at most 1.
        layers: into which the model can be split; None: enough.

    Raises:
        UsageError: a value is out of range.

    Example:
        >>> advise_network(20_000_000, 4, 25e6, 0.97).chosen.flags
        '--every 2 --outer average --compression int4 --fragments 2 --delay 1'
    """
    _check(parameters, ranks, bytes_per_second, step_seconds, share, layers)

    def price(compression: str, every: int = 1, fragments: int = 1, delay: int = 0) -> SyncOption:
        nbytes = exchange_nbytes(parameters, ranks, compression)
        return _price(compression, every, fragments, delay, nbytes, nbytes / bytes_per_second, step_seconds)

    options = [price(compression) for compression in ELEMENT_NBYTES]
    if ranks > 1:
        smallest = min(ELEMENT_NBYTES, key=ELEMENT_NBYTES.__getitem__)
        steps = exchange_nbytes(parameters, ranks, smallest) / bytes_per_second / step_seconds
        options += [price(smallest, _rounded_up(steps / share)), price(smallest, *_streamed(steps, layers))]
    options = [
        replace(option, speedup=options[0].step_seconds / option.step_seconds)
        for option in sorted(options, key=lambda option: option.severity)
    ]
    good = [option for option in options if option.waiting_share <= share and _keeps_up(option)]
    chosen = good[0] if good else min(options, key=lambda option: option.step_seconds)
    return NetworkAdvice(
        parameters=parameters,
        ranks=ranks,
        bytes_per_second=bytes_per_second,
        step_seconds=step_seconds,
        share=share,
        options=tuple(options),
        chosen=chosen,
        enough=bool(good),
        further=_further(options, chosen),
    )


def _price(
    compression: str,
    every: int,
    fragments: int,
    delay: int,
    nbytes: float,
    seconds: float,
    step_seconds: float,
) -> SyncOption:
    """Return an option, given the bytes and seconds of one exchange of all parameters."""
    if every == 1:
        exposed = max(0.0, seconds - BACKWARD_SHARE * step_seconds)
    else:
        exposed = fragments / every * max(0.0, seconds / fragments - delay * step_seconds)
    whole = max(step_seconds + exposed, seconds / every)
    least = max(at for kind, at in LOSS_EFFECTS if kind == compression and at <= every + delay)
    return SyncOption(
        compression=compression,
        every=every,
        fragments=fragments,
        delay=delay,
        nbytes=nbytes / every,
        comm_seconds=seconds / every,
        exposed_seconds=whole - step_seconds,
        step_seconds=whole,
        effect=LOSS_EFFECTS[compression, least],
    )


def _streamed(steps: float, layers: int | None) -> tuple[int, int, int]:
    """Return H, fragments and delay that keep the network busy without waiting; an exchange takes `steps` steps."""
    every = _rounded_up(steps / _BUSY)
    fragments = min(_FRAGMENTS, every, layers or _FRAGMENTS)
    delay = max(1, math.ceil(steps / fragments))
    if delay >= every:
        every = _rounded_up(delay + 1)
    return every, fragments, min(delay, every - 1)


def _rounded_up(every: float) -> int:
    """Return the least H of `_EVERY` that is at least `every`, or the largest."""
    return next((usual for usual in _EVERY if usual >= every), _EVERY[-1])


def _keeps_up(option: SyncOption) -> bool:
    """Return whether the network keeps up with the steps."""
    return option.comm_seconds <= option.step_seconds


def _further(options: Sequence[SyncOption], chosen: SyncOption) -> SyncOption | None:
    """Return the next option that shortens a step by at least 5 %."""
    later = options[options.index(chosen) + 1 :]
    return next((option for option in later if option.step_seconds < 0.95 * chosen.step_seconds), None)


def _check(
    parameters: int,
    ranks: int,
    bytes_per_second: float,
    step_seconds: float,
    share: float,
    layers: int | None,
) -> None:
    counts = {"parameters": parameters, "ranks": ranks, "layers": 1 if layers is None else layers}
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise UsageError(f"{name}={count!r}", remedy="give a whole number of 1 or more")
    for name, value in (("bytes_per_second", bytes_per_second), ("step_seconds", step_seconds)):
        if not 0 < value < math.inf:
            raise UsageError(f"{name}={value!r}", remedy="give a number above 0")
    if not 0 < share <= 1:
        raise UsageError(
            f"share={share!r}", remedy="give the share of a step that ranks may wait, such as 10%"
        )
