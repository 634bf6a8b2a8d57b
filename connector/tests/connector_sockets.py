"""What the tests over real sockets share: an address, a free port, patience in seconds."""

import socket

HOST = "127.0.0.1"
SOON = 5.0


def free_port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
