"""A warning to any rank at any moment: all ranks save the very step that they have done, and leave with code 75."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import paceline
from paceline.checkpoint import background_saver, save_on_warning
from paceline.errors import CheckpointError
from paceline.testing import fault_injection
from warned_training import Lines, hold, newest, train

TERM, USR1, KILL = signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL


class Ranks:
    """The ranks of one life of a training, in the warm process."""

    def __init__(self, fork, folder, where, size, **options):
        self.folder, self.lines = Path(where), Lines(Path(where))
        self.folder.mkdir(exist_ok=True)
        before = len(list(self.folder.glob("*.log")))
        store = f"{folder}/world-{time.monotonic_ns()}"
        self.processes = [fork(life, rank, size, self.folder, store, options) for rank in range(size)]
        self.wait_for(lambda: len(list(self.folder.glob("*.log"))) == before + size)

    def wait_for(self, condition, seconds=30.0):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.lines.by_process()
            time.sleep(0.002)

    def reach(self, step):
        self.wait_for(lambda: self.lines.last_step() >= step)

    def hold(self, place):
        (self.folder / f"hold-{place}").touch()

    def wait_at(self, place):
        """Wait until all ranks stand at a place; the states of loaders and others are made on rank 0 alone."""
        pids = [each.pid for each in self.processes[: 1 if place == "save" else None]]
        self.wait_for(lambda: all(f"at {place}" in self.lines.by_process()[pid] for pid in pids))

    def release(self, place):
        (self.folder / f"hold-{place}").unlink()

    def kill(self, rank, number=TERM):
        self.processes[rank].kill(number)

    def codes(self):
        return [each.wait(60) for each in self.processes]

    def done(self):
        """Return the step that every rank has done last."""
        found = self.lines.steps()
        steps = {(found[each.pid] or [0])[-1] for each in self.processes}
        assert len(steps) == 1, found
        return steps.pop()


def life(send, rank, size, folder, store, options):
    torch.set_num_threads(1)
    logging.basicConfig(
        format="%(message)s", filename=folder / f"messages-{rank}", level=logging.INFO, force=True
    )
    if size > 1:
        paceline.init("paceline", init_method=f"file://{store}", rank=rank, size=size, timeout=30)
    prepare = options.pop("prepare", None)
    if prepare is not None:
        options |= prepare(rank, folder) or {}
    watch = paceline.Watchdog(stall=10.0) if options.pop("watch", False) else nullcontext()
    try:
        with watch:
            train(folder, **options)
    except CheckpointError as error:
        logging.error("%s: %s", type(error).__name__, error)
        raise
    paceline.shutdown()


def messages(where):
    return [line for path in sorted(Path(where).glob("messages-*")) for line in path.read_text().splitlines()]


def check_left(ranks):
    """Check that all ranks have left, and that the newest checkpoint is of the step which all have done."""
    assert ranks.codes() == [75] * len(ranks.processes)
    done = ranks.done()
    assert newest(ranks.folder) == done
    assert not list((ranks.folder / "checkpoint").glob("*.tmp-*"))
    return done


def finish(fork, folder, where, size, **options):
    """Run to the end, and return the digest of the weights."""
    ranks = Ranks(fork, folder, where, size, **options)
    assert ranks.codes() == [0] * size
    (digest,) = ranks.lines.digests()
    return digest


def undisturbed(fork, folder, size, **options):
    return finish(fork, folder, f"{folder}/undisturbed", size, **options)


# ------------------------------------------------------------------ who is warned, and how


def warned(fork, folder, size, numbers, pauses):
    """Warn ranks by these signals, after pauses; return the step that was saved, and whether the end is the same."""
    where = f"{folder}/run"
    ranks = Ranks(fork, folder, where, size)
    ranks.reach(7)
    for rank, number in numbers:
        ranks.kill(rank, number)
        time.sleep(pauses)
    done = check_left(ranks)
    assert done >= 7
    first = [message for message in messages(where) if "all ranks leave" in message]
    digest = finish(fork, folder, where, size)
    assert digest == undisturbed(fork, folder, size)
    steps = ranks.lines.steps().values()
    assert sorted(step for each in steps for step in each) == sorted([*range(1, 61)] * size), "each once"
    return done, first


@pytest.mark.parametrize(
    ("size", "numbers", "pause"),
    [
        (3, [(1, TERM)], 0.0),
        (3, [(0, USR1)], 0.0),
        (3, [(2, TERM), (0, TERM), (1, TERM)], 0.02),
        (3, [(0, TERM), (1, USR1), (2, TERM), (0, USR1), (0, TERM)], 0.0),  # each twice, by a launcher
        (1, [(0, USR1)], 0.0),
    ],
)
def test_all_ranks_save_the_same_step_and_leave(killable, size, numbers, pause):
    done, texts = killable.run_ranks(warned, size, numbers, pause)
    assert len(texts) == 1
    for rank, number in numbers[:1] if len(numbers) == 1 else []:
        assert f"rank {rank} was warned by {number.name}: " in texts[0]
    assert texts[0].endswith(f": all ranks leave after step {done}, which is saved")


def notice_of_a_file(rank, folder):
    save_on_warning.NOTICE_SECONDS = 0.02

    def notice():
        if rank == 1 and (folder / "notice").exists():
            return True
        raise ConnectionError("the cloud does not answer")

    return {"notice": notice}


def noticed(fork, folder):
    where = f"{folder}/run"
    ranks = Ranks(fork, folder, where, 3, prepare=notice_of_a_file, pause=0.01)
    ranks.reach(5)
    time.sleep(0.2)
    (ranks.folder / "notice").touch()
    check_left(ranks)
    return messages(where)


def test_a_notice_has_all_leave_and_one_that_raises_is_logged_once(killable):
    lines = killable.run_ranks(noticed)
    raised = "notice() raised ConnectionError: the cloud does not answer; it is called again"
    assert lines.count(raised) == 3, "once on each rank"
    assert sum("rank 1 was warned by its notice: all ranks leave" in line for line in lines) == 1


def notice_that_blocks(rank, folder):
    return {"notice": lambda: time.sleep(3600)}


def blocked(fork, folder):
    ranks = Ranks(fork, folder, f"{folder}/run", 2, prepare=notice_that_blocks, epochs=1)
    return ranks.codes(), ranks.done()


def test_a_notice_that_blocks_delays_nothing(killable):
    assert killable.run_ranks(blocked) == ([0, 0], 20)


def own_handlers(rank, folder):
    """The program's own handler of SIGTERM asks all ranks to leave; its one of SIGUSR1 does nothing."""
    made = []
    create = paceline.Checkpoint.__init__

    def remember(self, *args, **options):
        create(self, *args, **options)
        made.append(self)

    paceline.Checkpoint.__init__ = remember
    signal.signal(TERM, lambda *_: made[0].request_leave())
    signal.signal(USR1, lambda *_: None)
    logging.getLogger("paceline.checkpoint").setLevel(logging.DEBUG)


