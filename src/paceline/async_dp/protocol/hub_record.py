"""How workers reach a hub: a file in the hub's folder, from which processes of the same user find it.

{"address": "tcp://*:7077", "host": "pc1", "key": "keys/worker.key"}
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from paceline._core.files import write_json
from paceline._core.json_codec import decode, encode
from paceline.errors import UsageError
from paceline.transport.hub_address import parse_hub_address

__all__ = ["HUB_RECORD", "HubRecord"]

HUB_RECORD = "address.json"


@dataclass(frozen=True)
class HubRecord:
    """A running hub.

    Attributes:
        address: that it has bound.
        host: name of its machine.
        key: file with the key for workers, relative to the hub's folder; empty: it needs none, or the job's.
    """

    address: str
    host: str
    key: str = ""

    @contextlib.contextmanager
    def kept_in(self, folder: Path) -> Iterator[None]:
        """Keep it in the hub's folder for the length of a with-statement.

        Raises:
            OSError: it can't be written.
        """
        path = folder / HUB_RECORD
        write_json(path, encode(self))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    @staticmethod
    def read(folder: Path) -> HubRecord | None:
        """Return the record in a hub's folder; None if no hub has written one.

        Raises:
            UsageError: it is not a hub's record.
        """
        path = folder / HUB_RECORD
        try:
            content = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} can't be read: {error}", remedy="restart the hub") from error
        return decode(content, HubRecord, str(path))

    def address_from(self, host: str) -> str:
        """Return the address at which a process on `host` reaches the hub.

        Raises:
            UsageError: the hub accepts connections on its own machine only.

        Example:
            >>> HubRecord("tcp://*:7077", "pc1").address_from("pc2")
            'tcp://pc1:7077'
        """
        bound = parse_hub_address(self.address, bind=True)
        if host != self.host and bound.is_local:
            raise UsageError(
                f"the hub at {self.address} runs on {self.host} and accepts connections from there only",
                remedy="start it with --bind 'tcp://*:7077'",
            )
        if bound.host not in ("*", "0.0.0.0", "::"):
            return self.address
        here = "::1" if bound.host == "::" else "127.0.0.1"
        return str(replace(bound, host=here if host == self.host else self.host))
