"""Readers that request an endless answer and read nothing of it."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from .contestant import Connect, Plain, Way
from .process import Trouble

_BOUND = 10.0


@contextmanager
def stalled(way: Way, count: int, path: str) -> Iterator[int]:
    """Keeps this many of them until the block is left; or as many as got an answer, if a further one does not."""
    with ExitStack() as held:
        standing = 0
        for index in range(count):
            try:
                held.enter_context(_reader(way, path))
            except TimeoutError:
                # Earlier readers hold the route up: this is the measured effect, and no reason to end.
                break
            except OSError as error:
                raise Trouble(f"stalled reader {index + 1} of {count}: {error}") from error
            standing += 1
        yield standing


def _reader(way: Way, path: str) -> ssl.SSLSocket:
    if isinstance(way, Plain):
        raise Trouble("the app itself is not asked to stall")
    context = ssl.create_default_context(cafile=str(way.ca))
    if isinstance(way, Connect) and way.certificate is not None:
        context.load_cert_chain(way.certificate, way.key)
    plain = socket.create_connection(("127.0.0.1", way.port), timeout=_BOUND)
    reader = context.wrap_socket(plain, server_hostname="localhost")
    host = "localhost"
    if isinstance(way, Connect):
        host = way.target
        reader.sendall(f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        _head(reader, b" 200 ")
    reader.sendall(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    # It has begun: from here on nothing is read.
    _head(reader, b" 200 ", whole=False)
    return reader


def _head(reader: ssl.SSLSocket, wanted: bytes, *, whole: bool = True) -> None:
    """Reads up to the head's end, byte by byte, so that no byte after it is read."""
    head = b""
    while not head.endswith(b"\r\n\r\n" if whole else b"\r\n"):
        byte = reader.recv(1)
        if not byte:
            raise ConnectionError("the connection ended in an answer's head")
        head += byte
    if wanted not in head.split(b"\r\n")[0] + b" ":
        raise ConnectionError(head.decode(errors="replace"))
