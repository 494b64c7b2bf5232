"""Names in checkpoints of torch.distributed.checkpoint (DCP): paths of keys in a nested state, joined by dots.

    {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer), "scheduler": …}

is what our names stand for, so that a program of torch's loads what it needs under the same keys. A tensor inside of a
state, such as one of a list, is stored once under our name, and found under that of DCP, too.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.world.plain_values import unpack

__all__ = ["DcpNames", "dcp_aliases", "dcp_values"]

Path = tuple[str | int, ...]
Packed = Mapping[str, Any]
"""Values by name, as `plain_values.pack` returns them."""


@dataclass(frozen=True)
class _Stored:
    """Stands for a tensor in an unpacked state."""

    label: str

    def numpy(self) -> str:
        """Stands for an array, into which DCP does not look."""
        return self.label


def dcp_values(
    optimizers: Packed, others: Packed, values: Packed, tensor_of: Callable[[str], Tensor]
) -> dict[str, bytes]:
    """Return what is written that are no tensors, by name, as torch.save encodes it: training may change it.

    Args:
        optimizers: options of the groups of each optimizer.
        others: states of the objects that are neither models nor optimizers; of models, what are no tensors.
        values: further values, by their whole names.
        tensor_of: returns a tensor by its label.
    """
    return {
        _name(path): _encoded(leaf)
        for start, packed in _starts(optimizers, others, values)
        for path, leaf in _leaves(unpack(packed, tensor_of), start)
        if not isinstance(leaf, Tensor)
    }


def _starts(optimizers: Packed, others: Packed, values: Packed) -> Iterator[tuple[Path, Any]]:
    yield from (((name, "param_groups"), packed) for name, packed in optimizers.items())
    yield from (((name,), packed) for name, packed in {**others, **values}.items())


def _encoded(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def dcp_aliases(aliases: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the first names of tied weights by their other ones, both with their model's."""
    return {
        f"{model}.{other}": f"{model}.{first}"
        for model, names in aliases.items()
        for other, first in names.items()
    }


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield what DCP stores separately: of mappings each value, of lists that hold mappings or tensors each item."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, list) and _is_nested(value):
        for at, item in enumerate(value):
            yield from _leaves(item, (*path, at))
    else:
        yield path, value


def _is_nested(value: list[Any]) -> bool:
    """Return whether DCP looks into a list; it never looks into a tuple."""
    return any(
        isinstance(each, Tensor | _Stored | Mapping) or (isinstance(each, list) and _is_nested(each))
        for each in value
    )


def _name(path: Path) -> str:
    return ".".join(map(str, path))


class DcpNames:
    """The path that each name stands for, in which numbers are places in lists; and further names of tensors.

    Args:
        models: names of the models.
        optimizers, others: as for `dcp_values`.

    Attributes:
        aliases: our names of tensors inside of states, by their names in DCP.
    """

    def __init__(
        self, models: Iterable[str] = (), optimizers: Packed | None = None, others: Packed | None = None
    ) -> None:
        self.aliases: dict[str, str] = {}
        self._models = frozenset(models)
        self._params = {
            name: {param for group in packed for param in group["params"]}
            for name, packed in (optimizers or {}).items()
        }
        self._paths: dict[str, Path] = {}
        for start, packed in _starts(optimizers or {}, others or {}, {}):
            self._add(packed, start)

    def add_values(self, values: Packed) -> None:
        """Add the names of what lies inside of further values, see `dcp_values`."""
        for name, packed in values.items():
            self._add(packed, self.path(name))

    def _add(self, packed: Any, start: Path) -> None:
        for path, leaf in _leaves(unpack(packed, _Stored), start):  # type: ignore[arg-type] # no tensors, but labels
            self._paths[_name(path)] = path
            if isinstance(leaf, _Stored):
                self.aliases[_name(path)] = leaf.label

    def path(self, name: str) -> Path:
        """Return the path of a tensor or value."""
        head, _, rest = name.partition(".")
        if name in self._paths:
            return self._paths[name]
        if head in self._models:
            return (head, rest)
        inner = rest.removeprefix("state.") if rest.startswith("state.") else ""
        param = inner
        while param and param not in self._params.get(head, ()):  # names of parameters have dots, too
            param = param.rpartition(".")[0]
        return (head, "state", param, inner[len(param) + 1 :]) if param else tuple(name.split("."))
