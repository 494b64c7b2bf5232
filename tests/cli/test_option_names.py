"""One meaning per option name, in all commands: the same kind of value, the same first words of the help."""

from __future__ import annotations

import inspect
import re
from collections import Counter

import pytest

import paceline
from paceline.tools.cli import app

MEANINGS = {  # the kind of value (metavar), and the words with which the help of the option begins everywhere
    "account": ("NAME", "Account"),
    "accumulate": ("N", "Micro-batches per optimizer step"),
    "activation-checkpointing": ("flag", "Recompute activations in backward"),
    "activations": ("SIZE", "Bytes saved for backward per token"),
    "add": ("RATE", "Rate at which a rank adds"),
    "address": ("ADDRESS", "With --submit: address of the cluster"),
    "algorithm": ("NAME", "Algorithm"),
    "autocast": ("TYPE", "Mixed precision"),
    "backend": ("NAME", "Backend"),
    "backward": ("PERCENT", "Share of backward in computing"),
    "bad-lr": ("WORKER:LR", "Learning rate of a worker"),
    "balance": ("NAME", "Balance of the work"),
    "bandwidth": ("RATE", "Limit each way"),
    "beside": ("flag", "Simulate DDP on the same machines as the first row"),
    "bind": ("ADDRESS", "Address for workers"),
    "block": ("N", "Samples that go to one rank together"),
    "bound": ("ROUNDS", "Rounds beyond which an update is too stale"),
    "bucket-mib": ("MIB", "Bucket size in MiB"),
    "bytes": ("SIZE", "Bytes"),
    "center": ("RANK", "Rank that is the switch, with --topology star"),
    "checkpoint-every": ("STEPS", "Steps between checkpoints"),
    "checkpoint-interval": ("TIME", "Training between two checkpoints"),
    "checkpoint-time": ("TIME", "Time that training waits for a checkpoint"),
    "churn": ("PERCENT", "Share of workers absent at a time"),
    "claim": ("NAME", "Volume claim, mounted at --workdir"),
    "clip": ("X", "Maximum gradient norm"),
    "compare": ("flag", "Rank all algorithms of the operation, best first"),
    "complete-time": ("TIME", "Time until a checkpoint is complete"),
    "compression": ("NAME", "Compression"),
    "compute": ("TIME", "Concurrent computation per rank"),
    "contention": (
        "X:X",
        "Slowdown of computing during communication, and of communication during computing",
    ),
    "config": ("FOLDER", "With --to hf"),
    "context": ("N", "Tokens per sample"),
    "cpus": ("N", "Cores per rank"),
    "csv": ("FILE", "CSV file to write the table to"),
    "cuda-context": ("SIZE", "Memory of driver and kernels"),
    "data": ("PATH", "Text to train on"),
    "data-memory": ("SIZE", "Memory of data that stay on the device"),
    "delay": ("STEPS", "Steps from sending to merging"),
    "device": ("KIND", "Kind of device: cpu or cuda"),
    "device-memory": ("SIZE", "Memory per device, such as 24GiB or 80GB"),
    "different": ("flag", "Start workers from different parameters"),
    "divided-activations": ("PERCENT", "Part of a micro-batch's activations that devices divide"),
    "down": ("TYPE", "Encoding of parameters for workers"),
    "draw": ("FILE", "Picture to draw"),
    "draws": ("N", "Random draws to check the closed forms"),
    "drop-last": ("flag", "Loaders without a policy drop the short last batch"),
    "dropout": ("X", "Share of activations to drop out"),
    "dtype": ("TYPE", "Data type"),
    "env": ("NAME=VALUE", "Environment variable"),
    "eval-every": ("STEPS", "Steps between evaluations"),
    "every": ("STEPS", "Steps between two synchronisations of parameters"),
    "exploding": ("X", "Reject updates of this many times the usual norm"),
    "file": ("FILE", "File to write to, not the terminal"),
    "flops": ("RATE", "C, FLOP/s per device"),
    "for": ("TIME", "Virtual time"),
    "fragments": ("N", "Parts of the model that are synchronised in turn"),
    "frame": ("SIZE", "Frame size of long messages, at most 16MiB"),
    "gap": ("X", "Population: lead at which all adopt the best"),
    "gather": ("TYPE", "Type in which full-shard gathers"),
    "global-batch-size": ("N", "Samples of the global batch, of all ranks"),
    "gpus": ("N", "GPUs per rank"),
    "grace": ("TIME", "From SIGTERM to SIGKILL when ranks must end"),
    "gradient-bytes": ("N", "Bytes per gradient on the wire"),
    "hardware": ("GPU", "GPU by name, as in paceline plan hardware"),
    "host": ("NAME", "A host"),
    "host-loss": ("PERCENT", "Share of failures that take a host"),
    "hostfile": ("FILE", "Write the hosts to this file"),
    "hub-link": ("RATE", "Bandwidth of the hub's link, each direction"),
    "image": ("IMAGE", "Image with Python, Paceline and the script"),
    "init-method": ("NAME", "Init method of the process groups"),
    "inject": ("FAULT[@RANK]", "Inject a fault at a rank"),
    "inputs": ("SHAPE", "Shape and type of a model argument"),
    "insecure": ("flag", "Accept everybody who can reach the address"),
    "inside": ("RATE", "Bandwidth of a link inside a machine, each direction"),
    "inside-latency": ("TIME", "Latency of a link inside a machine"),
    "ints": ("X", "--bytes in 4-byte integers"),
    "iterations": ("N", "Timed repetitions"),
    "jitter": ("PERCENT", "Log-normal standard deviation of step times"),
    "job-time": ("TIME", "Computing of the whole job on one host"),
    "jobs": ("N", "Jobs simulated per number of hosts"),
    "json": ("FILE", "JSON file to write all results to"),
    "keys": ("FOLDER", "Folder of keys, made by keygen"),
    "last-call": ("TIME", "How long a large enough world waits for missing hosts"),
    "latency": ("TIME", "Latency of a link between machines"),
    "layers": ("N", "Layers into which the model can be split"),
    "link": ("RATE", "Bandwidth of a link between machines, each direction"),
    "log": ("NAMES", "Loggers, by commas"),
    "log-dir": ("FOLDER", "Folder for restarts"),
    "lr": ("X", "Learning rate"),
    "margin": ("X", "Population: share behind the best"),
    "master-weights": ("TYPE", "Copies of bf16 parameters"),
    "matrix-sizes": ("N", "Matrix sizes"),
    "max-micro-batch-size": ("N", "Most samples of a rank's micro-batch"),
    "max-restarts": ("N", "Failures to recover from"),
    "max-wait": ("PERCENT", "Part of a step that ranks may wait"),
    "measured": ("FILE", "Result of paceline bench step, to compare with"),
    "memory-per-node": ("SIZE", "Memory per host"),
    "merge": ("WHEN", "Merge updates"),
    "micro-batch-size": ("N", "Samples of a rank's micro-batch"),
    "min-ranks": ("N", "Fewest ranks, over all hosts, to continue with after failures"),
    "model": ("MODEL", "Model"),
    "model-name": ("NAME", "Name of the model to export, if there are several"),
    "module": ("flag", "SCRIPT is a module, as for python -m"),
    "mpi": ("NAME", "MPI of mpiexec"),
    "mtbf": ("TIME", "Mean time between failures of a host"),
    "name": ("NAME", "Name of the run"),
    "namespace": ("NAME", "Namespace"),
    "network": ("NAME", "Network between the ranks, by its name in the profile"),
    "new": ("flag", "Start a run"),
    "nnodes": ("N", "Number of hosts"),
    "notice-time": ("TIME:TIME", "Time until survivors notice a lost process, and a lost host"),
    "nproc-per-node": ("N", "Processes per host"),
    "op": ("OP", "Operation"),
    "open": ("flag", "Open the report in the web browser"),
    "optimizer": ("NAME", "Optimizer"),
    "option": ("--NAME=VALUE", "Another option of sbatch"),
    "out": ("FOLDER", "Folder to write to"),
    "outer": ("NAME", "Outer optimizer"),
    "outer-lr": ("X", "Outer learning rate"),
    "outer-momentum": ("X", "Outer momentum"),
    "outer-warmup": ("ROUNDS", "Rounds of plain averaging before momentum starts"),
    "outer-warmup-steps": ("STEPS", "Steps before the outer momentum starts"),
    "overwrite": ("flag", "Replace the run in --out"),
    "parameters": ("COUNT", "Number of parameters of the model, such as 20M or 7B"),
    "partition": ("NAME", "Partition"),
    "peak-memory": ("flag", "Measure peak memory too, each strategy in processes of its own"),
    "perturb": ("X", "Population: factor on a replaced worker's learning rate"),
    "population": ("STEPS", "Train independently for this many steps"),
    "port": ("PORT", "Port of the rendezvous on the first host"),
    "price": ("X", "Price of a host's hour"),
    "profile": ("FILE", "Profile"),
    "prometheus": ("HOST:PORT", "Serve metrics for Prometheus at this address"),
    "python": ("PATH", "Python interpreter"),
    "quarantine": ("TIME", "Length of the first quarantine"),
    "quorum": ("N|PERCENT", "Live workers that must deliver before a merge"),
    "rebuild-time": ("TIME", "Time in which survivors form a new world"),
    "receive": ("POLICY", "Updates that workers merge, by score"),
    "recovery": ("HOW", "After failures"),
    "rejoin": ("flag", "Restart when a host joins, or let it wait for a failure"),
    "rendezvous": ("HOST:PORT", "Rendezvous of several hosts, the same on each"),
    "replacement-time": ("TIME", "Time from a failure until a replacement is ready"),
    "restart-time": ("TIME", "Time from a failure until training resumes"),
    "resume": ("flag", "Resume what an interrupted command left in --out"),
    "root": ("RANK", "Root of a broadcast or reduce"),
    "rounds": ("N", "Number of rounds"),
    "run": ("PLACE", "Run it here, on this machine, or in a lab of emulated hosts, or none"),
    "samples": ("N", "Samples of the data set"),
    "scaling": ("NAME", "Scaling"),
    "scheme": ("NAME", "Scheme"),
    "seconds": ("X", "Seconds"),
    "seed": ("N", "Seed of all random numbers"),
    "segments": ("N", "Segments per chunk, pipelined"),
    "send": ("POLICY", "Updates that workers send, by score"),
    "serve": ("HOST:PORT", "Only serve a rendezvous, on a host that does not train"),
    "shape": ("TEXT", "Shape of a sample, as measured"),
    "shard": ("I/N", "Index of this hub, number of hubs"),
    "shared-memory": ("SIZE", "/dev/shm of a pod"),
    "shares": ("X", "Shares of ranks, adding up to 1"),
    "shell": ("COMMAND", "With --submit: runs a line on a host"),
    "silent-after": ("TIME", "Silence after which a worker no longer counts"),
    "slow": ("N=RATE", "Bandwidth of the link of one host or rank"),
    "snapshot-every": ("N", "Updates between snapshots"),
    "sources": ("flag", "Show the source of each row"),
    "speeds": ("X:X:…", "Relative speeds of machines, repeated for all of them"),
    "spoil": ("PERCENT", "Share of messages that are lost, repeated, late or damaged"),
    "spread": ("PERCENT", "Log-normal standard deviation of the speeds of machines"),
    "staleness": ("POLICY", "Stale updates"),
    "starve": ("flag", "Run real processes out of data, under torch and under Paceline"),
    "state-bytes": ("N", "Bytes of state per parameter"),
    "step": ("TIME", "Time of a step without synchronisation"),
    "step-time": ("TIME", "Time of a step, with synchronisation"),
    "standby": ("ADDRESS", "Wait, and take over"),
    "steps": ("N", "Number of steps"),
    "strategy": ("NAME", "Strategy"),
    "stream": ("flag", "With --run: forward pieces at once"),
    "strikes": ("N", "Rejections, of the last ten updates, before quarantine"),
    "submit": ("flag", "Start it instead of printing it"),
    "switch": ("RATE", "Total bandwidth of the switch between machines"),
    "target": ("X", "Loss to which time is measured"),
    "task": ("NAME", "Task"),
    "threads": ("N", "Threads per rank"),
    "time": ("TIME", "Time limit"),
    "timeout": ("TIME", "Longest time"),
    "to": ("FORMAT", "Format to write"),
    "topology": ("NAME", "Topology"),
    "torch-trace": ("FILE", "With --trace: add a trace of torch.profiler"),
    "torch": ("flag", "Measure the calls of torch's own DDP too"),
    "trace": ("FILE", "Also write the timeline as JSON for Perfetto or chrome"),
    "unstable": ("flag", "Allow Nesterov per arrival, which diverges"),
    "until": ("TIME", "Stop after this time"),
    "usable": ("PERCENT", "Part of the memory to plan with"),
    "verify": ("flag", "Run it here, on CPUs, and compare"),
    "virtual-ranks": ("N", "Virtual ranks"),
    "vocabulary": ("N", "Vocabulary size"),
    "wait": ("TIME", "Longest wait for hosts or resources"),
    "warmup": ("N", "Calls before the timed ones"),
    "warmup-steps": ("STEPS", "Initial local steps with an exchange at every other step"),
    "warn": ("N", "Seconds before the time limit at which to requeue"),
    "watch": ("flag", "Submit it and follow its log"),
    "workdir": ("FOLDER", "Working directory"),
    "worker": ("NAME", "Make a key for a worker of this name"),
    "workers": ("N", "Number of machines that train"),
    "world-size": ("N", "Number of ranks in all"),
    "worse": ("X", "Reject updates whose score worsened by this share"),
}
_PLAIN_KINDS = {int: "N", float: "X"}