def with_own_handlers(fork, folder):
    where = f"{folder}/run"
    ranks = Ranks(fork, folder, where, 2, prepare=own_handlers, pause=0.01)
    ranks.reach(3)
    ranks.kill(1, USR1)
    ranks.reach(ranks.lines.last_step() + 10)
    ranks.kill(1, TERM)
    check_left(ranks)
    return messages(where)


def test_handlers_of_the_program_stay_and_may_ask_for_it(killable):
    lines = killable.run_ranks(with_own_handlers)
    assert sum("rank 1 was warned by a request of the program: all ranks" in line for line in lines) == 1
    for name in ("SIGTERM", "SIGUSR1"):
        assert lines.count(f"{name} keeps its handler; it may call request_leave()") == 2


def watched(fork, folder):
    ranks = Ranks(fork, folder, f"{folder}/run", 3, watch=True, prepare=slow_to_close)
    ranks.reach(4)
    ranks.kill(2)
    check_left(ranks)


def slow_to_close(rank, folder):
    """Ranks leave one after the other."""
    close = paceline.Checkpoint.close

    def late(self):
        time.sleep(0.3 * rank)
        close(self)

    paceline.Checkpoint.close = late


def test_to_a_watchdog_ranks_that_leave_have_not_failed(killable):
    killable.run_ranks(watched)


def with_workers(fork, folder, number):
    """Warn the process group of a rank, as torchrun does, in which workers load the batches."""
    where = f"{folder}/run"
    ranks = Ranks(fork, folder, where, 2, prepare=own_group, workers=2, pause=0.03)
    ranks.reach(4)
    os.killpg(ranks.processes[1].pid, number)
    check_left(ranks)
    assert finish(fork, folder, where, 2, workers=1) == undisturbed(fork, folder, 2)


