"""Options that several commands have, each declared once: one name, one kind of value, one meaning."""

from __future__ import annotations

from typing import Any

from typer import Option

__all__ = ["own", "shared"]

_SHARED = {  # by name without dashes: (metavar, meaning), the same in every command
    # processes
    "nproc-per-node": ("N", "Processes per host"),
    "nnodes": ("N", "Number of hosts"),
    "world-size": ("N", "Number of ranks in all"),
    "min-ranks": ("N", "Fewest ranks, over all hosts, to continue with after failures"),
    "max-restarts": ("N", "Failures to recover from"),
    "recovery": ("HOW", "After failures: live (ranks that can recover in place go on) or restart (all start again)"),
    "threads": ("N", "Threads per rank"),
    "insecure": (None, "Accept everybody who can reach the address, in clear text"),
    "wait": ("TIME", "Longest wait for hosts or resources"),
    "timeout": ("TIME", "Longest time"),
    "name": ("NAME", "Name of the run"),
    # training
    "model": ("MODEL", "Model"),
    "parameters": ("COUNT", "Number of parameters of the model, such as 20M or 7B"),
    "context": ("N", "Tokens per sample"),
    "micro-batch-size": ("N", "Samples of a rank's micro-batch"),
    "global-batch-size": ("N", "Samples of the global batch, of all ranks"),
    "accumulate": ("N", "Micro-batches per optimizer step"),
    "virtual-ranks": ("N", "Virtual ranks"),
    "steps": ("N", "Number of steps"),
    "step": ("TIME", "Time of a step without synchronisation"),
    "rounds": ("N", "Number of rounds"),
    "lr": ("X", "Learning rate"),
    "seed": ("N", "Seed of all random numbers"),
    "optimizer": ("NAME", "Optimizer: adamw, muon, sgd, sgd-momentum, or package.module:Class"),
    "autocast": ("TYPE", "Mixed precision: off, bf16 or fp16"),
    "activation-checkpointing": (None, "Recompute activations in backward"),
    # checkpoints and failures
    "checkpoint-time": ("TIME", "Time that training waits for a checkpoint"),
    "checkpoint-interval": ("TIME", "Training between two checkpoints"),
    "restart-time": ("TIME", "Time from a failure until training resumes"),
    "mtbf": ("TIME", "Mean time between failures of a host"),
    # synchronisation
    "strategy": ("NAME", "Strategy"),
    "bucket-mib": ("MIB", "Bucket size in MiB"),
    "compression": ("NAME", "Compression"),
    "gradient-bytes": ("N", "Bytes per gradient on the wire: 1, 2 or 4"),
    "every": ("STEPS", "Steps between two synchronisations of parameters"),
    "delay": ("STEPS", "Steps from sending to merging"),
    "fragments": ("N", "Parts of the model that are synchronised in turn"),
    "outer": ("NAME", "Outer optimizer"),
    "outer-lr": ("X", "Outer learning rate"),
    "outer-momentum": ("X", "Outer momentum"),
    # a hub
    "outer-warmup": ("ROUNDS", "Rounds of plain averaging before momentum starts"),
    "unstable": (None, "Allow Nesterov per arrival, which diverges"),
    "merge": ("WHEN", "Merge updates: arrival (each at once) or quorum (those of a round together)"),
    "quorum": ("N|PERCENT", "Live workers that must deliver before a merge"),
    "staleness": ("POLICY", "Stale updates: accept, down-weight, drop, wait"),
    "bound": ("ROUNDS", "Rounds beyond which an update is too stale"),
    "down": ("TYPE", "Encoding of parameters for workers: bf16, fp16, fp32, int8"),
    "population": ("STEPS", "Train independently for this many steps; the best are adopted"),
    "margin": ("X", "Population: share behind the best at which the worst is replaced"),
    # devices and links
    "device": ("KIND", "Kind of device: cpu or cuda"),
    "hardware": ("GPU", "GPU by name, as in paceline plan hardware"),
    "device-memory": ("SIZE", "Memory per device, such as 24GiB or 80GB"),
    "dtype": ("TYPE", "Data type"),
    "link": ("RATE", "Bandwidth of a link between machines, each direction"),
    "inside": ("RATE", "Bandwidth of a link inside a machine, each direction"),
    "latency": ("TIME", "Latency of a link between machines"),
    "slow": ("N=RATE", "Bandwidth of the link of one host or rank; may be repeated"),
    "switch": ("RATE", "Total bandwidth of the switch between machines"),
    "topology": ("NAME", "Topology"),
    "speeds": ("X:X:…", "Relative speeds of machines, repeated for all of them"),
    "spread": ("PERCENT", "Log-normal standard deviation of the speeds of machines"),
    "jitter": ("PERCENT", "Log-normal standard deviation of step times"),
    # measurements
    "profile": ("FILE", "Profile"),
    "backend": ("NAME", "Backend"),
    "network": ("NAME", "Network between the ranks, by its name in the profile"),
    "op": ("OP", "Operation"),
    "bytes": ("SIZE", "Bytes"),
    "warmup": ("N", "Calls before the timed ones"),
    "iterations": ("N", "Timed repetitions"),
    "seconds": ("X", "Seconds"),
    # files
    "out": ("FOLDER", "Folder to write to"),
    "resume": (None, "Resume what an interrupted command left in --out"),
}  # fmt: skip


def shared(name: str, note: str = "", *, several: bool = False, panel: str | None = None) -> Any:
    """Return the declaration of an option that several commands have: with the same kind of value and meaning.

    Args:
        name: without the leading dashes.
        note: what this command adds to the meaning, such as ``"; default 2"``.
        several: the option takes several values, separated by commas.
        panel: title of the group of options in the command's help.

    Example:
        >>> shared("world-size", "; default 8").help
        'Number of ranks in all; default 8.'
    """
    metavar, meaning = _SHARED[name]
    if several:
        metavar = f"{metavar},…"
    return Option(f"--{name}", metavar=metavar, help=f"{meaning}{note}.", rich_help_panel=panel)


def own(metavar: str | None, help: str, *names: str, panel: str | None = None) -> Any:
    """Return the declaration of an option that one command has.

    Args:
        metavar: kind of value, such as ``"TIME"``; None: that of its type, or a flag.
        help: the meaning.
        names: the option's name, if it is not that of the parameter.
        panel: title of the group of options in the command's help.

    Example:
        >>> own("TIME", "Stop after this time.", panel="Server").metavar
        'TIME'
    """
    return Option(*names, metavar=metavar, help=help, rich_help_panel=panel)
