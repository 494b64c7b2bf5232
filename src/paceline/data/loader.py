"""`Loader`: serves every rank its part of the data, with the same number of steps on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset

from paceline._core.step_state import step_state, wait_counters
from paceline.data.dataloader_workers import LoaderOptions
from paceline.data.iterable_loader import IterableLoader, StreamSettings
from paceline.data.leaf_random import LeafPlace, between_steps_seed, seed_generators, seed_leaf
from paceline.data.loader_arguments import (
    Dealing,
    check_movable,
    check_stream,
    check_unmoved,
    check_virtual,
    length_of,
    measured_shares,
    stream_shares,
)
from paceline.data.loader_steps import LoaderSteps
from paceline.data.map_loader import MapLoader
from paceline.data.map_loader_state import DispatchSettings
from paceline.data.rank_place import RankPlace
from paceline.data.resumable_batch_indices import SampleOrder, ShuffleMode
from paceline.data.sampling.block_dispatch import DispatchScheme
from paceline.data.sampling.uneven_policies import UnevenPolicy
from paceline.errors import UsageError, unknown
from paceline.world.control_collectives import rank_and_size, verify_same
from paceline.world.mesh_groups import group_of_mesh

__all__ = ["Loader"]

log = logging.getLogger("paceline.data")

_SHUFFLE_MODES: dict[Any, ShuffleMode] = {True: "samples", False: "none", "blocks": "blocks"}
_SAME_DATA = "give every rank the same whole dataset, the same arguments and the same state"


class Loader:
    """Batches of a dataset for this rank; all ranks make the same number of steps, however uneven their data.

    Built on ``torch.utils.data.DataLoader``, whose options of the same names it accepts. Every rank passes the same
    dataset; the loader assigns each sample to one rank, in another order each epoch. A batch is the result of
    `collate_fn`, with one more attribute: ``batch.samples``, its number of samples. A rank that has run out of data
    gets a placeholder batch with ``samples == 0``: ``model.backward(loss, samples=batch.samples)`` is exact all the
    same.

    With `virtual_ranks` the same training run can use any number of ranks: samples are assigned to virtual ranks, and
    in each step a rank gets a batch for every one that it computes. The last of them has ``batch.ends_step`` True;
    without virtual ranks, all have. While it serves, such a loader owns the process's global random number generators:
    it seeds them for every batch, so that dropout and augmentation don't depend on the number of ranks or workers
    either. Lengths and positions count steps. A position taken between two batches of a step is that before the step.

    `steps` serves the same batches by optimizer step. With it, a loader goes on with other ranks in `paceline.Elastic`.

    At the start of every epoch the ranks compare what they are about to serve, with one small gather.

    Args:
        dataset: map-style (``__len__`` and ``__getitem__``), or a ``torch.utils.data.IterableDataset``.
        batch_size: samples of a rank's full batch; with ``uneven="rebalance"`` the mean over ranks.
        dispatch: ``"round_robin"`` assigns blocks in turns, ``"random"`` draws, ``"shares"`` takes turns by shares.
        block: consecutive samples that are assigned together.
        shares: of each rank (with virtual ranks: of each of these), with sum 1; None: equal ones; ``"measured"``: in
            proportion to each rank's throughput, measured while training, with batch sizes in proportion.
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
        virtual_ranks: ranks to which samples are assigned, whatever the number of real ranks, which is at most that;
            each real rank computes consecutive ones. None: the real ranks themselves.
        group: process group of the ranks, or the data axis of a device mesh; None: all. Of a mesh of two axes, all
            its ranks.

    Raises:
        UsageError: an argument is invalid, the dataset is empty, the shares do not match the ranks, or there are fewer
            virtual ranks than ranks.
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
        virtual_ranks: int | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        self.dataset, self.uneven, self.virtual_ranks = dataset, uneven, virtual_ranks
        self.group = group_of_mesh(group) if isinstance(group, DeviceMesh) else group
        rank, ranks = rank_and_size(self.group)
        if rank < 0:
            raise UsageError(
                "this process is not in the group", remedy="create the Loader on its members only"
            )
        if not isinstance(shuffle, bool | str) or shuffle not in _SHUFFLE_MODES:
            raise unknown("shuffle", shuffle, ["True", "False", "'blocks'"])
        if not isinstance(seed, int):
            raise UsageError(f"seed={seed!r}", remedy="pass a whole number, the same on every rank")
        self._place = RankPlace(rank, ranks, virtual_ranks)
        if virtual_ranks is not None:
            check_virtual(shares, redeal_every)
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
        self._dealing = Dealing(dispatch, block, shares, uneven, seed, batch_size)
        self._arguments = redeal_every, stream, shuffle, options
        self._opened = self._open()
        self._moved: Mapping[str, Any] | None = None  # the position after a move, until it is used
        self._iteration = 0
        self._logged = False

    def _open(self) -> MapLoader | IterableLoader:
        open_source = self._open_stream if isinstance(self.dataset, IterableDataset) else self._open_map
        with self._place.naming_virtual_ranks():
            return open_source(*self._arguments)

    @property
    def _source(self) -> MapLoader | IterableLoader:
        """What serves the batches of the present ranks."""
        if self._moved is not None:
            self._place = RankPlace(*rank_and_size(self.group), self.virtual_ranks)
            opened = self._open()
            assert isinstance(opened, MapLoader), "others don't move"
            with self._place.naming_virtual_ranks():
                opened.load(self._moved, moved=True)
            self._opened, self._moved, self._logged = opened, None, False
        return self._opened

    def _open_stream(
        self,
        redeal_every: int | None,
        stream: Literal["own", "whole"] | None,
        shuffle: bool | Literal["blocks"],
        options: LoaderOptions,
    ) -> IterableLoader:
        dealing = self._dealing
        measured_shares(dealing.shares, dealing.uneven, redeal_every)  # validated
        check_stream(stream, dealing, self._place, shuffle)
        settings = StreamSettings(
            shares=stream_shares(dealing, self._place.served) if stream == "whole" else None,
            block=dealing.block,
            scheme=dealing.scheme,
            seed=dealing.seed,
            batch_size=dealing.batch_size,
            uneven=dealing.uneven,
        )
        return IterableLoader(self.dataset, settings, self._place, self.group, options)

    def _open_map(
        self,
        redeal_every: int | None,
        stream: Literal["own", "whole"] | None,
        shuffle: bool | Literal["blocks"],
        options: LoaderOptions,
    ) -> MapLoader:
        dealing = self._dealing
        measured = measured_shares(dealing.shares, dealing.uneven, redeal_every)
        if stream is not None:
            raise UsageError(f"stream={stream!r} with a map-style dataset", remedy="leave stream out")
        samples = length_of(self.dataset)
        block, mode = dealing.block, _SHUFFLE_MODES[shuffle]
        policy: UnevenPolicy = dealing.uneven if measured is None else "rebalance"
        return MapLoader(
            self.dataset,
            SampleOrder(samples, mode, block if shuffle == "blocks" else 1, dealing.seed),
            DispatchSettings(
                dealing.shares_of(samples, self._place.served),
                block,
                dealing.scheme,
                dealing.batch_size,
                policy,
            ),
            place=self._place,
            group=self.group,
            options=options,
            measured=measured,
        )

    # ------------------------------------------------------------------ batches

    def __iter__(self) -> Generator[Any, None, None]:
        """Start the rest of the epoch, or the next one; all ranks do this together.

        Raises:
            MismatchError: ranks are about to serve different data; names the first difference and the ranks.
        """
        source = self._source
        check_unmoved(self._place, *rank_and_size(self.group))
        self._iteration += 1
        with self._place.naming_virtual_ranks():
            source.begin()
        if self._place.ranks > 1:  # on one rank, listing the facts would cost more than everything else here
            verify_same(source.facts(), "the loader", self.group, remedy=_SAME_DATA)
        if self._place.rank == 0 and not self._logged:
            log.log(logging.INFO if source.lossless else logging.WARNING, "%s", self)
        self._logged = True
        return self._serve(self._iteration)

    def steps(self, epochs: int = 1) -> Iterator[Iterator[Any]]:
        """Yield, for each step up to the end of epoch ``epochs - 1``, an iterator over this rank's batches of the step.

        It starts from the present position, such as a loaded state, and goes on from the new one where that is moved
        meanwhile: so a step that `Elastic.attempt` gives up is repeated. Each iterator must be used to its end, before
        which nothing is fetched or compared among ranks (of an iterable dataset, the first batch is fetched before).

        Args:
            epochs: number of epochs, counted from the start of the run.

        Raises:
            UsageError: `epochs` is invalid, or the batches of a step were not all used.

        Example:
            >>> loader = Loader(list(range(10)), batch_size=4)
            >>> [[batch.samples for batch in batches] for batches in loader.steps(epochs=2)]
            [[4], [4], [2], [4], [4], [2]]
        """
        if not isinstance(epochs, int) or epochs < 1:
            raise UsageError(f"epochs={epochs!r}", remedy="pass a whole number, 1 or more")
        ahead = isinstance(self.dataset, IterableDataset)
        return LoaderSteps(
            self._continue,
            lambda: self._iteration,
            lambda: self._source.epoch + self._source.over,
            ahead=ahead,
        ).serve(epochs)

    def _continue(self) -> Generator[Any, None, None]:
        """Start an iteration from the present position, even if one from there has started before."""
        self.load_state_dict(self.state_dict())
        return iter(self)

    def _serve(self, iteration: int) -> Generator[Any, None, None]:
        try:
            self._check_iteration(iteration)
            step_state.enter_phase("data")
            for batch, place in self._source.batches():
                wait_counters.samples = batch.samples
                common = self._begin_leaf(place)
                ends_step = common is not None and batch.ends_step
                step_state.enter_phase("outside")
                yield batch
                step_state.enter_phase("data")
                self._check_iteration(iteration)
                if common is not None and ends_step:
                    seed_generators(common)
            step_state.enter_phase("outside")
        finally:
            wait_counters.samples = wait_counters.leaf = None

    def _begin_leaf(self, place: LeafPlace | None) -> int | None:
        """Seed the generators for a leaf; return the seed of what follows its step. Without virtual ranks: None."""
        if place is None or self.virtual_ranks is None:
            return None
        common = between_steps_seed(place.seed, place.epoch, place.step, place.redistributions)
        wait_counters.leaf = self.virtual_ranks, place.leaf, common
        seed_leaf(*place)
        return common

    def _check_iteration(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise UsageError(
                "another iteration of this loader started before this one ended, or its position was changed",
                rank=self._place.rank,
                remedy="create a Loader for each of two loops that run at the same time; leave a loop before loading; "
                "with paceline.Elastic, loop over steps()",
            )
        check_unmoved(self._place, *rank_and_size(self.group))

    def __len__(self) -> int:
        """Return the steps of the present epoch, the same on all ranks; with virtual ranks a step has more batches.

        Raises:
            TypeError: the dataset is iterable.
        """
        return self._source.steps

    @property
    def steps_left(self) -> int | None:
        """Steps of the present epoch that have not ended with the latest batch; None if the dataset is iterable."""
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
        with self._place.naming_virtual_ranks():
            self._source.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON, after any batch; the same on all ranks that have ended the same steps.

        With virtual ranks, a step counts when this rank's last batch of it was served. The position does not depend on
        the number of real ranks, and can be loaded at another one.
        """
        return self._opened.state() if self._moved is None else dict(self._moved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of `state`: the next iteration serves the remaining samples, each once.

        They are assigned to the present ranks, by this loader's batch size, shares and policy.

        Raises:
            UsageError: the state is of another dataset, seed or order, or is invalid.
        """
        self._iteration += 1
        if self._moved is not None:
            self._moved = state
            return
        with self._place.naming_virtual_ranks():
            self._opened.load(state)

    # ------------------------------------------------------------------ other ranks

    def check_rejoin(self) -> None:
        """Check that this loader can move to any number of ranks.

        Raises:
            UsageError: it can't; names the argument.
        """
        check_movable(self.group, isinstance(self.dataset, IterableDataset), self._dealing, self._place)

    def rejoin(self) -> None:
        """Continue on the ranks of the new process group, from the same position.

        Iterations end with an error, except those of `steps`. The rest of the epoch is assigned to the new ranks at its
        next use, which also refuses an invalid state. Measured shares start anew.

        Raises:
            UsageError: this loader can't move, see `check_rejoin`.
        """
        self.check_rejoin()
        self._iteration += 1
        self._moved = self.state_dict()
