"""Collectives among the ranks of one host, through memory that they share.

Phases of every collective:

    1. post a notice: what is called, where the data lie; small data travel with it
    2. meet: from here on everybody may read everybody's data
    3. take: combine or copy what the others show, in place where the data lie in the arena
    4. meet again, where others read or write this rank's own tensor

Three routes through them, chosen alike by all ranks from all notices:

    small    up to 32 KiB: copied into the board before the first meeting, which is the only one
    direct   all data lie in arenas: read where they are; nothing is copied on the way
    windows  anything else: shown part by part through a window that stays in the cache

All-reduce, direct (rank r of N): reduce the r-th slice of all ranks into the own tensor, block by block,
and write each block into the others' tensors while it is in the cache: about the memory traffic of one copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.backends import futex
from paceline.backends.arena import Arena, Segment
from paceline.backends.board import SMALL_NBYTES, WINDOW_NBYTES, Board, Failure, Notice
from paceline.backends.call import Call
from paceline.backends.neighbours import Card, Neighbours
from paceline.backends.reduction import Reduction, Scratch, blocks
from paceline.errors import CollectiveError, CollectiveTimeout, MismatchError, PeerLost

__all__ = ["HostGroup", "span"]

_LOOK_SECONDS = 0.1
_ALIGN_NUMEL = 64  # slices start at cache lines for every dtype

Reader = Callable[[int, int], torch.Tensor]
"""``reader(source, target)``: the elements that rank `source` shows to rank `target`."""


@dataclass(frozen=True)
class Part:
    """Elements `low` to `high` of every piece, and how to read them."""

    low: int
    high: int
    read: Reader


def span(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Return first and one-past-last element of slice `index` of `parts`; slices may be empty.

    Example:
        >>> [span(100, 2, index) for index in (0, 1)]
        [(0, 64), (64, 100)]
    """
    length = -(-numel // (parts * _ALIGN_NUMEL)) * _ALIGN_NUMEL
    return min(index * length, numel), min((index + 1) * length, numel)


class HostGroup:
    """The ranks of a group on this host; `index` counts them, and everything here is in that order.

    Calls block, and are made in the same order by all ranks. Tensors are contiguous and on the CPU.

    Args:
        neighbours: the connections to the others. board: the shared board. arena: this process's arena.
        timeout: seconds that a call waits for a rank.
        patience: seconds to look again and again before sleeping; 0 where ranks share cores.
    """

    ops = frozenset(
        {"barrier", "all_reduce", "reduce", "reduce_scatter", "all_gather"}
        | {"gather", "broadcast", "scatter", "all_to_all"}
    )

    def __init__(
        self, neighbours: Neighbours, board: Board, arena: Arena, timeout: float, patience: float
    ) -> None:
        self.index, self.size = board.index, board.size
        self.timeout = timeout
        self.board = board
        self._neighbours, self._arena, self._patience = neighbours, arena, patience
        self._turn = 0
        self._told: set[int] = set()
        self._segments: dict[tuple[int, int], Segment] = {}
        self._scratch = Scratch()
        self._failure: Exception | None = None
        self._left = False
        self._call, self._limit = Call("barrier"), timeout

    # The collectives.

    def barrier(self, call: Call) -> None:
        """Return when all ranks have called."""
        self._begin(call, Notice(call.packed()))

    def all_reduce(self, call: Call, tensor: torch.Tensor, how: Reduction, ranks: int) -> None:
        """Reduce `tensor` over all ranks, in place; a mean divides by `ranks`."""
        flat = tensor.view(-1)
        if tensor.nbytes <= SMALL_NBYTES:
            for part in self._parts(call, [flat], range(self.size), shared=True):
                how([part.read(rank, 0) for rank in range(self.size)], flat, 0, self._scratch, ranks)
            return
        notices = self._begin(call, self._notice(call, [flat]))
        mixed = any(notice.call != notices[self.index].call for notice in notices)  # means and sums
        shared = how.as_sum() if mixed else how
        if all(notice.segment >= 0 for notice in notices):
            tensors = [
                self._region(rank, notice, flat.numel(), flat.dtype) for rank, notice in enumerate(notices)
            ]
            tensors[self.index] = flat
            self._all_reduce_direct(tensors, shared, ranks)
            self._meet()
        else:
            self._all_reduce_windows(flat, shared, ranks)
        if shared is not how:
            flat.div_(ranks)

    def _all_reduce_direct(self, tensors: list[torch.Tensor], how: Reduction, ranks: int) -> None:
        low, high = span(tensors[0].numel(), self.size, self.index)
        if low == high:
            return
        for block in blocks([tensor[low:high] for tensor in tensors]):
            own = block[self.index]
            how(block, own, self.index, self._scratch, ranks)
            for rank, other in enumerate(block):
                if rank != self.index:
                    other.copy_(own)

    def _all_reduce_windows(self, flat: torch.Tensor, how: Reduction, ranks: int) -> None:
        """Show part t, meet, reduce the own slice of it, and take the others' results of part t − 1."""
        step = WINDOW_NBYTES // flat.element_size()
        previous: list[torch.Tensor] = []
        number = 0
        for number, part in enumerate(flat.split(step)):
            slices = [part[slice(*span(part.numel(), self.size, rank))] for rank in range(self.size)]
            window = self.board.window(self.index, number, part.numel(), flat.dtype)
            for rank in range(self.size):
                if rank != self.index:
                    window[slice(*span(part.numel(), self.size, rank))].copy_(slices[rank])
            self._meet()
            own = slices[self.index]
            low, high = span(part.numel(), self.size, self.index)
            if low < high:
                shown = [
                    own
                    if rank == self.index
                    else self.board.window(rank, number, part.numel(), flat.dtype)[low:high]
                    for rank in range(self.size)
                ]
                result = self.board.result(self.index, number, high - low, flat.dtype)
                for *inputs, mine, out in blocks([*shown, own, result]):
                    how(inputs, mine, self.index, self._scratch, ranks)
                    out.copy_(mine)
            self._take_results(number - 1, previous)
            previous = slices
        self._meet()
        self._take_results(number, previous)

    def _take_results(self, number: int, slices: list[torch.Tensor]) -> None:
        for rank, own in enumerate(slices):
            if rank != self.index and own.numel():
                own.copy_(self.board.result(rank, number, own.numel(), own.dtype))

    def reduce(self, call: Call, tensor: torch.Tensor, root: int, how: Reduction, ranks: int) -> None:
        """Reduce `tensor` over all ranks into that of `root`; the others' stay as they are."""
        flat = tensor.view(-1)
        for part in self._parts(call, [flat], range(self.size), shared=True):
            if self.index == root:
                inputs = [part.read(rank, 0) for rank in range(self.size)]
                for *block, out in blocks([*inputs, flat[part.low : part.high]]):
                    how(block, out, root, self._scratch, ranks)

    def reduce_scatter(
        self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor], how: Reduction, ranks: int
    ) -> None:
        """Reduce ``inputs[r]`` over all ranks into the `output` of rank r."""
        flat = output.view(-1)
        for part in self._parts(call, _flat(inputs), range(self.size)):
            shown = [part.read(rank, self.index) for rank in range(self.size)]
            mine = flat[part.low : part.high]
            alias = next((rank for rank, each in enumerate(shown) if each.data_ptr() == mine.data_ptr()), 0)
            for *block, out in blocks([*shown, mine]):
                how(block, out, alias, self._scratch, ranks)

    def all_gather(self, call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Copy the `tensor` of every rank r into ``outputs[r]`` on all ranks."""
        self._collect(call, outputs, tensor, True)

    def gather(self, call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        """Copy the `tensor` of every rank r into ``outputs[r]`` on `root`; elsewhere `outputs` is empty."""
        self._collect(call, outputs, tensor, self.index == root)

    def _collect(
        self, call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, takes: bool
    ) -> None:
        mine = _bytes(tensor)
        places = [_bytes(output) for output in outputs]
        for part in self._parts(call, [mine], range(self.size), shared=True):
            for distance in range(
                self.size if takes else 0
            ):  # the next one first: not all at the same source
                rank = (self.index + distance) % self.size
                _copy(places[rank][part.low : part.high], part.read(rank, 0))

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> None:
        """Copy `tensor` from `root` to all ranks."""
        mine = _bytes(tensor)
        for part in self._parts(call, [mine], [root], shared=True):
            if self.index != root:
                _copy(mine[part.low : part.high], part.read(root, 0))

    def scatter(self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
        """Copy ``inputs[r]`` of `root` into the `output` of rank r; elsewhere `inputs` is empty."""
        mine = _bytes(output)
        shown = [_bytes(each) for each in inputs] if self.index == root else [mine] * self.size
        for part in self._parts(call, shown, [root]):
            _copy(mine[part.low : part.high], part.read(root, self.index))

    def all_to_all(self, call: Call, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Copy ``inputs[r]`` of every rank q into ``outputs[q]`` of rank r; sizes may differ.

        Raises:
            MismatchError: a rank sends another size than its receiver expects (raised by all ranks).
        """
        shown, places = [_bytes(each) for each in inputs], [_bytes(each) for each in outputs]
        longest = self._agree_on_sizes(call, shown, places)
        for part in self._parts(call, shown, range(self.size), longest=longest):
            for distance in range(self.size):
                rank = (self.index + distance) % self.size
                place = places[rank][part.low : part.high]
                _copy(place, part.read(rank, self.index)[: place.numel()])

    def _agree_on_sizes(
        self, call: Call, shown: Sequence[torch.Tensor], places: Sequence[torch.Tensor]
    ) -> int:
        """Compare what everybody sends with what everybody expects; return the longest piece."""
        mine = torch.tensor([[each.numel() for each in shown], [each.numel() for each in places]])
        table = torch.empty(self.size, 2, self.size, dtype=torch.int64)
        flat = mine.view(-1)
        for part in self._parts(call.about("sizes", flat), [flat], range(self.size), shared=True):
            for rank in range(self.size):
                table[rank].view(-1)[part.low : part.high].copy_(part.read(rank, 0))
        sent, expected = table[:, 0], table[:, 1].T
        wrong = (sent != expected).nonzero().tolist()
        if wrong:
            source, target = wrong[0]
            raise MismatchError(
                f"{call}: rank {source} sends {sent[source, target]} bytes to rank {target}, which expects "
                f"{expected[source, target]} (ranks counted on this host)",
                remedy="give input splits of each rank that equal the output splits of the receivers",
            )
        return int(table.max())

    # The three routes.

    def _parts(
        self,
        call: Call,
        pieces: Sequence[torch.Tensor],
        sources: Sequence[int],
        *,
        shared: bool = False,
        longest: int | None = None,
    ) -> Iterator[Part]:
        """Show `pieces` and yield, part by part, what all `sources` show.

        Args:
            call: what all ranks call.
            pieces: one 1-D tensor per target rank, or, if `shared`, one for all.
            sources: the ranks whose pieces are read.
            shared: there is one piece.
            longest: elements of the longest piece anywhere, where pieces differ in size.
        """
        uneven = longest is not None
        length = pieces[0].numel() if longest is None else longest
        itemsize = pieces[0].element_size()
        mine = self.index in sources
        if len(pieces) * length * itemsize <= SMALL_NBYTES and not uneven:
            yield self._small(call, pieces, length, mine)
            return
        notice = self._notice(call, pieces if mine and not uneven else [])
        notices = self._begin(call, notice)
        if all(notices[rank].segment >= 0 for rank in sources):
            yield self._direct(pieces, sources, notices, shared)
            self._meet()
            return
        yield from self._windows(pieces, length, mine)

    def _small(self, call: Call, pieces: Sequence[torch.Tensor], length: int, mine: bool) -> Part:
        dtype, numel = pieces[0].dtype, len(pieces) * length
        if mine:
            place = self.board.small(self.index, self._turn, numel, dtype)
            for target, piece in enumerate(pieces):
                place[target * length : (target + 1) * length].copy_(piece)
        turn = self._turn
        self._begin(call, Notice(call.packed()))

        def read(source: int, target: int) -> torch.Tensor:
            return self.board.small(source, turn, numel, dtype)[target * length : (target + 1) * length]

        return Part(0, length, read)

    def _direct(
        self, pieces: Sequence[torch.Tensor], sources: Sequence[int], notices: Sequence[Notice], shared: bool
    ) -> Part:
        length, dtype = pieces[0].numel(), pieces[0].dtype
        regions = {
            rank: self._region(rank, notices[rank], len(pieces) * length, dtype)
            for rank in sources
            if rank != self.index
        }

        def read(source: int, target: int) -> torch.Tensor:
            if source == self.index:
                return pieces[target]
            return regions[source][target * length : (target + 1) * length]

        return Part(0, length, read)

    def _windows(self, pieces: Sequence[torch.Tensor], length: int, mine: bool) -> Iterator[Part]:
        dtype = pieces[0].dtype
        step = WINDOW_NBYTES // (len(pieces) * pieces[0].element_size()) // _ALIGN_NUMEL * _ALIGN_NUMEL
        for number, low in enumerate(range(0, length, step)):
            high = min(low + step, length)
            if mine:
                window = self.board.window(self.index, number, len(pieces) * step, dtype)
                for target, piece in enumerate(pieces):
                    if len(pieces) == 1 or target != self.index:
                        part = piece[low:high]
                        window[target * step : target * step + part.numel()].copy_(part)
            self._meet()

            def read(
                source: int, target: int, number: int = number, low: int = low, high: int = high
            ) -> torch.Tensor:
                if source == self.index:
                    return pieces[target][low:high]
                window = self.board.window(source, number, len(pieces) * step, dtype)
                return window[target * step : target * step + high - low]

            yield Part(low, high, read)

    def _notice(self, call: Call, pieces: Sequence[torch.Tensor]) -> Notice:
        """Return the notice for `pieces`; it tells their place if they lie side by side in the arena."""
        if not pieces or pieces[0].numel() == 0:
            return Notice(call.packed())
        first, nbytes = pieces[0].data_ptr(), pieces[0].numel() * pieces[0].element_size()
        beside = all(piece.data_ptr() == first + index * nbytes for index, piece in enumerate(pieces))
        place = self._arena.locate(pieces[0]) if beside else None
        if place is None:
            return Notice(call.packed(), length=pieces[0].numel())
        segment, offset = place
        if segment not in self._told:
            for card in self._neighbours.cards:
                if card.rank != self._neighbours.me.rank:
                    self._neighbours.send_fd(card.rank, segment, self._arena.segments[segment].fd)
            self._told.add(segment)
        return Notice(call.packed(), segment, offset, pieces[0].numel())

    def _region(self, index: int, notice: Notice, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that another rank told of, mapped here."""
        if index == self.index:
            return self._arena.segments[notice.segment].tensor(notice.offset, numel, dtype)
        key = index, notice.segment
        while key not in self._segments:
            rank = self._neighbours.cards[index].rank
            fd = self._neighbours.take_fd(rank, notice.segment)
            if fd is not None:
                self._segments[key] = Segment.of(fd)
            else:
                self.look()
                time.sleep(0.001)
        return self._segments[key].tensor(notice.offset, numel, dtype)

    # Meeting, and what keeps it from happening.

    def _begin(self, call: Call, notice: Notice) -> list[Notice]:
        """Post a notice, meet, and return all ranks' notices.

        Raises:
            MismatchError: ranks call different things; all ranks raise it, and the group stays usable.
        """
        if self._failure is not None:
            raise self._failure
        self._call, self._limit = call, self.timeout if call.timeout is None else call.timeout
        self.board.post(self._turn, notice)
        self._meet()
        notices = [self.board.read(self._turn, rank) for rank in range(self.size)]
        self._turn += 1
        for rank, other in enumerate(notices):
            if other.call != notice.call and not call.agrees(other.call):
                raise MismatchError(
                    f"this rank calls {call}, rank {self._neighbours.cards[rank].world_rank} "
                    f"calls {Call.unpacked(other.call)}",
                    rank=self._neighbours.me.world_rank,
                    remedy="all ranks of a group must make the same calls in the same order",
                )
        return notices

    def _meet(self) -> None:
        """Return when everybody is here.

        Raises:
            PeerLost: a rank ended. CollectiveTimeout: one did not come in time. The group is useless then.
        """
        board = self.board
        board.arrive()
        if not board.all_here():
            self._wait()
        futex.fence()

    def _wait(self) -> None:
        board = self.board
        start = time.perf_counter()
        while time.perf_counter() - start < self._patience:
            if board.all_here():
                return
        while True:
            board.sleep(_LOOK_SECONDS)
            if board.all_here():
                return
            try:
                self.look()
                if time.perf_counter() - start > self._limit and not board.all_here():
                    self._time_out()
            except CollectiveError as error:
                if board.all_here():
                    return
                self._failure = error
                raise

    def look(self) -> None:
        """Raise if the group can't go on."""
        if self._left:
            raise CollectiveError(f"this rank left the group during {self._call}")
        failure = self.board.failure()
        if failure is None:
            gone = self._neighbours.ended()
            if not gone or self.board.all_here():
                return
            failure = self.board.failure() or self._describe(gone)
            self.board.fail(failure)
        raise self.error(failure)

    def _describe(self, gone: Sequence[tuple[Card, bool]]) -> Failure:
        """Return what became of the neighbours that are gone: of the one most likely to be the cause."""
        ends = [(card, None if left else self._neighbours.exit_of(card.rank)) for card, left in gone]
        card, end = min(ends, key=lambda each: (each[1] is None, each[1] is not None and each[1].code == 0))
        step = self.board.step_of(self._neighbours.cards.index(card))
        if end is None:
            return Failure(card.world_rank, card.name, step, None, "left the group")
        return Failure(card.world_rank, card.name, step, end.code, f"ended ({end})")

    def _time_out(self) -> None:
        late = self.board.late()
        if not late:
            return
        cards = [self._neighbours.cards[index] for index in late]
        card = cards[0]
        stopped = any(self._neighbours.stopped(card.rank) for card in cards)
        names = ", ".join(f"rank {card.world_rank}" for card in cards)
        state = "its process is stopped" if stopped else "its process lives"
        failure = Failure(
            card.world_rank,
            card.name,
            self.board.step_of(late[0]),
            None,
            f"did not come within the timeout of {self._limit:g} s ({state})"
            + (f"; missing in all: {names}" if len(cards) > 1 else ""),
            dead=False,
        )
        self.board.fail(failure)
        raise self.error(failure)

    def error(self, failure: Failure) -> CollectiveError:
        """Return the error that tells `failure` to this rank's caller."""
        kind = PeerLost if failure.dead else CollectiveTimeout
        where = f" in step {failure.step}" if failure.step >= 0 else ""
        return kind(
            f"rank {failure.rank} on host {failure.host} {failure.text}{where}, while rank "
            f"{self._neighbours.me.world_rank} was in {self._call}",
            rank=failure.rank,
            step=failure.step if failure.step >= 0 else None,
            host=failure.host,
            exit_code=failure.exit_code,
        )

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank can't go on: an error in the middle of a collective."""
        if self._failure is None:
            me = self._neighbours.me
            text = f"gave up in {self._call}: {type(error).__name__}: {error}"
            failure = Failure(me.world_rank, me.name, self.board.step, None, text[:500])
            self.board.fail(failure)
            self.fail(failure)

    def fail(self, failure: Failure) -> CollectiveError:
        """Make every later call raise, and return the error."""
        self._failure = self.error(failure)
        return self._failure

    def someone_ended(self) -> bool:
        """Return whether a neighbour is gone; the board tells which, then."""
        try:
            self.look()
        except CollectiveError:
            return True
        return False

    def note_step(self, step: int) -> None:
        """Tell the other ranks, for their messages, which optimizer step this rank is in."""
        self.board.step = step

    def leave(self) -> None:
        """Have a call under way in another thread end soon, with an error."""
        self._left = True

    def close(self) -> None:
        """Take leave."""
        self._neighbours.close()
        self._segments.clear()


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(-1) for tensor in tensors]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor of any dtype."""
    return tensor.view(-1).view(torch.uint8)


def _copy(place: torch.Tensor, source: torch.Tensor) -> None:
    if place.data_ptr() != source.data_ptr():
        place.copy_(source)
