"""Free ports for servers, and for processes that train together."""

import contextlib
import os
import random
import socket


def free_ports(number: int) -> list[int]:
    """Ports of this machine that are free, all different.

    They lie below those that the kernel gives to connections, which another test could get before this one uses them.
    The processes of pytest-xdist draw from different ports.
    """
    drawn = random.SystemRandom()
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number_of_this = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports: set[int] = set()
    while len(ports) < number:
        port = drawn.randrange(16_000 + number_of_this, 32_000, processes)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)
