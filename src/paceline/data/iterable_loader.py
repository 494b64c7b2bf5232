"""Serving an iterable dataset: nobody knows its length, so ranks tell one another a step ahead who has a batch.

[Note: one step ahead] Before a batch is handed out, the next one is fetched, and its existence announced: one
gather of a few numbers, under way while the user computes. So when a rank comes for the next batch, it knows
whether all, some or no ranks have one, and no rank waits for one that will not come.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.data.counted_batch import with_samples
from paceline.data.sampling.block_dispatch import DispatchScheme
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.stream_reader import Collated, Collating, PrepareWorker, RankReader, Stream, StreamLayer
from paceline.data.stream_state import StreamState
from paceline.data.torch_dataloader import BatchFetcher, LoaderOptions
from paceline.errors import DataError, UnevenData, UsageError
from paceline.world.object_collectives import RowsUnderWay, gather_rows_ahead

__all__ = ["IterableLoader", "StreamSettings"]

log = logging.getLogger("paceline.data")


@dataclass(frozen=True)
class StreamSettings:
    """How a stream is dealt and cut.

    Attributes:
        shares: of the ranks, where all read the same stream; None: each has its own.
        block, scheme, seed: as in `Dealing`, where all read the same stream.
        batch_size: samples of a full batch.
        uneven: the policy; a stream can't be rebalanced.
    """

    shares: RankShares | None
    block: int
    scheme: DispatchScheme
    seed: int
    batch_size: int
    uneven: str


class Announced(NamedTuple):
    """What a rank says about its next batch: whether it has one, of which worker, of how many samples."""

    has: int  # 1, 0, or FAILED
    worker: int
    samples: int
    first: int


FAILED = -1
_NOTHING = Announced(0, 0, 0, 0)


class IterableLoader:
    """The course of one rank through an iterable dataset.

    Args:
        dataset: iterable.
        recipe: how it is dealt and cut.
        place: (rank, ranks) of this process.
        group: the ranks.
        fetch: how samples become batches.
    """

    def __init__(
        self,
        dataset: Any,
        recipe: StreamSettings,
        place: tuple[int, int],
        group: ProcessGroup | None,
        fetch: LoaderOptions,
    ) -> None:
        self.dataset, self.recipe, self.group = dataset, recipe, group
        self.rank, self.ranks = place
        self.epoch = self.step = 0
        self._fetch = fetch
        self._fetcher: tuple[list[StreamLayer], BatchFetcher] | None = None
        self._begun = self._over = self._asked = False
        self._layers = [self._new_layer()]
        self._fetcher_of(self._layers)  # torch's DataLoader refuses options that make no sense

    def _new_layer(self) -> StreamLayer:
        recipe = self.recipe
        taken = tuple({} for _ in range(self.ranks))
        return StreamLayer(recipe.shares, recipe.block, recipe.scheme, recipe.seed, taken)

    # ------------------------------------------------------------------ where it stands

    @property
    def steps(self) -> int:
        """Steps of the epoch: not known.

        Raises:
            TypeError: always, as torch's DataLoader does.
        """
        raise TypeError("an iterable dataset tells no length, so its Loader has none")

    def tell(self) -> str:
        """Return what becomes of the data in an epoch."""
        whose = (
            "every rank reads its own stream" if self.recipe.shares is None else "one stream, dealt to all"
        )
        return f"{whose} ({self.ranks} ranks): {_SENTENCES[self.recipe.uneven]}"

    @property
    def harmless(self) -> bool:
        """Whether every sample is used once, and no rank runs dry: nobody knows before."""
        return self.recipe.uneven in ("join", "error")

    def facts(self) -> list[str]:
        """Return what must be the same on all ranks before an epoch begins."""
        return [
            f"{self.recipe}",
            f"num_workers={self._fetch.num_workers}",
            f"epoch {self.epoch}, step {self.step}",
            f"position {json.dumps(self.state())}",
        ]

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`, unless a loaded state stands in it."""
        if self._begun or epoch != self.epoch:
            self._start(epoch)
        self._asked = True

    def state(self) -> dict[str, Any]:
        """Return the position, as plain JSON."""
        return StreamState(self.epoch, self.step, self._over, self._fetch.num_workers, self._layers).plain()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to the position that `state` tells, dealt to the present ranks.

        Raises:
            UsageError: it is damaged, or of another number of workers, or each rank has its own stream and
                there are more or fewer ranks now.
        """
        found = StreamState.of(state)
        if found.workers != self._fetch.num_workers:
            raise UsageError(
                f"the state was taken with num_workers={found.workers}; this loader has {self._fetch.num_workers}",
                remedy="resume an iterable dataset with as many workers: each reads a stream of its own",
            )
        own = self.recipe.shares is None
        if own != found.own:
            kinds = ("one stream for all ranks (stream='whole')", "a stream for every rank (stream='own')")
            raise UsageError(
                f"the state is of {kinds[found.own]}; this loader has {kinds[own]}",
                remedy="resume with the stream= that the state was taken with",
            )
        if own and found.ranks != self.ranks:
            raise UsageError(
                f"the state is of {found.ranks} ranks that each had a stream; now there are {self.ranks}",
                remedy="resume on as many ranks, or let all read one stream (stream='whole') from the beginning",
            )
        fresh, layers = self._new_layer(), found.layers
        if replace(fresh, taken=layers[-1].taken) != layers[-1]:
            layers = [*layers, fresh]
        self._layers, self.epoch, self.step, self._over = layers, found.epoch, found.step, found.over
        self._begun = self._asked = False

    def begin(self) -> None:
        """Go on from the place that was loaded or asked for, else to the next epoch."""
        if self._begun or (self._over and not self._asked):
            self._start(self.epoch + 1)
        self._begun, self._asked = True, False

    def _start(self, epoch: int) -> None:
        self.epoch, self.step, self._begun, self._over = epoch, 0, False, False
        self._layers = [self._new_layer()]

    # ------------------------------------------------------------------ batches

    def batches(self) -> Iterator[Any]:
        """Yield what is left of the epoch; see [Note: one step ahead]."""
        if self._over:
            return
        fetched, again = self._fetched(self._layers), self._again(self._layers[:-1])
        failed: list[DataError] = []  # of this rank; in a list, since its traceback would hold a variable
        batch = _next(fetched, failed)
        under_way = self._announce(batch, failed)
        filler, all_dry_at_first = None, True
        while True:
            told = [Announced(*(int(each) for each in row.tolist())) for row in under_way.wait()]
            if failed:
                raise failed.pop()
            self._refuse_failed(told)
            if not self._goes_on(told):
                self._over = True
                return
            if all_dry_at_first:
                self._look_at_first(told)
                filler, all_dry_at_first = self._shared(batch, told), False
            here, batch = batch, None
            if here is not None:
                filler = here.batch
                batch = _next(fetched, failed)
            elif self.recipe.uneven == "pad":
                here = _next(again, failed)
            under_way = self._announce(batch, failed)
            self._count(told)
            yield with_samples(filler if here is None else here.batch, 0 if here is None else here.samples)

    def _fetched(self, layers: list[StreamLayer]) -> Iterator[Collated]:
        """Yield this rank's batches of what is left after `layers`, whatever they count later."""
        return self._fetcher_of(layers).run((self.epoch,), self.step, lambda _step: "")

    def _fetcher_of(self, layers: list[StreamLayer]) -> BatchFetcher:
        layers = [layer.now() for layer in layers]
        if self._fetcher is None or self._fetcher[0] != layers:
            options = replace(
                self._fetch,
                collate_fn=Collating(self._fetch.collate_fn),
                worker_init_fn=PrepareWorker(self._fetch.worker_init_fn),
            )
            stream = Stream(self.dataset, RankReader(self.rank, layers))
            more = {"batch_size": self.recipe.batch_size, "drop_last": self.recipe.uneven == "drop"}
            self._fetcher = layers, BatchFetcher(stream, options, self.rank, self.recipe.seed, **more)
        return self._fetcher[1]

    def _again(self, before: list[StreamLayer]) -> Iterator[Collated]:
        """Yield this rank's batches from the first of the layer under way on, over and over; none if it has none."""
        while True:
            some = False
            for batch in self._fetched([*before, self._new_layer()]):
                some = True
                yield batch
            if not some:
                return

    def _announce(self, batch: Collated | None, failed: list[DataError]) -> RowsUnderWay:
        told = _NOTHING if batch is None else Announced(1, batch.worker, batch.samples, batch.first)
        if failed:
            told = Announced(FAILED, 0, 0, 0)
        return gather_rows_ahead(torch.tensor(told, dtype=torch.int64), self.group)

    def _refuse_failed(self, told: list[Announced]) -> None:
        failed = [rank for rank, each in enumerate(told) if each.has == FAILED]
        if failed:
            raise DataError(
                f"rank {failed[0]} could not load its batch {self.step} of epoch {self.epoch}",
                rank=failed[0],
                remedy="look at the output of that rank: the error there is the cause",
            )

    def _goes_on(self, told: list[Announced]) -> bool:
        """Return whether there is one more step, by the policy."""
        some, every = any(each.has for each in told), all(each.has for each in told)
        if self.recipe.uneven == "error" and some and not every:
            dry = [rank for rank, each in enumerate(told) if not each.has]
            raise UnevenData(
                f"after {self.step} steps of epoch {self.epoch} rank {dry[0]} has no batch, and others have",
                rank=dry[0],
                remedy="use uneven='join' (every sample once), or 'truncate', 'drop' or 'pad'",
            )
        return every if self.recipe.uneven in ("truncate", "drop") else some

    def _look_at_first(self, told: list[Announced]) -> None:
        """Warn where the ranks' streams are not what they are said to be."""
        firsts = [each.first for each in told if each.has and each.worker == 0 and each.first]
        if self.rank or len(firsts) < 2 or self.step:
            return
        if self.recipe.shares is None and len(set(firsts)) == 1:
            log.warning(
                "all ranks' streams begin with the same sample: if they are the same, every sample is used %d "
                "times; split them by rank, or let the loader deal them (stream='whole')",
                self.ranks,
            )
        if self.recipe.shares is not None and len(set(firsts)) > 1:
            log.warning(
                "ranks read different streams, of which each keeps its part only: the rest is never used; "
                "with stream='whole' every rank must read the same samples in the same order"
            )

    def _shared(self, batch: Collated | None, told: list[Announced]) -> Any:
        """Return a batch of another rank, where this rank has none at the first step; all ranks take part."""
        if all(each.has for each in told):
            return None
        source = next(rank for rank, each in enumerate(told) if each.has)
        box: list[Any] = [None, ""]
        if batch is not None and self.rank == source:
            box = [batch.batch, ""]
            try:
                pickle.dumps(batch.batch)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for this one
                box = [None, f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(box, group=self.group, group_src=source)
        if box[1]:
            dry = [rank for rank, each in enumerate(told) if not each.has]
            raise DataError(
                f"rank {dry[0]} has no sample, and the batch that is to fill its place can't be sent: {box[1]}",
                rank=source,
                remedy="let collate_fn return what pickle can write, or give every rank a sample",
            )
        return box[0]

    def _count(self, told: list[Announced]) -> None:
        """Take note of what all ranks use in this step."""
        self.step += 1
        layer = self._layers[-1]
        for taken, each in zip(layer.taken, told, strict=True):
            if each.has:
                taken[each.worker] = taken.get(each.worker, 0) + each.samples


def _next(fetched: Iterator[Collated], failed: list[DataError]) -> Collated | None:
    try:
        return next(fetched, None)
    except DataError as error:
        failed.append(error)
        return None


_SENTENCES = {
    "join": "every sample is used once; a rank that runs dry takes part without data until all have",
    "truncate": "the epoch ends where the first rank runs dry; what the others have left is never used",
    "drop": "the epoch ends where the first rank has no full batch; what is left is never used",
    "pad": "the epoch ends where the last rank runs dry; the others repeat their own samples until then",
    "error": "every sample is used once; that one rank runs dry before another is an error",
}
