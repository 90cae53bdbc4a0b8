"""A small process in the place of a simulated site's: it asks for a fork that does the work, and ends as that one does.

Run by its path, with the standard library only: what matters is that it starts in a moment and holds next to nothing.
"""

import json
import os
import socket
import struct
import sys
from pathlib import Path

LENGTH, ENDED = struct.Struct("!Q"), struct.Struct("!i")
STARTING, BEGUN = "MEDSILO_STARTING", "MEDSILO_BEGUN"  # what a fork closes and what it makes when it has started


def has_started() -> None:
    """Let the fork server start the next one, if this process is a fork of its."""
    if file := os.environ.pop(STARTING, None):
        Path(os.environ.pop(BEGUN)).touch()
        os.close(int(file))


def main() -> int:
    """Ask the fork server at the first argument's address to run the others; return its exit code."""
    address, *arguments = sys.argv[1:]
    asked = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": str(Path.cwd())}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [LENGTH.pack(len(asked))], [1, 2])
        server.sendall(asked)
        told = server.recv(ENDED.size)
    return ENDED.unpack(told)[0] if len(told) == ENDED.size else 1


if __name__ == "__main__":
    code = main()
    sys.exit(code if code >= 0 else 128 - code)
