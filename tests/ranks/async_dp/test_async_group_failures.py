"""Errors on all ranks of a worker of asynchronous training, and ranks that die."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from async_group_ranks import EVERY, Task

import paceline
from hub_process import hub_thread
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.errors import MismatchError, PeerFailed, UsageError
from paceline.world.control_collectives import broadcast_text

pytestmark = pytest.mark.timeout(180)


# ---------------------------------------------------------------- errors


def expect_alike(rank: int, size: int, hub: str, folder: str, which: str) -> tuple[str, str, int]:
    """Return what a rank raised, and after how many steps."""
    task, steps = Task(), 0
    options: dict[str, Any] = {"folder": folder}
    if which == "run":
        options["run"] = "another"
    elif which == "score":
        options["score"] = lambda: 1 / (0 if rank == 1 and steps > 20 else 1)
    elif which == "key" and rank == 0:
        options["key"] = Path(folder, "no.key")
    elif which == "arguments":
        options["every"] = EVERY + rank
    try:
        with task.training(hub, **options) as training:
            if which == "thread" and rank == 0:
                training._client.comm_threads[0].error = OSError("the thread ended")
            for _ in range(2000):
                task.step()
                steps += 1
                time.sleep(0.002)
    except Exception as error:  # noqa: BLE001 - the test checks it
        assert task.optim._optimizer_step_post_hooks == {}, "it left its hooks"
        return type(error).__name__, str(error), steps
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("run", "this hub serves run 'test', the worker requests run 'another'"),
        ("folder", "hub0"),
        ("key", "no.key"),
        ("arguments", "AsyncDataParallel differs between ranks"),
        ("thread", "the thread ended"),
    ],
)
def test_what_is_raised_is_raised_on_all_ranks_in_the_same_step(
    pool, job_key, tmp_path: Path, which: str, message: str
) -> None:
    if which == "folder":
        (tmp_path / "hub0").write_text("a file where the folder should be")
    with hub_thread() as hub:
        first, second = pool(2).run(
            expect_alike, hub.address, str(tmp_path), which, env=[job_key.environment()] * 2
        )
    assert message in first[1]
    assert message in second[1]
    assert first[2] == second[2]
    if which != "thread":
        assert first[0] == second[0]


def test_a_score_that_raises_on_one_rank_ends_all(pool, job_key, tmp_path: Path) -> None:
    with hub_thread() as hub:
        first, second = pool(2).run(
            expect_alike, hub.address, str(tmp_path), "score", env=[job_key.environment()] * 2
        )
    assert "score= raised on this rank" in first[1]
    assert second[0] == "ZeroDivisionError"
    assert first[2] == second[2]


def broadcast_lengths(rank: int, size: int) -> list[int]:
    texts = [letter * count for letter, count in zip("aöc", (0, 400, 3000), strict=True)]
    received = [broadcast_text(text if rank == 0 else "not mine") for text in texts]
    assert received == texts
    return [len(text) for text in received]


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_texts_of_any_length_are_broadcast(pool, backend: str) -> None:
    assert pool(2, backend).run(broadcast_lengths) == [[0, 400, 3000]] * 2


def refuse_local_sgd(rank: int, size: int) -> None:
    task = Task()
    with (
        pytest.raises(UsageError, match="inside LocalSGD"),
        task.training("tcp://127.0.0.1:9"),
        paceline.LocalSGD(task.model, task.optim, every=4),
    ):
        task.step()


def test_a_group_inside_local_sgd_is_refused(pool, job_key) -> None:
    pool(2).run(refuse_local_sgd, env=[job_key.environment()] * 2)


def name_mismatch(rank: int, size: int) -> None:
    task = Task()
    with pytest.raises(MismatchError, match="compression"):
        task.training("tcp://127.0.0.1:9", compression="int4" if rank else "int8")


def test_ranks_with_different_arguments_are_named(pool) -> None:
    pool(2).run(name_mismatch)


# ---------------------------------------------------------------- ranks that die


def train_until_killed(send: Any, rank: int, life: int, folder: str, hub: str, key: dict[str, str]) -> None:
    """Train; in life 0 rank 1 dies, in life 1 rank 0 with an update that it has stored but not sent."""
    os.environ |= key
    paceline.init(
        "gloo", init_method=f"file://{folder}/world-{life}", rank=rank, size=2, device="cpu", timeout=60.0
    )
    task = Task()
    try:
        with (
            paceline.Watchdog(stall=20.0, lost=5.0),
            task.training(hub, folder=f"{folder}/outbox", name="group") as training,
        ):
            if training._client is not None:
                report_rounds(send, training, fatal=life == 1)
            while life < 2 or training.counts.taken < 5:
                task.step()
                time.sleep(0.002)
                if life == 0 and rank == 1 and training.counts.taken > 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            assert training.finish(30.0)
        send(("ended", task.held()))
    except PeerFailed as error:
        send(("failed", error.rank))
    paceline.shutdown()


def report_rounds(send: Any, training: paceline.AsyncDataParallel, *, fatal: bool) -> None:
    """Send every round that is stored or acknowledged; if `fatal`, die once the third is stored."""
    outbox = training._client._outboxes[0]
    put, acknowledge, stored = outbox.put, outbox.acknowledge, [0]

    def put_and_report(round: int, *rest: Any) -> None:
        put(round, *rest)
        send(("stored", round))
        stored[0] += 1
        if fatal and stored[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def report_acknowledged(round: int, fragment: int) -> bool:
        send(("acknowledged", round))
        return acknowledge(round, fragment)

    outbox.put, outbox.acknowledge = put_and_report, report_acknowledged
    send(("worker", outbox.worker))


def live_three_times(fork: Any, folder: str, hub: str, key: dict[str, str]) -> list[list[list[tuple]]]:
    lives = []
    for life in range(3):
        ranks = [fork(train_until_killed, rank, life, folder, hub, key) for rank in range(2)]
        lives.append([messages_of(each) for each in ranks])
    return lives


def messages_of(rank: Any) -> list[tuple]:
    messages = []
    with contextlib.suppress(EOFError):
        while True:
            messages.append(rank.receive())
    rank.wait()
    return messages


def test_a_group_whose_ranks_die_continues_as_the_same_worker_and_loses_nothing(killable, job_key) -> None:
    with hub_thread(HubRules(down="fp32")) as hub:
        lives = killable.run_ranks(live_three_times, hub.address, job_key.environment())
        ledger = hub.journal.ledger()
        theta = hub.hub.params.fragments[0].theta
    said = [{what: dict(rank).get(what) for what in ("failed", "ended")} for life in lives for rank in life]
    assert [each["failed"] for each in said] == [1, None, None, 0, None, None], "the others name who died"
    assert torch.equal(said[4]["ended"], theta)
    assert torch.equal(said[5]["ended"], theta)
    leaders = [life[0] for life in lives]
    assert len({number for life in leaders for what, number in life if what == "worker"}) == 1
    merged = [each["round"] for each in ledger if each["kind"] == "update"]
    assert len(merged) == len(set(merged)), "none counts twice"
    stored = [round for life in leaders for what, round in life if what == "stored"]
    assert len(stored) == len(set(stored))
    acknowledged = {round for life in leaders for what, round in life if what == "acknowledged"}
    assert acknowledged <= set(merged)
    unsent = [round for what, round in leaders[1] if what == "stored"][-1]
    assert unsent in merged, "the next life has sent it"
