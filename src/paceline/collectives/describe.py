"""A schedule in words: what happens in each round, who has what after it, what it costs."""

from __future__ import annotations

from collections.abc import Iterator

from paceline._core.format import format_seconds
from paceline.collectives.alpha_beta_cost import ScheduleCost
from paceline.collectives.prove import SymbolicBuffers, wanted
from paceline.collectives.schedule import Message, Schedule

__all__ = ["describe"]

_MESSAGES_SHOWN, _ROUNDS_SHOWN = 8, 24


def describe(schedule: Schedule, price: ScheduleCost | None = None) -> list[str]:
    """Return lines that tell what happens, one for each round.

    An arrow is a message, ``+`` means that it is added; ``[2:4]`` are the chunks it carries, counted from 0, where
    the vector is cut. With `price`, when the round begins and ends.

    Example:
        >>> from paceline.collectives.catalogue import schedule
        >>> print("\\n".join(describe(schedule("reduce", "tree", 4))))
        The vector travels whole.
        round 1: 1→0+, 3→2+; done: 0 of 1 rank
        round 2: 2→0+; done: 1 of 1 rank
    """
    lines = [_about_chunks(schedule)]
    spans = price.rounds if price else []
    contents = SymbolicBuffers(schedule)
    for number in range(len(schedule.rounds)):
        messages = schedule.messages(number)
        contents.play(schedule.rounds[number])
        if _ROUNDS_SHOWN <= number < len(schedule.rounds) - 1:
            continue
        if number == len(schedule.rounds) - 1 > _ROUNDS_SHOWN:
            lines.append(f"… {len(schedule.rounds) - 1 - _ROUNDS_SHOWN} more rounds of this kind …")
        when = f" ({format_seconds(spans[number][0])} to {format_seconds(spans[number][1])})" if spans else ""
        shown = ", ".join(_arrow(schedule, message) for message in messages[:_MESSAGES_SHOWN])
        more = f" … and {len(messages) - _MESSAGES_SHOWN} more" if len(messages) > _MESSAGES_SHOWN else ""
        lines.append(f"round {number + 1}{when}: {shown}{more}; done: {_done(contents)}")
    return lines


def _about_chunks(schedule: Schedule) -> str:
    if not schedule.rounds:
        return "One rank has nothing to send."
    if schedule.op == "all-to-all":
        each = f"Every rank's vector is cut into {schedule.parts} chunks"
        return f"{each}; chunk {schedule.ranks}·a + b goes from rank a to rank b."
    if schedule.op == "send-recv":
        return "Every vector travels whole."
    return (
        "The vector travels whole."
        if schedule.chunks == 1
        else f"The vector is cut into {schedule.chunks} chunks."
    )


def _arrow(schedule: Schedule, message: Message) -> str:
    add = "+" if any(send.add for send in message.sends) else ""
    return f"{message.src}→{message.dst}{add}{''.join(_runs(schedule, message))}"


def _runs(schedule: Schedule, message: Message) -> Iterator[str]:
    for send in message.sends:
        if send.width < schedule.chunks:
            yield f"[{send.chunk}]" if send.width == 1 else f"[{send.chunk}:{send.chunk + send.width}]"


def _done(contents: SymbolicBuffers) -> str:
    schedule = contents.schedule
    concerned = [
        rank
        for rank in range(schedule.ranks)
        if any(wanted(schedule, rank, chunk) is not None for chunk in range(schedule.chunks))
    ]
    done = sum(not contents.missed(rank) for rank in concerned)
    return f"{done} of {len(concerned)} rank{'s' if len(concerned) > 1 else ''}"