def own_group(rank, folder):
    os.setpgid(0, 0)


@pytest.mark.parametrize("number", [TERM, USR1])
def test_workers_of_a_loader_outlive_a_warning_to_their_group(killable, number):
    killable.run_ranks(with_workers, number)


# ------------------------------------------------------------------ difficult moments


def slow_writing(rank, folder):
    """The thread that writes a checkpoint may be held up, while training goes on."""
    write = background_saver.write_parts

    def held_up(*args):
        hold(folder, "write")
        return write(*args)

    background_saver.write_parts = held_up


def held(fork, folder, place, epochs):
    """Warn rank 1 while all ranks stand at a place; return exit codes, the step done, and that of the checkpoint."""
    where, resumes = f"{folder}/run", place in ("load", "first")
    if resumes:
        before = Ranks(fork, folder, where, 2)
        before.reach(4)
        before.kill(0)
        check_left(before)
    saved = newest(Path(where))
    (Path(where) / f"hold-{place}").parent.mkdir(exist_ok=True)
    (Path(where) / f"hold-{place}").touch()
    every = 10 if place in ("save", "write") else 1000
    ranks = Ranks(fork, folder, where, 2, epochs=epochs, every=every, prepare=slow_writing)
    ranks.wait_at(place)
    ranks.kill(1)
    time.sleep(0.05)
    ranks.release(place)
    codes, done = ranks.codes(), ranks.done()
    now = newest(Path(where))
    digest = finish(fork, folder, where, 2, epochs=epochs)
    assert digest == undisturbed(fork, folder, 2, epochs=epochs)
    return codes, done, saved, now


def test_a_warning_while_the_state_is_loaded_leaves_before_the_first_step(killable):
    codes, done, saved, now = killable.run_ranks(held, "load", 3)
    assert (codes, done, now) == ([75, 75], 0, saved)


def test_a_warning_in_the_first_step_saves_it(killable):
    codes, done, saved, now = killable.run_ranks(held, "first", 3)
    assert codes == [75, 75]
    assert saved < done == now


@pytest.mark.parametrize("place", ["save", "write"])
def test_a_warning_during_a_save(killable, place):
    codes, done, _, now = killable.run_ranks(held, place, 3)
    assert codes == [75, 75]
    assert now == done >= 10


def signalled_late(fork, folder):
    """Signal rank 1 for the first time seconds after another rank's warning has had all save."""
    ranks = Ranks(fork, folder, f"{folder}/run", 2)
    ranks.hold("save")
    ranks.reach(3)
    ranks.kill(0)
    ranks.wait_at("save")
    time.sleep(2.1)
    ranks.kill(1)
    time.sleep(0.1)
    ranks.release("save")
    check_left(ranks)


def test_a_rank_that_saves_on_the_warning_of_another_is_not_ended_by_its_own(killable):
    killable.run_ranks(signalled_late)


def test_a_warning_in_the_save_at_the_end_of_an_epoch_and_after_it(killable):
    codes, done, _, now = killable.run_ranks(held, "epoch", 3)
    assert codes == [75, 75]
    assert now == done >= 21


def test_after_the_last_step_the_program_goes_on_to_its_end(killable):
    codes, done, _, now = killable.run_ranks(held, "last", 1)
    assert (codes, done, now) == ([0, 0], 20, 20)


def before_training(fork, folder):
    """Warn a new run before its first step, in its first one, which takes long, and in the last one of an epoch."""
    where = f"{folder}/run"
    ranks = Ranks(fork, folder, where, 2, prepare=warned_at_once)
    assert ranks.codes() == [75, 75]
    assert ranks.done() == newest(Path(where)) == 0
    assert not list((Path(where) / "checkpoint").glob("step-*"))
    return messages(where)


def warned_at_once(rank, folder):
    """The notice is there already."""
    return {"notice": lambda: rank == 1 or time.sleep(60)}


def test_a_run_that_is_warned_before_its_first_step_saves_nothing(killable):
    lines = killable.run_ranks(before_training)
    assert sum("all ranks leave before the first step" in line for line in lines) <= 1
    assert not any("is saved" in line for line in lines)


def last_of_an_epoch(fork, folder):
    """Warn in the last step of an epoch, without saves of its own."""
    where = f"{folder}/run"
    ranks = Ranks(fork, folder, where, 2, every=None, pause=0.0, prepare=slow_at_20)
    ranks.reach(20)
    ranks.kill(0)
    done = check_left(ranks)
    assert finish(fork, folder, where, 2) == undisturbed(fork, folder, 2)
    return done


