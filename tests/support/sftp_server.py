"""An SFTP server on loopback for tests, in a process of its own: what it serves outlives it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["SftpServer"]

_PROGRAM = """
import asyncio, sys
import asyncssh

class Anyone(asyncssh.SSHServer):
    def begin_auth(self, username):
        return False

async def main(folder, key, port):
    def serve(channel):
        return asyncssh.SFTPServer(channel, chroot=folder.encode())
    server = await asyncssh.listen(
        "127.0.0.1", port, server_factory=Anyone, server_host_keys=[key], sftp_factory=serve, reuse_address=True
    )
    print(server.get_port(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


class SftpServer:
    """A server of a folder; starts at once.

    Args:
        folder: for what it serves, and its key; it is empty.
    """

    def __init__(self, folder: Path) -> None:
        import asyncssh

        self._root, self._key = folder / "served", folder / "key"
        self._root.mkdir()
        asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(self._key))
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        """URL of a folder that does not exist yet."""
        return f"sftp://tester@127.0.0.1:{self.port}/runs/a"

    def start(self) -> None:
        """Start it, again on the same port."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(self._root), str(self._key), str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        self._process.communicate()  # its input ends
