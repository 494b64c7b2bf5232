"""Address of a hub, and the worker's key for it."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline._core.job_key import JobKey
from paceline.async_dp.protocol.hub_record import HubRecord
from paceline.errors import UsageError
from paceline.transport.hub_address import HubAddress, parse_alternatives
from paceline.transport.zmq.curve_keys import WorkerKeys

__all__ = ["HubAccess"]

log = logging.getLogger("paceline.async_dp")

_START_SECONDS, _QUIET_SECONDS = 30.0, 3.0
_POLL_SECONDS = 0.1
_HOST_AND_PORT = re.compile(r"[^/]*:\d+")  # an address without tcp://
_NO_KEY = (
    "name the hub's folder instead (hub='runs/hub'), give key=, a file made by `paceline hub keygen`, or set "
    "PACELINE_JOB_KEY_FILE for hub and workers; or insecure=True if you trust everybody who reaches the hub"
)


@dataclass(frozen=True)
class HubAccess:
    """How a worker connects to a hub.

    Attributes:
        address: of the hub; several with ``|`` in between.
        keys: of the worker; None: the hub has none.
    """

    address: str
    keys: WorkerKeys | None

    @staticmethod
    def find(
        hub: str | Path,
        key: str | Path | None,
        insecure: bool,
        environ: Mapping[str, str] = os.environ,
    ) -> HubAccess:
        """Return how to connect to a hub; the first that is given counts: `key`, `insecure`, the folder, the job's key.

        Waits for a hub that is starting in the folder.

        Args:
            hub: its address, also several with ``|`` in between (hub and standby), or its folder.
            key: a worker's key file; None: not given.
            insecure: connect without a key.
            environ: may have the job's key.

        Raises:
            UsageError: address, folder or key are invalid, or there is no key.
        """
        address, own = str(hub), None
        if "://" not in address and not _HOST_AND_PORT.fullmatch(address):
            record = _wait_for_record(Path(hub))
            address = record.address_from(socket.gethostname())
            own = Path(hub, record.key) if record.key else None
        alternatives = parse_alternatives(address)
        if key is not None:
            return HubAccess(address, WorkerKeys.read(key))
        if insecure:
            return HubAccess(address, None)
        if own is not None:
            return HubAccess(address, WorkerKeys.read(own))
        job = JobKey.from_environment(environ)
        if job is not None:
            return HubAccess(address, WorkerKeys.of_job(job))
        if all(each.transport == "ipc" for each in alternatives):
            return HubAccess(address, None)
        raise UsageError(f"there is no key for the hub at {address}", remedy=_NO_KEY)

    @property
    def parsed(self) -> HubAddress:
        """The address in its parts, the first of several."""
        return parse_alternatives(self.address)[0]


def _wait_for_record(folder: Path) -> HubRecord:
    """Return the record in a folder, once a hub that is starting has written it."""
    started, warned = time.monotonic(), False
    while (record := HubRecord.read(folder)) is None:
        waited = time.monotonic() - started
        if waited > _QUIET_SECONDS and not warned:
            warned = True
            log.warning("waiting up to %.0f s for a hub to start in %s", _START_SECONDS, folder)
        if waited > _START_SECONDS:
            raise UsageError(
                f"no hub runs in {str(folder)!r}",
                remedy=f"start one: paceline hub serve --out {folder}; or give its address, such as tcp://HOST:7077",
            )
        time.sleep(_POLL_SECONDS)
    return record