def walk():
    """Yield each command with its words, such as "plan memory"."""
    waiting = [(name, app._load(name)) for name in app.COMMANDS]
    while waiting:
        words, command = waiting.pop(0)
        yield words, command
        waiting += [(f"{words} {name}", inner) for name, inner in getattr(command, "commands", {}).items()]


COMMANDS = dict(walk())
OPTIONS = {  # the options of each command, by name
    words: {
        name.removeprefix("--"): each
        for each in command.params
        for name in each.opts
        if name.startswith("--") and name != "--help"
    }
    for words, command in COMMANDS.items()
}


def kind_of(option):
    """Return the kind of an option's value; of a list by commas, that of its items."""
    if option.is_flag:
        return "flag"
    return (option.metavar or _PLAIN_KINDS[option.type_descriptor.annotation]).removesuffix(",…")


@pytest.mark.parametrize("words", [words for words in OPTIONS if OPTIONS[words]])
def test_every_option_has_the_one_meaning_of_its_name(words):
    wrong = []
    for name, option in OPTIONS[words].items():
        kind, meaning = MEANINGS.get(name, ("", ""))
        if not kind:
            wrong.append(f"--{name} is not in MEANINGS: {option.help}")
        elif kind_of(option) != kind:
            wrong.append(f"--{name} takes {kind_of(option)}, elsewhere {kind}")
        elif not re.match(rf"{re.escape(meaning)}(?!\w)", option.help):
            wrong.append(f"--{name}: {option.help!r} does not begin with {meaning!r}")
    assert not wrong, "\n".join(wrong)


