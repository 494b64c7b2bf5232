"""A hub that dies: its heir knows what was committed, and answers nothing else."""

from pathlib import Path

import torch

from hub_conversation import NUMEL, ONES, Talk, kinds
from paceline.async_dp.hub.hub_rules import HubOptimizer, HubRules
from paceline.async_dp.wal.hub_journal import HubJournal


def test_a_restarted_hub_continues_bit_for_bit(tmp_path: Path) -> None:
    rules = HubRules(outer=HubOptimizer("delayed-nesterov", 0.7, 0.9, warmup=0), snapshot_every=7)
    drawn = torch.Generator().manual_seed(0)
    deltas = [torch.randn(NUMEL, generator=drawn) for _ in range(24)]

    def course(folder: Path, killed: bool) -> torch.Tensor:
        with HubJournal.open(folder, resume=True) as journal:
            talk = Talk(rules, journal)
            talk.begin(1, 2, 3)
            for number, delta in enumerate(deltas[:17]):
                talk.update(1 + number % 3, number // 3, delta, samples=1.0 + number % 3)
            if not killed:
                for number, delta in enumerate(deltas[17:], 17):
                    talk.update(1 + number % 3, number // 3, delta, samples=1.0 + number % 3)
                return talk.theta.clone()
        with HubJournal.open(folder, resume=True) as journal:
            heir = Talk(rules, journal)
            assert heir.hub.updates == 17
            heir.sessions = {worker: 1000 for worker in (1, 2, 3)}
            for worker in (1, 2, 3):
                heir.hello(worker)
            (again,) = heir.update(2, 5, deltas[16], samples=1.0 + 16 % 3)
            assert again.meta["why"] == ""
            assert heir.hub.updates == 17, "round 5 of worker 2 was update 17, and is there"
            for number, delta in enumerate(deltas[17:], 17):
                heir.update(1 + number % 3, number // 3, delta, samples=1.0 + number % 3)
            return heir.theta.clone()

    assert torch.equal(course(tmp_path / "whole", killed=False), course(tmp_path / "killed", killed=True))


def test_nothing_is_answered_before_it_is_committed() -> None:
    talk = Talk()
    talk.begin(1)
    order: list[str] = []
    commit, append = talk.journal.commit, talk.journal.append

    def note(*given, **told):
        order.append("append")
        return append(*given, **told)

    talk.journal.append = note
    talk.journal.commit = lambda: (order.append("commit"), commit())[1]
    answers = talk.update(1, 0, ONES)
    assert order == ["append", "commit"]
    assert kinds(answers) == ["ack"]


def test_an_uncommitted_update_is_lost_with_the_hub_and_merged_when_it_is_repeated() -> None:
    talk = Talk()
    talk.begin(1)
    talk.update(1, 0, ONES)
    from hub_conversation import PACKING
    from paceline.async_dp.protocol.hub_messages import HubMessage

    packet = bytes(PACKING.pack(ONES))
    meta = {"samples": 1.0, "steps": 1, "base": 1}
    (envelope,) = talk.envelopes(HubMessage("update", 1, 0, 1, 0, meta, packet, "fp32"))
    talk.hub.receive(envelope, talk.now)
    talk.journal.crash()
    talk.hub = talk.started()
    assert talk.hub.updates == 1
    talk.hello(1)
    talk.update(1, 1, ONES, base=1)
    assert talk.hub.updates == 2
    torch.testing.assert_close(talk.theta, -2 * ONES)
