"""Weights of a model wherever they are stored: a checkpoint of Paceline's or of DCP, or safetensors files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from paceline.checkpoint.checkpoint_contents import saved_weights
from paceline.checkpoint.format.checkpoint_reader import CheckpointReader
from paceline.checkpoint.interop.dcp_models import find_weights
from paceline.checkpoint.interop.dcp_reader import DcpReader
from paceline.checkpoint.interop.safetensors_reader import SafetensorsReader
from paceline.checkpoint.newest_checkpoint import open_checkpoint
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.parts.state_reader import Read, TensorInfo
from paceline.checkpoint.storage.stores import checkpoints_at, is_url, store_at
from paceline.errors import DamagedCheckpoint, UsageError

__all__ = ["WeightsSource", "holds_checkpoints", "use_checkpoint", "use_weights", "weights_in"]

T = TypeVar("T")


class WeightsReader(Protocol):
    """The part of a `StateReader` that weights need."""

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape of a tensor."""
        ...

    def read(self, reads: Sequence[Read]) -> None:
        """Read boxes of tensors."""
        ...

    def tensor(self, name: str, box: Box | None = None) -> Tensor:
        """Read a tensor, or a box of it, into new memory."""
        ...


@dataclass(frozen=True)
class WeightsSource:
    """The weights of a model.

    Attributes:
        reader: of what holds them.
        names: the name in it of each weight, in the order of the model's ``state_dict()`` as far as it is known.
        aliases: first names of tied weights by their other ones.
        location: path of the checkpoint, file or folder.
    """

    reader: WeightsReader
    names: Mapping[str, str]
    aliases: Mapping[str, str]
    location: str

    @property
    def has_checksums(self) -> bool:
        """Whether reading finds damage."""
        return isinstance(self.reader, CheckpointReader | DcpReader)

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape of a weight, by any of its names."""
        return self.reader.info(self.names[self.aliases.get(name, name)])

    def read(self, name: str, box: Box, into: Tensor | None) -> Read:
        """Return a read of a box of a weight, for the reader."""
        return Read(self.names[self.aliases.get(name, name)], box, into)

    def tensor(self, name: str) -> Tensor:
        """Read a weight, by any of its names."""
        return self.reader.tensor(self.names[self.aliases.get(name, name)])

    def verify(self) -> None:
        """Read all weights, and compare their checksums.

        Raises:
            DamagedCheckpoint: one differs.
        """
        reads = [Read(name, Box.whole(self.reader.info(name).shape), None) for name in self.names.values()]
        self.reader.read(reads)


def use_weights(
    source: str | Path, model: str, use: Callable[[WeightsSource], T], *, reads_cache: bool = False
) -> T:
    """Return what `use` makes of the weights at a path; in a folder of checkpoints of the newest intact one.

    Args:
        source: a checkpoint, a folder of them, or the URL of one; a safetensors file, or a folder of such files.
        model: which model, if a checkpoint holds several.
        use: reads what it needs; called again with an older checkpoint if that raises DamagedCheckpoint.
        reads_cache: of a URL, read what is on this host from there, and keep what is downloaded for its other ranks.

    Raises:
        UsageError: there is no such source or model, or it can't be read.
        DamagedCheckpoint: none of the checkpoints is intact, as far as `use` reads them.
    """
    if not holds_checkpoints(source):
        return use(_files(Path(source)))
    return use_checkpoint(source, lambda reader: use(weights_in(reader, model)), reads_cache=reads_cache)


def holds_checkpoints(source: str | Path) -> bool:
    """Return whether a path is a checkpoint or a folder of them, not safetensors files; a URL can't be anything else.

    Raises:
        UsageError: it does not exist.
    """
    if is_url(source):
        return True
    path = Path(source)
    if not path.exists():
        raise UsageError(f"{str(path)!r} does not exist", remedy="name a checkpoint, or a safetensors file")
    return path.is_dir() and bool(store_at(path).names())


def use_checkpoint(
    source: str | Path, use: Callable[[CheckpointReader | DcpReader], T], *, reads_cache: bool = False
) -> T:
    """Return what `use` makes of a checkpoint, or of the newest intact one in a folder; see `use_weights`."""
    store, names = checkpoints_at(source, reads_cache=reads_cache)
    problems: dict[str, str] = {}
    while names:
        for name in names:
            try:
                reader = open_checkpoint(store.files(name))
                try:
                    return use(reader)
                finally:
                    reader.close()
            except DamagedCheckpoint as error:
                problems[name] = str(error).partition("\n")[0]
        # A run that writes there has replaced them, if others have appeared meanwhile:
        names = []
        with contextlib.suppress(OSError):
            names = [name for name in store.names() if name not in problems]
    found = next(iter(problems.values()))
    if len(problems) > 1:
        listed = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        found = f"no checkpoint in {store.location!r} is intact: {listed}"
    raise DamagedCheckpoint(found, remedy="restore a copy of one")


def weights_in(reader: CheckpointReader | DcpReader, model: str) -> WeightsSource:
    """Return the weights of a model in a checkpoint; UsageError: it has no such model."""
    location = reader.files.location
    if isinstance(reader, DcpReader):
        return WeightsSource(reader, find_weights(reader.index, model, location)[1], {}, location)
    if model not in reader.manifest.aliases:
        raise UsageError(
            f"{location!r} holds no model {model!r}",
            remedy=f"it holds: {', '.join(reader.manifest.aliases) or 'none'}",
        )
    aliases = reader.manifest.aliases[model]
    names = {name: f"{model}.{name}" for name in saved_weights(reader, model) if name not in aliases}
    return WeightsSource(reader, names, aliases, location)


def _files(path: Path) -> WeightsSource:
    reader = SafetensorsReader(path)
    names = {name: name for name in reader.names()}
    if path.is_dir() and not names:
        raise UsageError(
            f"{str(path)!r} holds neither checkpoints nor safetensors files",
            remedy="name the folder of a run's checkpoints, or of safetensors files",
        )
    return WeightsSource(reader, names, {}, str(path))