def slow_at_20(rank, folder):
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(
        0.3 if (folder / f"{os.getpid()}.log").read_text().endswith("step 20\n") else seconds
    )


def test_a_warning_in_the_last_step_of_an_epoch_leaves_at_its_end(killable):
    assert killable.run_ranks(last_of_an_epoch) == 20


# ------------------------------------------------------------------ second signals, failures


def twice(fork, folder):
    """A second signal, once the first is two seconds old, ends a rank that is still saving."""
    ranks = Ranks(fork, folder, f"{folder}/run", 2, pause=0.01)
    ranks.reach(3)
    ranks.hold("save")
    ranks.kill(0)
    ranks.wait_at("save")
    time.sleep(2.1)
    ranks.kill(0)
    code = ranks.processes[0].wait(10)
    return code, newest(ranks.folder)


def test_a_second_signal_ends_the_process_at_once(killable):
    assert killable.run_ranks(twice) == (-TERM, 0)


def full(rank, folder):
    if rank == 1:
        fault_injection.disk_full(after_nbytes=50, rank=1)


def with_a_full_disk(fork, folder):
    where = f"{folder}/run"
    ranks = Ranks(fork, folder, where, 2, prepare=full, pause=0.01)
    ranks.reach(3)
    ranks.kill(0)
    return ranks.codes(), newest(Path(where)), ranks.lines.count("end"), messages(where)


def test_ranks_that_can_not_save_leave_with_the_error(killable):
    codes, saved, ended, lines = killable.run_ranks(with_a_full_disk)
    assert (codes, saved, ended) == ([1, 1], 0, 0)
    errors = [line for line in lines if line.startswith("CheckpointError: ")]
    assert len(errors) == 2
    assert all("rank 1: No space left on device" in error for error in errors)


def restored(send):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    before = signal.getsignal(TERM), signal.getsignal(USR1)
    found = []
    with paceline.Checkpoint(f"/proc/self/cwd/{os.getpid()}", model, optim) as checkpoint:
        found.append((signal.getsignal(TERM), signal.getsignal(USR1)) == before)
        next(checkpoint.resume([1, 2]))
        found.append((signal.getsignal(TERM), signal.getsignal(USR1)) == before)
    found.append((signal.getsignal(TERM), signal.getsignal(USR1)) == before)
    send(found)


def handlers(fork, folder):
    os.chdir(folder)
    return fork(restored).receive()


def test_handlers_are_installed_while_it_is_used_and_restored(killable):
    assert killable.run_ranks(handlers) == [True, False, True]


# ------------------------------------------------------------------ at random moments


def often(fork, folder, seed):
    """Warn ranks at random moments, life after life, until the run has ended; check each checkpoint."""
    rng = random.Random(seed)
    where, size, lives = f"{folder}/run", rng.choice([2, 3]), 0
    while True:
        ranks = Ranks(fork, folder, where, size, every=rng.choice([3, 1000]), pause=0.01)
        done = max(ranks.lines.last_step(), 0)
        if rng.random() < 0.7:  # else perhaps before or after the training
            ranks.reach(min(done + rng.randint(1, 20), 60))
        time.sleep(rng.uniform(0.0, 0.3))
        for rank in rng.sample(range(size), rng.randint(1, size) if done < 60 else 0):
            ranks.kill(rank, rng.choice([TERM, USR1]))
            time.sleep(rng.choice([0.0, 0.02]))
        codes, lives = ranks.codes(), lives + 1
        if codes == [0] * size:
            break
        killed = (
            -TERM in codes or -USR1 in codes
        )  # before or after the training, where signals have their default
        assert killed or codes == [75] * size, codes
        assert killed or newest(ranks.folder) == max(ranks.lines.last_step(), 0)
    assert len(ranks.lines.digests()) == 1
    done = sorted(step for steps in ranks.lines.steps().values() for step in steps)
    assert done == sorted([*range(1, 61)] * size), "each step once"
    assert ranks.lines.digests() == {undisturbed(fork, folder, size)}
    return lives


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_warnings_at_random_moments_lose_no_step(killable, seed):
    """benchmarks/save-on-warning is the whole experiment, with a hundred SIGTERMs."""
    assert killable.run_ranks(often, seed, timeout=200) > 1
