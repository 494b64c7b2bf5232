"""An S3 server on loopback for tests: moto, in a process of its own that ends with the test process."""

from __future__ import annotations

import subprocess
import sys
import uuid
from typing import Any

__all__ = ["S3Server"]

_PROGRAM = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


class S3Server:
    """The server; it keeps what is written to it until it is closed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def options(self, port: int | None = None) -> dict[str, Any]:
        """Return s3fs's options for the server, or a proxy of it."""
        return {
            "key": "key",
            "secret": "secret",
            "endpoint_url": f"http://127.0.0.1:{port or self.port}",
        }

    def new_bucket(self) -> str:
        """Make a bucket, and return its name."""
        import s3fs

        name = f"bucket-{uuid.uuid4().hex[:12]}"
        s3fs.S3FileSystem(skip_instance_cache=True, **self.options()).mkdir(name)
        return name

    def close(self) -> None:
        self._process.communicate()  # its input ends