def test_every_name_is_in_use_and_no_meaning_has_two_names():
    used = {name for options in OPTIONS.values() for name in options}
    assert set(MEANINGS) - used == set()
    twice = [
        meaning for meaning, count in Counter(each for _, each in MEANINGS.values()).items() if count > 1
    ]
    assert twice == []


def test_out_is_a_folder_and_results_are_files():
    for options in OPTIONS.values():
        given = {name: options[name].metavar for name in ("out", "json", "csv") if name in options}
        assert given == {name: "FOLDER" if name == "out" else "FILE" for name in given}
    assert sum("out" in options for options in OPTIONS.values()) > 10


def test_commands_with_many_options_group_them():
    many = {words: options for words, options in OPTIONS.items() if len(options) > 20}
    assert {"train", "hub serve", "simulate", "simulate async"} <= set(many)
    for words, options in many.items():
        groups = Counter(option.rich_help_panel for option in options.values())
        assert groups.pop(None, 0) <= 5, words
        assert len(groups) >= 3, words
        assert max(groups.values()) <= 12, words


def test_the_strategy_is_by_default_that_of_the_api():
    of_api = inspect.signature(paceline.DataParallel.__init__).parameters["sync"].default
    defaults = {
        words: options["strategy"].default for words, options in OPTIONS.items() if "strategy" in options
    }
    assert defaults.pop("bench step") is None, "all of them"
    assert set(defaults) == {"train", "simulate", "plan batch", "plan memory"}
    assert set(defaults.values()) == {of_api}
