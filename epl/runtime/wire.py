"""JSON messages over TCP, one per line: the transport of the control channel.

Plain asyncio rather than gRPC, which was tried: both work beside MPI and TensorFlow
and answer in a fraction of a millisecond, but gRPC holds a thread per connected rank
on rank 0, writes "skipping fork() handlers" to stderr whenever a script forks, and
hides a broken connection behind reconnection. Here an end of file is the fact itself.
"""

import asyncio
import contextlib
import hmac
import json
import os
import socket
from typing import Any, Callable, Dict, Optional, Set

Message = Dict[str, Any]

GREETING_LIMIT = 4096
"""Bytes of the first line; a stranger can't fill the memory."""

MESSAGE_LIMIT = 1 << 28

_open_sockets: Set[int] = set()


def _close_in_child() -> None:
    """A forked child (a data worker) must not hold the parent's connections open when the parent dies."""
    for number in list(_open_sockets):
        with contextlib.suppress(OSError):
            os.close(number)
    _open_sockets.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def remember_socket(number: int) -> None:
    """Close this file descriptor in forked children."""
    _open_sockets.add(number)


def forget_socket(number: int) -> None:
    _open_sockets.discard(number)


class Connection(asyncio.Protocol):
    """One end of a connection. All methods belong to the event loop's thread."""

    def __init__(self, on_message: Callable[["Connection", Message], None], on_lost: Callable[["Connection"], None], limit: int):
        """Args:
        on_message: called with this connection and each message.
        on_lost: called when the connection has ended, for whatever reason.
        limit: bytes that a message may have.
        """
        self._on_message = on_message
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._scanned = 0
        self._socket = -1
        self._limit = limit
        self.transport: Optional[asyncio.Transport] = None
        self.rank: Optional[int] = None
        """The rank at the other end, once it is known."""

    def admit(self, rank: int, on_message: Callable[["Connection", Message], None], limit: int) -> None:
        """Name the peer, which has identified itself, and pass its messages on from now on."""
        self.rank = rank
        self._on_message = on_message
        self._limit = limit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        handle = transport.get_extra_info("socket")
        if handle is not None:
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = handle.fileno()
            remember_socket(self._socket)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            end = self._buffer.find(b"\n", self._scanned)
            if end < 0:
                self._scanned = len(self._buffer)
                if self._scanned > self._limit:
                    self.abort()
                return
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._scanned = 0
            try:
                message = json.loads(line.decode())
            except ValueError:
                message = None
            if not isinstance(message, dict) or len(line) > self._limit:
                self.abort()  # no peer of ours writes this
                return
            self._on_message(self, message)

    def connection_lost(self, error: Optional[Exception]) -> None:
        forget_socket(self._socket)
        self._on_lost(self)

    def send(self, message: Message) -> None:
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(line)

    @property
    def unsent(self) -> int:
        """Bytes that the network has not taken yet."""
        if self.transport is None or self.transport.is_closing():
            return 0
        return self.transport.get_write_buffer_size()

    def close(self) -> None:
        """Close after everything is sent."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def same_token(given: Any, expected: str) -> bool:
    """Compare in constant time; `given` comes from the network."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())
