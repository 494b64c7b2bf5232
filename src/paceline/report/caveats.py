"""What a run's numbers do not mean, in words for its reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

__all__ = ["caveats"]


def caveats(facts: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each thing that the times of this run can't tell.

    Args:
        facts: the content of ``run.json``.
    """
    world = facts.get("world")
    if str(facts.get("synchronised", "")).startswith("full-shard"):
        yield (
            "With full-shard PyTorch waits inside of forward and backward: more communication is exposed than shown."
        )
    if isinstance(world, Mapping) and (
        str(world.get("device", "")).startswith("cuda") or "nccl" in str(world.get("backend", ""))
    ):
        yield "Times are those of the host: a GPU's work ends later than the phase that handed it over."
