"""Parameter layout: the place of each tensor in the fragments of a model, for hub and workers (pure, except `of`).

A fragment is one row of float32 numbers: first the parameters that are compressed, then those sent uncompressed (few,
such as norms and biases), then the buffers that are averaged (running statistics). The hub needs no model, only this;
layouts with equal hashes have the same tensors, of the same shapes, in the same places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta
from xxhash import xxh3_64_hexdigest

from paceline.errors import DamagedEnvelope, UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.parallel.compression.compression_config import Compression

__all__ = ["MAX_FRAGMENT_NUMEL", "FragmentLayout", "ParameterLayout", "TensorLayout"]

MAX_FRAGMENT_NUMEL = (2**32 - 1) // 4
"""Most elements of a fragment: as float32 it must fit into a record of the hub's journal."""

_KINDS = ("compressed", "plain", "averaged")
_MAX_TENSORS, _MAX_NUMEL, _MAX_NAME = 100_000, 1 << 40, 1000


@dataclass(frozen=True)
class TensorLayout:
    """A parameter or buffer of the model and its place in the fragment."""

    name: str
    shape: tuple[int, ...]
    kind: str  # "compressed", "plain" or "averaged"
    start: int  # index of its first element in the fragment

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def view_in(self, flat: Tensor) -> Tensor:
        """Return its part of a fragment, in its shape."""
        return flat[self.start : self.start + self.numel].view(self.shape)


