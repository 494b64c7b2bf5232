"""What ``paceline dispatch`` shows: samples and batches, policies, imbalance, safe sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from paceline.cli.wide_table import print_wide
from paceline.data.balance import Outcome
from paceline.data.forecast import Asked, Forecast
from paceline.report.dispatch_words import in_short, of_bias, of_loop, of_outcome, of_safe, percent

__all__ = ["amounts", "show", "title"]


def show(asked: Asked, found: Sequence[Forecast]) -> None:
    """Print all of it."""
    print_wide(_batches(asked, found))
    print_wide(_policies(asked, found))
    print_wide(_imbalance(asked, found))
    console = Console(highlight=False)
    outcomes = [
        (f"block {each.block}, batch {each.batch_size}", outcome)
        for each in found
        for outcome in each.balance.outcomes
    ]
    for line in [*of_bias(outcomes, asked.samples), *_safe(asked, found)]:
        console.print(line, markup=False)


def title(asked: Asked) -> str:
    """Return what is dealt, to whom and how."""
    scheme = {"round_robin": "round-robin", "random": f"random, seed {asked.seed}", "shares": "by shares"}
    return f"{amounts(asked)}, {scheme[asked.scheme]}"


def amounts(asked: Asked) -> str:
    """Return what is dealt, and to whom."""
    ranks = asked.shares.ranks
    told = f"{asked.samples:,} sample{'s' * (asked.samples != 1)}, {ranks} rank{'s' * (ranks != 1)}"
    return told + (f" ({asked.shares})" if len(set(asked.shares.parts)) > 1 and ranks <= 10 else "")


def _table(heading: str, *columns: str) -> Table:
    table = Table(title=heading, title_justify="left", pad_edge=False, box=None)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _batches(asked: Asked, found: Sequence[Forecast]) -> Table:
    table = _table(title(asked), "block", "batch")
    table.add_column("")
    table.add_column("of the ranks", no_wrap=True)
    taken = "its full" if asked.drop_last else "all its"
    widest = max(len(in_short(each.balance.dealing.counts)) for each in found)
    table.add_column(f"if each loops over {taken} batches", max_width=max(26, 60 - widest))
    for each in found:
        balance = each.balance
        rows = [
            ("samples", balance.dealing.counts),
            ("full batches (floor)", balance.full_batches),
            ("all batches (ceiling)", balance.all_batches),
        ]
        table.add_row(
            str(each.block),
            str(each.batch_size),
            "\n".join(name for name, _ in rows),
            "\n".join(in_short(numbers) for _, numbers in rows),
            of_loop(balance),
        )
    return table


def _policies(asked: Asked, found: Sequence[Forecast]) -> Table:
    heading = "An epoch under each policy (none: every rank loops over its own batches and weighs the same)"
    table = _table(heading, "block", "batch")
    table.add_column("policy", max_width=19)
    for name in ("\nsteps", "samples\nnever used", "samples\nused again", "empty\nbatches", "weight\nmoved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("every sample\nused once", no_wrap=True)
    for each in found:
        place = str(each.block), str(each.batch_size)
        for names, outcome in _alike(each.balance.outcomes):
            table.add_row(*place, names, *_figures(outcome, asked.samples), of_outcome(outcome))
            place = "", ""
    return table


def _alike(outcomes: Sequence[Outcome]) -> list[tuple[str, Outcome]]:
    """Return policies that come to the same, together."""
    names_of: dict[Outcome, list[str]] = {}
    for each in outcomes:
        names_of.setdefault(replace(each, policy=""), []).append(each.policy)
    return [(", ".join(names), outcome) for outcome, names in names_of.items()]


def _figures(outcome: Outcome, samples: int) -> list[str]:
    if outcome.steps is None:
        return ["", "", "", "", ""]
    amounts = [
        f"{amount} ({percent(amount / samples)})" if amount else "0"
        for amount in (outcome.dropped, outcome.repeated)
    ]
    return [str(outcome.steps), *amounts, str(outcome.empty), percent(outcome.moved)]


def _imbalance(asked: Asked, found: Sequence[Forecast]) -> Table:
    drawn = f"{asked.draws_of_block} draws:\n"
    table = _table(
        "The rank with most for its share is above it by",
        *(
            "\nblock",
            "\nas dealt",
            "in turns:\nexact",
            "\nbelow",
            "at random:\nexpected",
            "\n1 in 1000 above",
        ),
        *((drawn + "mean", "\nworst") if asked.draws_of_block else ()),
    )
    for each in {each.block: each for each in found}.values():
        spread, seen = each.imbalance.random, each.imbalance
        numbers = [seen.dealt, seen.in_turns, seen.bound_in_turns, spread.expected, spread.unlikely]
        numbers += [number for number in (spread.drawn, spread.drawn_worst) if number is not None]
        table.add_row(str(each.block), *map(percent, numbers))
    return table


def _safe(asked: Asked, found: Sequence[Forecast]) -> list[str]:
    lines = ["", "Safe: all ranks make the same number of batches."]
    for each in {each.batch_size: each for each in found}.values():
        told = of_safe(each.safe_blocks, each.blocks_tried)
        lines.append(f"  blocks, dealt in turns, for batch {each.batch_size}: {told}")
    for each in {each.block: each for each in found}.values():
        near = next(
            (one.batch_size for one in found if one.block == each.block and one.balance.deadlock), None
        )
        told = of_safe(each.safe_batch_sizes, each.batch_sizes_tried, near)
        lines.append(f"  batch sizes for block {each.block}: {told}")
    if len(set(asked.shares.parts)) > 1:
        lines.append(
            "  any sizes at all: join, and rebalance, whose batches are as large as a rank's share asks"
        )
    return lines
