"""A schedule as text: the messages of each round, and the number of ranks done after it."""

from __future__ import annotations

from paceline._core.format import format_seconds, plural
from paceline.collectives.prove import SymbolicBuffers
from paceline.collectives.schedule import Message, Schedule
from paceline.collectives.simulated_cost import ScheduleCost

__all__ = ["describe_schedule"]

_MESSAGES_SHOWN, _ROUNDS_SHOWN = 8, 24


def describe_schedule(schedule: Schedule, cost: ScheduleCost | None = None) -> list[str]:
    """Return one line per round.

    An arrow is a message, ``+`` means that it is added; ``[2:4]`` are the chunks that it carries, where the vector is
    cut. With `cost`, also when the round begins and ends.

    Example:
        >>> from paceline.collectives.algorithms import make_schedule
        >>> print("\\n".join(describe_schedule(make_schedule("reduce", "tree", 4))))
        The vector travels whole.
        round 1: 1→0+, 3→2+; done: 0 of 1 rank
        round 2: 2→0+; done: 1 of 1 rank
    """
    lines = [_describe_chunks(schedule)]
    spans = cost.rounds if cost else []
    buffers = SymbolicBuffers(schedule)
    receivers = [rank for rank, chunks in enumerate(buffers.required) if chunks]
    last = len(schedule.rounds) - 1
    for number, sends in enumerate(schedule.rounds):
        buffers.run_round(sends)
        if _ROUNDS_SHOWN <= number < last:
            continue
        if number == last > _ROUNDS_SHOWN:
            lines.append(f"… {last - _ROUNDS_SHOWN} more rounds of this kind …")
        messages = schedule.messages(number)
        when = f" ({format_seconds(spans[number][0])} to {format_seconds(spans[number][1])})" if spans else ""
        shown = ", ".join(_arrow(schedule, message) for message in messages[:_MESSAGES_SHOWN])
        more = f" … and {len(messages) - _MESSAGES_SHOWN} more" if len(messages) > _MESSAGES_SHOWN else ""
        done = sum(not buffers.missing(rank) for rank in receivers)
        lines.append(
            f"round {number + 1}{when}: {shown}{more}; done: {done} of {plural(len(receivers), 'rank')}"
        )
    return lines


def _describe_chunks(schedule: Schedule) -> str:
    if not schedule.rounds:
        return "One rank has nothing to send."
    if schedule.op == "all-to-all":
        each = f"Every rank's vector is cut into {schedule.parts} chunks"
        return f"{each}; chunk {schedule.ranks}·a + b goes from rank a to rank b."
    if schedule.op == "send-recv":
        return "Every vector travels whole."
    if schedule.chunks == 1:
        return "The vector travels whole."
    return f"The vector is cut into {schedule.chunks} chunks."


def _arrow(schedule: Schedule, message: Message) -> str:
    add = "+" if any(send.add for send in message.sends) else ""
    chunks = [
        f"[{send.chunk}]" if send.width == 1 else f"[{send.chunk}:{send.chunk + send.width}]"
        for send in message.sends
        if send.width < schedule.chunks
    ]
    return f"{message.src}→{message.dst}{add}{''.join(chunks)}"
