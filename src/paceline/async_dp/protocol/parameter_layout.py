"""What lies where in the fragments of a model: the agreement of hub and workers, as plain values (pure but for `of`).

A fragment is one row of float32 numbers: first the parameters that are compressed, then those that travel as they are
(few, such as norms and biases), then the buffers that are averaged (running statistics). The hub needs no model, only
this; two layouts with the same hash have the same tensors, of the same shapes, in the same places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgpack
from xxhash import xxh3_64_hexdigest

from paceline.errors import DamagedEnvelope, UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.parallel.compression.compression_config import Compression

__all__ = ["FragmentLayout", "ParameterLayout", "TensorLayout"]

_KINDS = ("compressed", "plain", "averaged")
_MOST_TENSORS, _MOST_NUMEL = 100_000, 1 << 40


@dataclass(frozen=True)
class TensorLayout:
    """A parameter or buffer, and where it lies.

    Attributes:
        name: in the model. shape: of it. kind: ``"compressed"``, ``"plain"`` or ``"averaged"``.
        start: its first number in the fragment.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """Return its part of a fragment, in its shape."""
        return flat[self.start : self.start + self.numel].view(self.shape)


@dataclass(frozen=True)
class FragmentLayout:
    """Parameters that travel together, one behind the other."""

    places: tuple[TensorLayout, ...]

    @cached_property
    def numel(self) -> int:
        """Numbers in all."""
        return sum(place.numel for place in self.places)

    @cached_property
    def compressed(self) -> int:
        """Numbers that are compressed; they come first."""
        return sum(place.numel for place in self.places if place.kind == "compressed")

    @cached_property
    def trained(self) -> int:
        """Numbers that are parameters; the averaged ones follow."""
        return sum(place.numel for place in self.places if place.kind != "averaged")


@dataclass(frozen=True)
class ParameterLayout:
    """All fragments of a model.

    Example:
        >>> from paceline.parallel.compression.compression_config import Compression
        >>> layout = ParameterLayout.of(torch.nn.Linear(40, 30), compression=Compression("int4"))
        >>> [(place.name, place.kind) for place in layout.fragments[0].places]
        [('weight', 'compressed'), ('bias', 'plain')]
    """

    fragments: tuple[FragmentLayout, ...]

    @classmethod
    def of(
        cls, module: nn.Module, fragments: int = 1, compression: Compression | None = None
    ) -> ParameterLayout:
        """Return the layout of a model, whose layers are dealt to fragments in turn.

        Args:
            module: whose trained parameters and floating-point buffers count.
            fragments: how many. compression: says what is too small, or named, to be compressed.

        Raises:
            UsageError: more fragments than layers, no parameter that is trained, one that can't be sent.
        """
        from paceline.parallel.local_sgd.sync_schedule import (
            check_synchronisable,
            layers_of,
            split_into_fragments,
        )

        named = dict(module.named_parameters())
        exempt = set(check_synchronisable("Star", named, compression))
        buffers = {name: each for name, each in module.named_buffers() if each.is_floating_point()}
        parts = split_into_fragments(layers_of(module), fragments)
        return cls(
            tuple(
                _fragment(
                    {name: named[name] for name in part if name not in exempt},
                    {name: named[name] for name in part if name in exempt},
                    buffers if number == len(parts) - 1 else {},
                )
                for number, part in enumerate(parts)
            )
        )

    @cached_property
    def hash(self) -> str:
        """Return what two layouts share if they are the same, 16 hexadecimal digits."""
        return xxh3_64_hexdigest(self.packed())

    @cached_property
    def numel(self) -> int:
        """Numbers in all fragments."""
        return sum(fragment.numel for fragment in self.fragments)

    def packed(self) -> bytes:
        """Return it as bytes."""
        rows = [
            [[place.name, list(place.shape), _KINDS.index(place.kind)] for place in fragment.places]
            for fragment in self.fragments
        ]
        return bytes(msgpack.packb(rows) or b"")

    @classmethod
    def unpacked(cls, data: bytes | bytearray | memoryview) -> ParameterLayout:
        """Return what `packed` packed.

        Raises:
            DamagedEnvelope: it is no layout.
        """
        try:
            rows = msgpack.unpackb(data, raw=False)
            read = [[(name, tuple(shape), _KINDS[kind]) for name, shape, kind in row] for row in rows]
        except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
            raise DamagedEnvelope(f"this is no description of a model: {error}", part="payload") from error
        _check(read)
        return cls(tuple(_placed(row) for row in read))

    def difference(self, other: ParameterLayout) -> str:
        """Return the first difference of another model to this one, in words; empty if there is none.

        Example:
            >>> ParameterLayout.of(torch.nn.Linear(4, 2)).difference(ParameterLayout.of(torch.nn.Linear(4, 3)))
            "parameter 'weight' has shape [3, 4], expected [2, 4]"
        """
        if self == other:
            return ""
        if len(self.fragments) != len(other.fragments):
            return f"it has {len(other.fragments)} fragments, expected {len(self.fragments)}"
        for mine, its in zip(self.fragments, other.fragments, strict=True):
            told = _first_difference(mine.places, its.places)
            if told:
                return told
        return "its tensors lie in another order"


