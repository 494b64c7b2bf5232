"""`Loader`: serves every rank its part of the data, with the same number of steps on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset

from paceline._core.step_state import step_state, wait_counters
from paceline.data.dataloader_workers import LoaderOptions
from paceline.data.iterable_loader import IterableLoader, StreamSettings
from paceline.data.map_loader import MapLoader
from paceline.data.map_loader_state import DispatchSettings
from paceline.data.measured_shares import MeasuredShares
from paceline.data.resumable_batch_indices import SampleOrder, ShuffleMode
from paceline.data.sampling.block_dispatch import DispatchScheme, dispatch_blocks
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.sampling.uneven_policies import UnevenPolicy, check_batching
from paceline.errors import UsageError, unknown
from paceline.world.control_collectives import rank_and_size, verify_same
from paceline.world.mesh_groups import group_of_mesh

__all__ = ["Loader"]

log = logging.getLogger("paceline.data")

_SHUFFLE_MODES: dict[Any, ShuffleMode] = {True: "samples", False: "none", "blocks": "blocks"}
_SAME_DATA = "give every rank the same whole dataset, the same arguments and the same state"
_NEEDS_LENGTH = "that needs a dataset with a length; use a map-style one, or leave it out"


class Loader:
    """Batches of a dataset for this rank; all ranks make the same number of steps, however uneven their data.

    Built on ``torch.utils.data.DataLoader``, whose options of the same names it accepts. Every rank passes the same
    dataset; the loader assigns each sample to one rank, in another order each epoch. A batch is the result of
    `collate_fn`, with one more attribute: ``batch.samples``, its number of samples. A rank that has run out of data
    gets a placeholder batch with ``samples == 0``: ``model.backward(loss, samples=batch.samples)`` is exact all the
    same.

    At the start of every epoch the ranks compare what they are about to serve, with one small gather.

    Args:
        dataset: map-style (``__len__`` and ``__getitem__``), or a ``torch.utils.data.IterableDataset``.
        batch_size: samples of a rank's full batch; with ``uneven="rebalance"`` the mean over ranks.
        dispatch: ``"round_robin"`` assigns blocks in turns, ``"random"`` draws, ``"shares"`` takes turns by shares.
        block: consecutive samples that are assigned together.
        shares: of each rank, with sum 1; None: equal ones; ``"measured"``: in proportion to each rank's throughput,
            measured while training, with batch sizes in proportion.
        uneven: policy for ranks with unequal amounts of data. ``"join"``: ranks that run out take part without data;
            ``"rebalance"``: batch sizes in proportion to each rank's data; both use every sample once.
            ``"truncate"`` ends when the first rank runs out, ``"drop"`` with its last full batch, ``"pad"``
            repeats samples, ``"error"`` raises.
        seed: of the order of samples and of random assignment.
        shuffle: each epoch: samples (True), whole blocks (``"blocks"``), or nothing (False). Iterable datasets keep
            their own order.
        num_workers: as in torch's DataLoader, like the following ones.
        collate_fn, pin_memory, timeout: as there.
        worker_init_fn, multiprocessing_context, prefetch_factor, persistent_workers: as there.
        redeal_every: with ``shares="measured"``, steps between two updates of the shares; None: between epochs.
        stream: of an iterable dataset: ``"own"``: every rank reads its own stream, split beforehand; ``"whole"``: all
            ranks read the same one, and each keeps its blocks.
        group: process group of the ranks, or the data axis of a device mesh; None: all. Of a mesh of two axes, all
            its ranks.

    Raises:
        UsageError: an argument is invalid, the dataset is empty, or the shares do not match the ranks.
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
        self.group = group_of_mesh(group) if isinstance(group, DeviceMesh) else group
        self._place = rank_and_size(self.group)
        if self._place[0] < 0:
            raise UsageError(
                "this process is not in the group", remedy="create the Loader on its members only"
            )
        if not isinstance(shuffle, bool | str) or shuffle not in _SHUFFLE_MODES:
            raise unknown("shuffle", shuffle, ["True", "False", "'blocks'"])
        if not isinstance(seed, int):
            raise UsageError(f"seed={seed!r}", remedy="pass a whole number, the same on every rank")
        measured = _measured_shares(shares, uneven, redeal_every)
        fixed = RankShares.equal(self._place[1]) if isinstance(shares, str) else shares
        options = LoaderOptions(
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self._source: MapLoader | IterableLoader
        if isinstance(dataset, IterableDataset):
            if measured is not None or shuffle == "blocks":
                option = "shares='measured'" if measured is not None else "shuffle='blocks'"
                raise UsageError(f"{option} with an iterable dataset", remedy=_NEEDS_LENGTH)
            _check_stream(stream, dispatch, block, fixed, batch_size=batch_size, uneven=uneven)
            divided = (
                _stream_shares(dispatch, block, fixed, uneven, self._place[1]) if stream == "whole" else None
            )
            settings = StreamSettings(
                shares=divided, block=block, scheme=dispatch, seed=seed, batch_size=batch_size, uneven=uneven
            )
            self._source = IterableLoader(dataset, settings, self._place, self.group, options)
        else:
            if stream is not None:
                raise UsageError(f"stream={stream!r} with a map-style dataset", remedy="leave stream out")
            samples = _length_of(dataset)
            first = dispatch_blocks(
                samples, self._place[1], block=block, scheme=dispatch, shares=fixed, seed=seed
            )
            policy: UnevenPolicy = uneven if measured is None else "rebalance"
            self._source = MapLoader(
                dataset,
                SampleOrder(samples, _SHUFFLE_MODES[shuffle], block if shuffle == "blocks" else 1, seed),
                DispatchSettings(first.shares, block, dispatch, batch_size, policy),
                place=self._place,
                group=self.group,
                options=options,
                measured=measured,
            )
        self._iteration = 0
        self._logged = False

    # ------------------------------------------------------------------ batches

    def __iter__(self) -> Iterator[Any]:
        """Start the rest of the epoch, or the next one; all ranks do this together.

        Raises:
            MismatchError: ranks are about to serve different data; names the first difference and the ranks.
        """
        if rank_and_size(self.group) != self._place:
            raise UsageError(
                f"this loader was made for rank {self._place[0]} of {self._place[1]}; "
                f"this process is now rank {rank_and_size(self.group)[0]} of {rank_and_size(self.group)[1]}",
                remedy="call paceline.init() before creating a Loader",
            )
        self._iteration += 1
        self._source.begin()
        if self._place[1] > 1:  # on one rank, listing the facts would cost more than everything else here
            verify_same(self._source.facts(), "the loader", self.group, remedy=_SAME_DATA)
        if self._place[0] == 0 and not self._logged:
            log.log(logging.INFO if self._source.lossless else logging.WARNING, "%s", self)
        self._logged = True
        return self._serve(self._iteration)

    def _serve(self, iteration: int) -> Iterator[Any]:
        try:
            self._check_iteration(iteration)
            step_state.enter_phase("data")
            for batch in self._source.batches():
                wait_counters.samples = batch.samples
                step_state.enter_phase("outside")
                yield batch
                step_state.enter_phase("data")
                self._check_iteration(iteration)
            step_state.enter_phase("outside")
        finally:
            wait_counters.samples = None

    def _check_iteration(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise UsageError(
                "another iteration of this loader started before this one ended, or its position was changed",
                rank=self._place[0],
                remedy="create a Loader for each of two loops that run at the same time; leave a loop before loading",
            )

    def __len__(self) -> int:
        """Return the steps of the present epoch, the same on all ranks.

        Raises:
            TypeError: the dataset is iterable.
        """
        return self._source.steps

    @property
    def steps_left(self) -> int | None:
        """Steps of the present epoch after the latest batch; None if the dataset is iterable."""
        return self._source.steps_left

    def __str__(self) -> str:
        """Describe the use of the data."""
        return self._source.describe()

    # ------------------------------------------------------------------ epochs and positions

    @property
    def epoch(self) -> int:
        """Number of the present epoch, counted from 0; every new iteration starts the next one."""
        return self._source.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration serve `epoch` from its start; if the loaded state is within it, the rest.

        So a loop over epochs that starts with the loaded state's serves the rest of that, which may be empty.

        Raises:
            UsageError: a negative number.
        """
        if not isinstance(epoch, int) or epoch < 0:
            raise UsageError(f"epoch {epoch!r}", remedy="epochs are counted from 0")
        self._iteration += 1
        self._source.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON; the same on all ranks, after any batch."""
        return self._source.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of `state`: the next iteration serves the remaining samples, each once.

        They are assigned to the present ranks, by this loader's batch size, shares and policy.

        Raises:
            UsageError: the state is of another dataset, seed or order, or is invalid.
        """
        self._iteration += 1
        self._source.load(state)


def _measured_shares(shares: object, uneven: str, every: int | None) -> MeasuredShares | None:
    if isinstance(shares, str) and shares != "measured":
        raise unknown("shares", shares, ["measured"])
    if shares != "measured":
        if every is not None:
            raise UsageError(f"redeal_every={every!r} without shares='measured'", remedy="leave it out")
        return None
    if uneven not in ("join", "rebalance"):
        raise UsageError(
            f"shares='measured' with uneven={uneven!r}",
            remedy="measured shares need batch sizes in proportion: leave uneven out, or use 'rebalance'",
        )
    if every is not None and (not isinstance(every, int) or every < 1):
        raise UsageError(f"redeal_every={every!r}", remedy="pass a number of steps, 1 or more, or None")
    return MeasuredShares(every)


def _length_of(dataset: Any) -> int:
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


def _check_stream(
    stream: str | None, dispatch: str, block: int, shares: object, *, batch_size: int, uneven: str
) -> None:
    """Raise for options that need a length, or that have no effect if each rank reads its own stream."""
    if stream not in (None, "own", "whole"):
        raise unknown("stream", stream, ["own", "whole"])
    check_batching(batch_size, uneven)
    if uneven == "rebalance":
        raise UsageError("uneven='rebalance' with an iterable dataset", remedy=_NEEDS_LENGTH)
    given = {"dispatch": dispatch != "round_robin", "block": block != 1, "shares": shares is not None}
    for name, is_given in given.items():
        if is_given and stream != "whole":
            raise UsageError(
                f"{name} with an iterable dataset of which every rank reads its own stream",
                remedy="let the loader divide one stream that all ranks read (stream='whole'), or leave it out",
            )


def _stream_shares(
    dispatch: DispatchScheme,
    block: int,
    shares: Sequence[float] | RankShares | None,
    uneven: UnevenPolicy,
    ranks: int,
) -> RankShares:
    """Return the shares of a stream that all ranks read."""
    found = dispatch_blocks(0, ranks, block=block, scheme=dispatch, shares=shares).shares
    if uneven in ("truncate", "drop", "pad") and 0 in found.parts:
        rank = found.parts.index(0)
        raise UsageError(
            f"the share of rank {rank} is 0, and uneven={uneven!r} requires samples on every rank",
            rank=rank,
            remedy="use uneven='join', or a share above 0",
        )
    return found