@dataclass(frozen=True)
class FragmentLayout:
    """Tensors that are sent together, one after another."""

    tensors: tuple[TensorLayout, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return sum(tensor.numel for tensor in self.tensors)

    @cached_property
    def compressed(self) -> int:
        """Number of compressed elements; they come first."""
        return sum(tensor.numel for tensor in self.tensors if tensor.kind == "compressed")

    @cached_property
    def trained(self) -> int:
        """Number of elements of parameters; the averaged buffers follow."""
        return sum(tensor.numel for tensor in self.tensors if tensor.kind != "averaged")


_Row = tuple[
    Annotated[str, Meta(max_length=_MAX_NAME)],
    tuple[Annotated[int, Meta(ge=0, le=_MAX_NUMEL)], ...],
    Annotated[int, Meta(ge=0, lt=len(_KINDS))],
]
"""Name, shape and kind of a tensor as they are sent."""

_FragmentRows = Annotated[list[_Row], Meta(min_length=1)]
_decoder = msgspec.msgpack.Decoder(Annotated[list[_FragmentRows], Meta(min_length=1)])


@dataclass(frozen=True)
class ParameterLayout:
    """The layout of all fragments of a model.

    Example:
        >>> from paceline.parallel.compression.compression_config import Compression
        >>> layout = ParameterLayout.of(torch.nn.Linear(40, 30), compression=Compression("int4"))
        >>> [(tensor.name, tensor.kind) for tensor in layout.fragments[0].tensors]
        [('weight', 'compressed'), ('bias', 'plain')]
    """

    fragments: tuple[FragmentLayout, ...]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        fragments: int = 1,
        compression: Compression | None = None,
        *,
        sharded: bool = False,
    ) -> ParameterLayout:
        """Return the layout of a model, whose layers are dealt to fragments in turn.

        Args:
            module: its trained parameters and floating-point buffers are laid out.
            fragments: number of fragments.
            compression: decides which parameters are exempt, by size or by name.
            sharded: parameters may be sharded; they are laid out whole.

        Raises:
            UsageError: more fragments than layers, no trained parameter, or one that can't be sent.
        """
        from paceline.parallel.local_sgd.sync_schedule import (
            check_synchronisable,
            layers_of,
            split_into_fragments,
        )

        named = dict(module.named_parameters())
        exempt = set(check_synchronisable("AsyncDataParallel", named, compression, sharded=sharded))
        buffers = {name: each for name, each in module.named_buffers() if each.is_floating_point()}
        parts = split_into_fragments(layers_of(module), fragments)
        layout = cls(
            tuple(
                _fragment(
                    {name: named[name] for name in part if name not in exempt},
                    {name: named[name] for name in part if name in exempt},
                    buffers if number == len(parts) - 1 else {},
                )
                for number, part in enumerate(parts)
            )
        )
        too_long = layout.oversized_fragment()
        if too_long:
            raise UsageError(
                f"fragments={fragments}: {too_long}", remedy="give more fragments, at most one per layer"
            )
        return layout

    def oversized_fragment(self) -> str:
        """Describe the first fragment that has more than `MAX_FRAGMENT_NUMEL` elements; empty if none has."""
        for number, fragment in enumerate(self.fragments):
            if fragment.numel > MAX_FRAGMENT_NUMEL:
                return (
                    f"fragment {number} has {fragment.numel:,} elements, "
                    f"at most {MAX_FRAGMENT_NUMEL:,} can be sent together"
                )
        return ""

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits, equal for equal layouts."""
        return xxh3_64_hexdigest(self.pack())

    @cached_property
    def numel(self) -> int:
        """Number of elements in all fragments."""
        return sum(fragment.numel for fragment in self.fragments)

    def pack(self) -> bytes:
        """Return the layout as bytes."""
        return msgspec.msgpack.encode(
            [
                [(tensor.name, tensor.shape, _KINDS.index(tensor.kind)) for tensor in fragment.tensors]
                for fragment in self.fragments
            ]
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> ParameterLayout:
        """Return the layout that `pack` packed.

        Raises:
            DamagedEnvelope: not a valid layout.
        """
        try:
            fragments = _decoder.decode(data)
            rows = [row for fragment in fragments for row in fragment]
            if len(rows) > _MAX_TENSORS or sum(math.prod(shape) for _, shape, _ in rows) > _MAX_NUMEL:
                raise ValueError(f"more than {_MAX_TENSORS} tensors or {_MAX_NUMEL} elements")
            for fragment in fragments:
                kinds = [kind for _, _, kind in fragment]
                if kinds != sorted(kinds):
                    raise ValueError("the kinds of its tensors are out of order")
        except (ValueError, msgspec.MsgspecError) as error:
            raise DamagedEnvelope(f"invalid parameter layout: {error}", part="payload") from error
        return cls(
            tuple(_placed((name, shape, _KINDS[kind]) for name, shape, kind in each) for each in fragments)
        )

    def difference(self, other: ParameterLayout) -> str:
        """Describe the first difference between another layout and this one; empty if there is none.

        Example:
            >>> ParameterLayout.of(torch.nn.Linear(4, 2)).difference(ParameterLayout.of(torch.nn.Linear(4, 3)))
            "parameter 'weight' has shape [3, 4], expected [2, 4]"
        """
        if self == other:
            return ""
        if len(self.fragments) != len(other.fragments):
            return f"it has {len(other.fragments)} fragments, expected {len(self.fragments)}"
        for expected, found in zip(self.fragments, other.fragments, strict=True):
            difference = _first_difference(expected.tensors, found.tensors)
            if difference:
                return difference
        return "its tensors are in another order"


def _fragment(
    compressed: Mapping[str, Tensor], plain: Mapping[str, Tensor], averaged: Mapping[str, Tensor]
) -> FragmentLayout:
    groups = zip(_KINDS, (compressed, plain, averaged), strict=True)
    rows = [(name, tuple(each.shape), kind) for kind, named in groups for name, each in named.items()]
    if not rows:
        raise UsageError("a fragment without parameters", remedy="give fewer fragments")
    return _placed(rows)


def _placed(rows: Iterable[tuple[str, tuple[int, ...], str]]) -> FragmentLayout:
    tensors, start = [], 0
    for name, shape, kind in rows:
        tensors.append(TensorLayout(name, shape, kind, start))
        start += tensors[-1].numel
    return FragmentLayout(tuple(tensors))


def _first_difference(expected: Sequence[TensorLayout], found: Sequence[TensorLayout]) -> str:
    others = {tensor.name: tensor for tensor in found}
    for tensor in expected:
        noun = "buffer" if tensor.kind == "averaged" else "parameter"
        if tensor.name not in others:
            return f"{noun} {tensor.name!r} is missing"
        other = others[tensor.name]
        if other.shape != tensor.shape:
            return f"{noun} {tensor.name!r} has shape {list(other.shape)}, expected {list(tensor.shape)}"
        if other.kind != tensor.kind:
            return f"{noun} {tensor.name!r} is {other.kind}, expected {tensor.kind}"
    known = {tensor.name for tensor in expected}
    extra = [tensor.name for tensor in found if tensor.name not in known]
    return f"{extra[0]!r} is unknown here" if extra else ""
