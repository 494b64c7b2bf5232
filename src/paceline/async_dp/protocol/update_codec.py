"""Packs the numbers of a fragment into bytes, and unpacks them.

    | compressed parameters: a packet of the codec | the others: float32 |

The number of bytes depends on layout and codec alone, so a receiver knows what to expect.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.async_dp.protocol.parameter_layout import FragmentLayout
from paceline.async_dp.row_arithmetic import (
    NUMPY_MAX_NUMEL,
    FloatRow,
    as_array,
    as_tensor,
    from_bf16,
    to_bf16,
)
from paceline.errors import DamagedEnvelope, UsageError, unknown
from paceline.parallel.compression.codecs import Codec, HalfCodec, IntCodec, RawCodec
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.compression.error_feedback import ErrorFeedback
from paceline.parallel.compression.two_bit import TwoBitCodec
from paceline.transport.envelope import Bytes

__all__ = ["UPDATE_CODECS", "UpdateCodec", "update_codec_of"]

UPDATE_CODECS = ("fp32", "bf16", "fp16", "int8", "int4", "int2", "topk-int2")
"""Codecs that both hub and workers have."""

_FLOAT32 = np.dtype(np.float32)


def update_codec_of(name: str) -> Codec:
    """Return the codec of that name.

    Raises:
        UsageError: there is none.
    """
    if name == "fp32":
        return RawCodec()
    if name in ("bf16", "fp16"):
        return HalfCodec(name)
    if name in ("int8", "int4"):
        return IntCodec(int(name[3:]))
    if name in ("int2", "topk-int2"):
        return TwoBitCodec(sparse=name == "topk-int2")
    raise unknown("update codec", name, UPDATE_CODECS)


class UpdateCodec:
    """Packs and unpacks one fragment.

    Args:
        fragment: its layout.
        codec: of the compressed parameters, or its name.
        feedback: keep the compression error and add it to the next packet.
        decay: of that error, see `ErrorFeedback`.
    """

    def __init__(
        self, fragment: FragmentLayout, codec: str | Codec, *, feedback: bool = False, decay: float = 1.0
    ) -> None:
        self.codec = update_codec_of(codec) if isinstance(codec, str) else codec
        self._split, self._numel = fragment.compressed, fragment.numel
        self._body = self.codec.nbytes(self._split) if self._split else 0
        self.nbytes = self._body + 4 * (self._numel - self._split)
        self.feedback = (
            ErrorFeedback(self.codec, self._split, decay=decay) if feedback and self._split else None
        )
        raw = not self._split or isinstance(self.codec, RawCodec)
        self._copies = raw and self.nbytes == 4 * self._numel
        nearest = (
            isinstance(self.codec, HalfCodec)
            and self.codec.name == "bf16"
            and self.codec.rounding_bits is None
        )
        short = self._numel <= NUMPY_MAX_NUMEL and self._split == self._numel
        self._numpy_bf16 = short and nearest and self.feedback is None

    @classmethod
    def with_compression(cls, fragment: FragmentLayout, compression: Compression | None) -> UpdateCodec:
        """Return the update codec for a compression; None packs float32.

        Raises:
            UsageError: the hub could not unpack it.
        """
        if compression is None:
            return cls(fragment, "fp32")
        codec = compression.codec(rank=0)
        if compression.name not in UPDATE_CODECS or compression.name != codec.name:
            raise UsageError(
                f"{compression!r} can't be sent to a hub",
                remedy=f"choose {', '.join(UPDATE_CODECS[1:])}, with the default block size",
            )
        return cls(fragment, codec, feedback=bool(compression.feedback), decay=compression.feedback_decay)

    def with_codec(self, fragment: FragmentLayout, name: str) -> UpdateCodec:
        """Return an update codec of another name that takes over the compression error."""
        other = UpdateCodec(fragment, name, feedback=self.feedback is not None)
        if self.feedback is not None and other.feedback is not None:
            other.feedback.residual.copy_(self.feedback.residual)
        return other

    def pack(self, row: FloatRow) -> Bytes:
        """Return a fragment as new bytes, on the CPU."""
        if self._copies:
            return as_array(row).tobytes()
        if self._numpy_bf16 and type(row) is np.ndarray:
            halves = np.zeros(self.nbytes // 2, np.uint16)
            to_bf16(row, halves[: self._numel])
            return halves.tobytes()
        flat = as_tensor(row)
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

    def unpack(self, packet: Bytes, into: FloatRow) -> None:
        """Write the numbers of a packet into a row.

        Raises:
            DamagedEnvelope: it has another number of bytes than it must, or indices out of range.
        """
        nbytes = memoryview(packet).nbytes
        if nbytes != self.nbytes:
            raise DamagedEnvelope(
                f"a packet of {self._numel} numbers in {self.codec.name} has {nbytes} bytes, expected {self.nbytes}",
                part="payload",
            )
        if self._copies:
            as_array(into)[:] = np.frombuffer(packet, _FLOAT32)
            return
        if self._numpy_bf16 and type(into) is np.ndarray:
            from_bf16(np.frombuffer(packet, np.uint16, self._numel), into)
            return
        data, flat = _aligned(packet), as_tensor(into)
        if self._split:
            self.codec.decompress(data[: self._body], flat[: self._split])
        if self._split < self._numel:
            flat[self._split :].copy_(data[self._body :].view(torch.float32))


def _aligned(data: Bytes) -> Tensor:
    """Return bytes as a uint8 tensor, copied only if they are read-only or not aligned to 16 bytes."""
    given = memoryview(data).cast("B")
    if given.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    tensor = torch.frombuffer(bytearray(given) if given.readonly else given, dtype=torch.uint8)
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
