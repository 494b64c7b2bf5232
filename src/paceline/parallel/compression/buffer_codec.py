"""Compresses the parts of one buffer, and measures what that leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.parallel.compression.codecs import Codec
from paceline.parallel.compression.error_feedback import ErrorFeedback

__all__ = ["BufferCodec", "CompressionLoss", "sum_of_squares"]


@dataclass
class CompressionLoss:
    """Difference between sent and given numbers, as sums of squares over this rank's compressions.

    On an accelerator the sums stay there until `relative` is read.
    """

    left_out: float | Tensor = 0.0
    given: float | Tensor = 0.0

    def add(self, left: Tensor, decoded: Tensor) -> None:
        """Add packets: their errors, and the numbers they decompress to (overwritten)."""
        self.left_out += sum_of_squares(left)
        self.given += sum_of_squares(decoded.add_(left))

    @property
    def relative(self) -> float:
        """‖x − D(C(x))‖ / ‖x‖; NaN if nothing was given. Waits for the device."""
        left_out, given = float(self.left_out), float(self.given)
        return math.sqrt(left_out / given) if given else math.nan


def sum_of_squares(values: Tensor) -> float | Tensor:
    """Return Σx² in float64; on an accelerator as a scalar there, summed row by row."""
    if values.device.type == "cpu":
        return float(torch.linalg.vector_norm(values)) ** 2
    return torch.linalg.vector_norm(values, dim=-1).to(torch.float64).square().sum()


class BufferCodec:
    """Compresses parts of a buffer, with or without error feedback.

    Where packets are rows of a matrix (on an accelerator), they are those of neighbouring parts of equal length.

    Args:
        flat: the buffer, 1-D.
        codec: makes the packets.
        feedback: for the whole buffer; None: compression errors are lost.

    Attributes:
        wide: the numbers of `flat` in a dtype that codecs read.
        loss: of the packets since `read_buffer`; None: it is not measured.
    """

    def __init__(self, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None) -> None:
        self.flat, self.codec, self.feedback = flat, codec, feedback
        self.loss: CompressionLoss | None = None
        # Codecs read float32 (the raw one also float64); gradients kept in less are widened here.
        low = flat.dtype in (torch.bfloat16, torch.float16)
        self.wide = torch.empty_like(flat, dtype=torch.float32) if low else flat

    @property
    def memory(self) -> list[Tensor]:
        """What compressing and adding reads and writes, besides packets."""
        kept = [self.wide]
        if self.feedback is not None:
            kept += [self.feedback.residual]
            kept += [] if self.feedback.velocity is None else [self.feedback.velocity]
        return kept

    def read_buffer(self, measure: bool) -> None:
        """Start from what the buffer holds now."""
        self.loss = CompressionLoss() if measure else None
        if self.wide is not self.flat:
            self.wide.copy_(self.flat)

    def write_buffer(self) -> None:
        """Write the result to the buffer."""
        if self.wide is not self.flat:
            self.flat.copy_(self.wide)

    def pack(self, start: int, stop: int, packet: Tensor, *, counts: bool | Tensor = True) -> None:
        """Write the packets of elements `start` to `stop`, and keep what they leave out.

        Args:
            start: index of the first element.
            stop: index after the last one.
            packet: uint8, [bytes] or [parts, bytes].
            counts: False: the packets are those of zeros, and the residual stays. On an accelerator it may be a flag
                there; without feedback it changes nothing, since receivers mask what does not count.
        """
        values = _parts(self.wide[start:stop], packet)
        with _on_device(values.device, packet) as own:
            if counts is False:
                self.codec.compress(torch.zeros_like(values), own, None)
                return
            if self.feedback is not None:
                flag = counts if isinstance(counts, Tensor) else None
                self.feedback.compress(values, own, start, counts=flag)
                left = _parts(self.feedback.residual[start:stop], packet)
            else:
                left = torch.empty_like(values) if self.loss is not None else None
                self.codec.compress(values, own, left)
            if self.loss is not None and left is not None:
                decoded = torch.empty_like(values)
                self.codec.decompress(own, decoded)
                self.loss.add(left, decoded)

    def unpack(self, packet: Tensor, start: int, stop: int) -> None:
        """Fill elements `start` to `stop` from packets, [bytes] or [parts, bytes]."""
        self.codec.decompress(packet.to(self.wide.device), _parts(self.wide[start:stop], packet))

    def add(self, packet: Tensor, start: int, stop: int, weight: float) -> None:
        """Add a packet times `weight` to elements `start` to `stop`."""
        self.codec.add(packet.to(self.wide.device), self.wide[start:stop], weight)

    def add_rows(self, packets: Tensor, start: int, stop: int, weights: Tensor | None) -> None:
        """Add packets of the same elements, [packets, bytes], times their weights; see `Codec.add_rows`."""
        if len(packets):
            self.codec.add_rows(packets, self.wide[start:stop], weights)


def _parts(values: Tensor, packet: Tensor) -> Tensor:
    """Return values [n], or [parts, n] if there is a packet for each part."""
    return values.view(len(packet), -1) if packet.dim() > 1 else values


@contextmanager
def _on_device(device: torch.device, packet: Tensor) -> Iterator[Tensor]:
    """Yield `packet`, or if it is on another device a buffer that is copied to it afterwards."""
    if packet.device == device:
        yield packet
        return
    own = torch.empty_like(packet, device=device)
    yield own
    packet.copy_(own)
