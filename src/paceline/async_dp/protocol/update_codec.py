"""A fragment's numbers as the bytes that travel, and back.

    | compressed parameters, a packet of the codec | the others as float32 |

Bytes depend on the layout and the codec alone, so a receiver knows what has to come before anything does.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.async_dp.float_rows import NUMPY_MAX_NUMEL, FloatRow, as_array, as_tensor, to_bf16, from_bf16
from paceline.async_dp.protocol.parameter_layout import FragmentLayout
from paceline.errors import DamagedEnvelope, UsageError, unknown
from paceline.parallel.compression.codecs import BlockCodec, Codec, HalfCodec, RawCodec
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.compression.error_feedback import ErrorFeedback
from paceline.transport.envelope import Bytes

__all__ = ["UPDATE_CODECS", "UpdateCodec", "update_codec_of"]

UPDATE_CODECS = ("fp32", "bf16", "fp16", "int8", "int4")
"""What both hub and workers can pack and unpack."""

_FLOAT32 = np.dtype(np.float32)


def update_codec_of(name: str) -> Codec:
    """Return the codec of that name.

    Raises:
        UsageError: nothing is called so.
    """
    if name == "fp32":
        return RawCodec()
    if name in ("bf16", "fp16"):
        return HalfCodec(name)
    if name in ("int8", "int4"):
        return BlockCodec(int(name[3:]))
    raise unknown("way to pack numbers", name, UPDATE_CODECS)


class UpdateCodec:
    """Packs a fragment in one way.

    Args:
        fragment: whose numbers.
        codec: of those that are compressed: a name, or a codec of one's own settings.
        feedback: remember what packing leaves out, and give it the next time.
    """

    def __init__(self, fragment: FragmentLayout, codec: str | Codec, *, feedback: bool = False) -> None:
        self.codec = update_codec_of(codec) if isinstance(codec, str) else codec
        self._split, self._numel = fragment.compressed, fragment.numel
        self._body = self.codec.nbytes(self._split) if self._split else 0
        self.nbytes = self._body + 4 * (self._numel - self._split)
        self.feedback = ErrorFeedback(self.codec, self._split) if feedback and self._split else None
        raw = not self._split or isinstance(self.codec, RawCodec)
        self._as_they_are = raw and self.nbytes == 4 * self._numel  # nothing to compute: numpy copies at once
        nearest = (
            isinstance(self.codec, HalfCodec) and self.codec.name == "bf16" and self.codec.dither is None
        )
        few = self._numel <= NUMPY_MAX_NUMEL and self._split == self._numel
        self._quickly = few and nearest and self.feedback is None  # numpy is quicker on so few numbers

    @classmethod
    def with_compression(cls, fragment: FragmentLayout, compression: Compression | None) -> UpdateCodec:
        """Return the packing that a compression asks for; none packs float32 as they are.

        Raises:
            UsageError: the hub could not unpack it.
        """
        if compression is None:
            return cls(fragment, "fp32")
        codec = compression.codec(rank=0)
        if compression.name not in UPDATE_CODECS or compression.name != codec.name:
            raise UsageError(
                f"{compression!r} can't be sent to a hub",
                remedy=f"choose one of {', '.join(UPDATE_CODECS[1:])}, in blocks of the usual size",
            )
        return cls(fragment, codec, feedback=bool(compression.feedback))

    def with_codec(self, fragment: FragmentLayout, name: str) -> UpdateCodec:
        """Return a packing by another codec, which goes on with what this one left out."""
        other = UpdateCodec(fragment, name, feedback=self.feedback is not None)
        if self.feedback is not None and other.feedback is not None:
            other.feedback.residual.copy_(self.feedback.residual)
        return other

    def pack(self, numbers: FloatRow) -> Bytes:
        """Return the bytes of a fragment's numbers, on the CPU; nothing else refers to them."""
        if self._as_they_are:
            return as_array(numbers).tobytes()
        if self._quickly and type(numbers) is np.ndarray:
            levels = np.zeros(self.nbytes // 2, np.uint16)
            to_bf16(numbers, levels[: self._numel])
            return levels.tobytes()
        flat = as_tensor(numbers)
        packet = torch.empty(self.nbytes, dtype=torch.uint8)
        if self._split:
            body, values = packet[: self._body], flat[: self._split]
            if self.feedback is not None:
                self.feedback.compress(values, body)
            else:
                self.codec.compress(values, body)
        if self._split < self._numel:
            packet[self._body :].view(torch.float32).copy_(flat[self._split :])
        return packet.numpy().data

    def unpack(self, given: Bytes, numbers: FloatRow) -> None:
        """Write the numbers that `pack` packed.

        Raises:
            DamagedEnvelope: it has not as many bytes as it must have.
        """
        nbytes = memoryview(given).nbytes
        if nbytes != self.nbytes:
            raise DamagedEnvelope(
                f"a packet of {self._numel} numbers in {self.codec.name} has {nbytes} bytes, expected {self.nbytes}",
                part="payload",
            )
        if self._as_they_are:
            as_array(numbers)[:] = np.frombuffer(given, _FLOAT32)
            return
        if self._quickly and type(numbers) is np.ndarray:
            from_bf16(np.frombuffer(given, np.uint16, self._numel), numbers)
            return
        packet, into = _aligned(given), as_tensor(numbers)
        if self._split:
            self.codec.decompress(packet[: self._body], into[: self._split])
        if self._split < self._numel:
            into[self._split :].copy_(packet[self._body :].view(torch.float32))


def _aligned(data: Bytes) -> Tensor:
    """Return bytes as uint8, without copying them if they may be changed and begin where numbers may."""
    given = memoryview(data).cast("B")
    if given.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    tensor = torch.frombuffer(bytearray(given) if given.readonly else given, dtype=torch.uint8)
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