def _fragment(
    compressed: Mapping[str, Tensor], plain: Mapping[str, Tensor], averaged: Mapping[str, Tensor]
) -> FragmentLayout:
    groups = zip(_KINDS, (compressed, plain, averaged), strict=True)
    rows = [(name, tuple(each.shape), kind) for kind, named in groups for name, each in named.items()]
    if not rows:
        raise UsageError("a fragment without parameters", remedy="give fewer fragments")
    return _placed(rows)


def _placed(rows: Iterable[tuple[str, tuple[int, ...], str]]) -> FragmentLayout:
    places, start = [], 0
    for name, shape, kind in rows:
        places.append(TensorLayout(name, shape, kind, start))
        start += math.prod(shape)
    return FragmentLayout(tuple(places))


def _check(fragments: Sequence[Sequence[tuple[Any, tuple[Any, ...], str]]]) -> None:
    """Raise unless these are names and sizes of a model that can be."""
    rows = [row for fragment in fragments for row in fragment]
    told = ""
    if not rows or len(rows) > _MOST_TENSORS or not all(fragments):
        told = f"{len(rows)} tensors in {len(fragments)} fragments"
    elif not all(isinstance(name, str) and len(name) <= 1000 for name, _, _ in rows):
        told = "a name that is none"
    elif not all(type(size) is int and 0 <= size <= _MOST_NUMEL for _, shape, _ in rows for size in shape):
        told = "a shape that is none"
    elif sum(math.prod(shape) for _, shape, _ in rows) > _MOST_NUMEL:
        told = "too many numbers"
    elif any(
        [_KINDS.index(kind) for _, _, kind in fragment]
        != sorted(_KINDS.index(kind) for _, _, kind in fragment)
        for fragment in fragments
    ):
        told = "tensors out of their order"
    if told:
        raise DamagedEnvelope(f"this is no description of a model: {told}", part="payload")


def _first_difference(mine: Sequence[TensorLayout], its: Sequence[TensorLayout]) -> str:
    other = {place.name: place for place in its}
    for place in mine:
        noun = "buffer" if place.kind == "averaged" else "parameter"
        if place.name not in other:
            return f"{noun} {place.name!r} is missing"
        found = other[place.name]
        if found.shape != place.shape:
            return f"{noun} {place.name!r} has shape {list(found.shape)}, expected {list(place.shape)}"
        if found.kind != place.kind:
            return f"{noun} {place.name!r} is {found.kind}, expected {place.kind}"
    known = {place.name for place in mine}
    more = [place.name for place in its if place.name not in known]
    return f"{more[0]!r} is not known here" if more else ""
