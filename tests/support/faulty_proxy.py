"""TCP proxy on loopback that refuses, cuts, delays or answers connections, as a store does that fails."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, Self

__all__ = ["FaultyProxy"]

_CHUNK_NBYTES = 64 << 10


class FaultyProxy:
    """Forwards connections to a server, or not.

    Args:
        target: port of the server.

    Attributes:
        port: its own.
        status: answer every HTTP request with this status instead of forwarding; 0: forward.
        cut_after: cut all connections once clients have sent this many more bytes; None: never. Set to None by that.
        seconds_per_chunk: delay of each chunk of 64 KiB that a client sends.
        is_stalled: whether nothing is forwarded, in either direction.
        sent: bytes that clients have sent.
        requests: first lines of HTTP requests answered by the proxy itself.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.status, self.cut_after, self.seconds_per_chunk, self.is_stalled = 0, None, 0.0, False
        self.sent, self.cuts, self.requests = 0, 0, list[str]()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)
        self._thread.start()
        self.accept()

    def accept(self) -> None:
        """Listen, again on the same port."""
        self._run(self._listen())

    def refuse(self) -> None:
        """Refuse connections, and cut those that are open."""
        self._run(self._stop())

    def cut(self) -> None:
        """Reset all connections."""
        self._run(self._cut())

    def close(self) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ in the loop

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._cut()
        for _ in range(100):  # handlers end
            if not self._writers:
                break
            await asyncio.sleep(0.01)

    async def _cut(self) -> None:
        self.cuts += 1
        for writer in list(self._writers):
            raw = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened = [writer]
        self._writers.add(writer)
        try:
            if self.status:
                await self._answer(reader, writer)
                return
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._target)
            opened.append(upstream)
            self._writers.add(upstream)
            await asyncio.gather(
                self._pump(reader, upstream, counts=True), self._pump(upstream_reader, writer, counts=False)
            )
        except (OSError, EOFError):
            pass
        finally:
            for each in opened:
                self._writers.discard(each)
                each.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        while chunk := await reader.read(_CHUNK_NBYTES):
            while self.is_stalled:
                await asyncio.sleep(0.02)
            if counts:
                self.sent += len(chunk)
                if self.seconds_per_chunk:
                    await asyncio.sleep(self.seconds_per_chunk)
                if self.cut_after is not None:
                    self.cut_after -= len(chunk)
                    if self.cut_after < 0:
                        self.cut_after = None
                        await self._cut()
                        return
            writer.write(chunk)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a request whole, and answer with an error in S3's form."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        self.requests.append(head.partition("\r\n")[0])
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        if "100-continue" not in fields.get("expect", ""):
            await reader.readexactly(int(fields.get("content-length", 0)))
        code = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}[self.status]
        body = f"<Error><Code>{code}</Code><Message>{code} by the proxy</Message></Error>".encode()
        writer.write(
            f"HTTP/1.1 {self.status} {code}\r\nContent-Length: {len(body)}\r\nContent-Type: application/xml\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        if not head.startswith("HEAD"):
            writer.write(body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
