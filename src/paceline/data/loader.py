"""`Loader`: serves every rank its part of the data, so that no rank waits for one that will not come."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset

from paceline._core.step_state import step_state, wait_counters
from paceline.data.epoch_plan import SampleOrder, ShuffleMode
from paceline.data.iterable_loader import IterableLoader, StreamSettings
from paceline.data.loader_position import DispatchSettings
from paceline.data.map_loader import Learning, MapLoader
from paceline.data.sampling.block_dispatch import DispatchScheme, dispatch_blocks
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.sampling.uneven_policies import UnevenPolicy, check_batching
from paceline.data.torch_dataloader import LoaderOptions
from paceline.errors import UsageError, unknown
from paceline.world.object_collectives import place_in, verify_same

__all__ = ["Loader"]

log = logging.getLogger("paceline.data")

_MODES: dict[Any, ShuffleMode] = {True: "samples", False: "none", "blocks": "blocks"}


class Loader:
    """Batches of a dataset for this rank; all ranks make the same number of steps, whatever they have.

    Built on ``torch.utils.data.DataLoader``, whose options of the same names it takes. Every rank is given the
    same dataset; the loader deals its samples, each to one rank, in another order each epoch. A batch is what
    `collate_fn` made, with one attribute more: ``batch.samples``, the number of its samples. A rank that ran dry
    gets a batch with ``samples == 0`` that only fills the place: ``model.backward(loss,
    samples=batch.samples)`` is exact all the same.

    At the start of every epoch the ranks compare what they are about to serve, with one small gather.

    Args:
        dataset: map-style (``__len__`` and ``__getitem__``), or a ``torch.utils.data.IterableDataset``.
        batch_size: samples of a rank's full batch; with ``uneven="rebalance"`` the mean over ranks.
        dispatch: ``"round_robin"`` deals blocks in turns, ``"random"`` by chance, ``"shares"`` in turns by shares.
        block: consecutive samples dealt together.
        shares: of each rank, 1 in all; None: equal ones; ``"measured"``: in proportion to how fast each rank is,
            learnt while training, its batches as large as its share.
        uneven: what happens where ranks have unequal amounts. ``"join"``: ranks that ran dry take part without
            data; ``"rebalance"``: batches as large as each rank's amount asks; both use every sample once.
            ``"truncate"`` ends with the first rank that runs dry, ``"drop"`` with its last full batch, ``"pad"``
            repeats samples, ``"error"`` refuses.
        seed: decides the order of samples and random dealing.
        shuffle: another order each epoch: of samples (True), of whole blocks (``"blocks"``), or none (False).
            Iterable datasets have the order that they have.
        num_workers: as in torch's DataLoader, as are the next ones.
        collate_fn, pin_memory, timeout: as there.
        worker_init_fn, multiprocessing_context, prefetch_factor, persistent_workers: as there.
        redeal_every: with ``shares="measured"``, steps between two looks at the speeds; None: between epochs.
        stream: of an iterable dataset: ``"own"``: every rank reads its own stream, split before; ``"whole"``: all
            ranks read the same one, and each keeps its blocks.
        group: the ranks, as a process group or the data axis of a device mesh; None: all.

    Raises:
        UsageError: a value that makes no sense, an empty dataset, shares that do not fit.
        UnevenData: the policy is ``"error"``, and ranks have unequal numbers of batches.

    Example:
        >>> loader = Loader(list(range(10)), batch_size=4)
        >>> [batch.samples for batch in loader]
        [4, 4, 2]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 64,
        *,
        dispatch: DispatchScheme = "round_robin",
        block: int = 1,
        shares: Sequence[float] | Literal["measured"] | None = None,
        uneven: UnevenPolicy = "join",
        seed: int = 0,
        shuffle: bool | Literal["blocks"] = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        redeal_every: int | None = None,
        stream: Literal["own", "whole"] | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        self.dataset, self.uneven = dataset, uneven
        self.group = group.get_group() if isinstance(group, DeviceMesh) else group
        self._place = place_in(self.group)
        if self._place[0] < 0:
            raise UsageError("this process is not in the group", remedy="make the Loader on its members only")
        _check_said(shuffle, seed, shares)
        fetch = LoaderOptions(
            num_workers,
            collate_fn,
            pin_memory,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            prefetch_factor,
            persistent_workers,
        )
        learning = _learning(shares, uneven, redeal_every)
        fixed = RankShares.equal(self._place[1]) if isinstance(shares, str) else shares
        self._course: MapLoader | IterableLoader
        if isinstance(dataset, IterableDataset):
            if learning is not None or shuffle == "blocks":
                what = "shares='measured'" if learning is not None else "shuffle='blocks'"
                raise UsageError(f"{what} with an iterable dataset", remedy=_NEEDS_LENGTH)
            recipe = _stream_recipe(stream, dispatch, block, fixed, seed, batch_size, uneven, self._place[1])
            self._course = IterableLoader(dataset, recipe, self._place, self.group, fetch)
        else:
            if stream is not None:
                raise UsageError(f"stream={stream!r} with a map-style dataset", remedy="leave stream out")
            samples = _length_of(dataset)
            row = SampleOrder(samples, _MODES[shuffle], block if shuffle == "blocks" else 1, seed)
            dealing = dispatch_blocks(
                samples, self._place[1], block=block, scheme=dispatch, shares=fixed, seed=seed
            )
            cut: UnevenPolicy = uneven if learning is None else "rebalance"
            recipe = DispatchSettings(dealing.shares, block, dispatch, batch_size, cut)
            self._course = MapLoader(dataset, row, recipe, self._place, self.group, fetch, learning)
        self._iteration = 0
        self._told = False

    # ------------------------------------------------------------------ batches

    def __iter__(self) -> Iterator[Any]:
        """Begin what is left of the epoch, or the next one; all ranks do this together.

        Raises:
            MismatchError: ranks are about to serve different data; names the first difference and the ranks.
        """
        if place_in(self.group) != self._place:
            raise UsageError(
                f"this loader was made for rank {self._place[0]} of {self._place[1]}; "
                f"this process is now rank {place_in(self.group)[0]} of {place_in(self.group)[1]}",
                remedy="call paceline.init() before making a Loader",
            )
        self._iteration += 1
        self._course.begin()
        if self._place[1] > 1:  # alone, listing the facts would cost more than all else here
            verify_same(self._course.facts(), "the loader", self.group, remedy=_SAME_DATA)
        self._tell()
        return self._served(self._iteration)

    def _served(self, iteration: int) -> Iterator[Any]:
        try:
            if iteration != self._iteration:
                raise self._left_behind()
            step_state.enter_phase("data")
            for batch in self._course.batches():
                wait_counters.samples = batch.samples
                step_state.enter_phase("outside")
                yield batch
                step_state.enter_phase("data")
                if iteration != self._iteration:
                    raise self._left_behind()
            step_state.enter_phase("outside")
        finally:
            wait_counters.samples = None

    def _left_behind(self) -> UsageError:
        return UsageError(
            "another iteration of this loader began before this one ended, or it was sent to another place",
            rank=self._place[0],
            remedy="make a Loader for each of two loops that run at the same time; leave a loop before loading",
        )

    def _tell(self) -> None:
        """Say once what becomes of the data: aloud where something is lost, repeated or idle."""
        if self._place[0] == 0 and not self._told:
            log.log(logging.INFO if self._course.harmless else logging.WARNING, "%s", self)
        self._told = True

    def __len__(self) -> int:
        """Return the steps of the epoch under way, the same on all ranks.

        Raises:
            TypeError: the dataset is iterable.
        """
        return self._course.steps

    def __str__(self) -> str:
        """Tell what becomes of the data."""
        return self._course.tell()

    # ------------------------------------------------------------------ epochs and positions

    @property
    def epoch(self) -> int:
        """Number of the epoch under way, counted from 0; every new iteration begins the next one."""
        return self._course.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration serve `epoch` from its beginning; from the loaded state, where that is in it.

        So a loop over epochs that begins with the loaded state's serves what was left of that: maybe nothing.

        Raises:
            UsageError: a negative number.
        """
        if not isinstance(epoch, int) or epoch < 0:
            raise UsageError(f"epoch {epoch!r}", remedy="epochs are counted from 0")
        self._iteration += 1
        self._course.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader stands, as plain JSON; the same on all ranks, after any batch."""
        return self._course.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go where `state` stands: the next iteration serves what was left, each sample once.

        What is left is dealt to the present ranks, by this loader's batch size, shares and policy.

        Raises:
            UsageError: a state of another dataset, seed or order, or a damaged one.
        """
        self._iteration += 1
        self._course.load(state)


_SAME_DATA = "give every rank the same whole dataset, the same arguments and the same state"
_NEEDS_LENGTH = "that needs a dataset with a length; use a map-style one, or leave it out"


def _check_said(shuffle: object, seed: object, shares: object) -> None:
    if not isinstance(shuffle, bool | str) or shuffle not in _MODES:
        raise unknown("shuffle", shuffle, ["True", "False", "'blocks'"])
    if not isinstance(seed, int):
        raise UsageError(f"seed={seed!r}", remedy="pass a whole number, the same on every rank")
    if isinstance(shares, str) and shares != "measured":
        raise unknown("shares", shares, ["measured"])


def _learning(shares: object, uneven: str, every: int | None) -> Learning | None:
    if shares != "measured":
        if every is not None:
            raise UsageError(f"redeal_every={every!r} without shares='measured'", remedy="leave it out")
        return None
    if uneven not in ("join", "rebalance"):
        raise UsageError(
            f"shares='measured' with uneven={uneven!r}",
            remedy="learnt shares come with batches in proportion: leave uneven out, or use 'rebalance'",
        )
    if every is not None and (not isinstance(every, int) or every < 1):
        raise UsageError(f"redeal_every={every!r}", remedy="pass a number of steps, 1 or more, or None")
    return Learning(every)


def _length_of(dataset: Any) -> int:
    """Return the number of samples.

    Raises:
        UsageError: there are none, or it can't be told.
    """
    try:
        samples = len(dataset)
    except TypeError as error:
        raise UsageError(
            f"a dataset of type {type(dataset).__qualname__} has no length",
            remedy="pass one with __len__ and __getitem__, or a torch.utils.data.IterableDataset",
        ) from error
    if samples < 1:
        raise UsageError("the dataset is empty", remedy="pass one with at least one sample")
    return samples


def _stream_recipe(
    stream: str | None,
    dispatch: DispatchScheme,
    block: int,
    shares: Sequence[float] | RankShares | None,
    seed: int,
    batch_size: int,
    uneven: UnevenPolicy,
    ranks: int,
) -> StreamSettings:
    """Return how an iterable dataset is dealt and cut.

    Raises:
        UsageError: options that need a length, or that a stream for each rank has no use for.
    """
    if stream not in (None, "own", "whole"):
        raise unknown("stream", stream, ["own", "whole"])
    check_batching(batch_size, uneven)
    if uneven == "rebalance":
        raise UsageError("uneven='rebalance' with an iterable dataset", remedy=_NEEDS_LENGTH)
    if stream == "whole":
        dealt = dispatch_blocks(0, ranks, block=block, scheme=dispatch, shares=shares, seed=seed).shares
        if uneven in ("truncate", "drop", "pad") and 0 in dealt.parts:
            rank = dealt.parts.index(0)
            raise UsageError(
                f"the share of rank {rank} is 0, and uneven={uneven!r} asks for samples on every rank",
                rank=rank,
                remedy="use uneven='join', or a share above 0",
            )
        return StreamSettings(dealt, block, dispatch, seed, batch_size, uneven)
    given = {"dispatch": dispatch != "round_robin", "block": block != 1, "shares": shares is not None}
    for name, is_given in given.items():
        if is_given:
            raise UsageError(
                f"{name} with an iterable dataset of which every rank reads its own stream",
                remedy="let the loader deal one stream that all ranks read (stream='whole'), or leave it out",
            )
    return StreamSettings(None, 1, "round_robin", seed, batch_size, uneven)
