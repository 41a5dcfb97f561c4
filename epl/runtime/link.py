"""The connections of the control channel: a star around rank 0, served by one thread per process.

Knows ranks and messages, not what they mean.
"""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from epl.errors import BackendError
from epl.runtime import network
from epl.runtime.wire import GREETING_LIMIT, MESSAGE_LIMIT, Connection, Message, encode, forget_socket, remember_socket, same_token

CONNECT_SECONDS = 60.0
"""How long all ranks may take to connect once the address of rank 0 is known to them."""

ATTEMPT_SECONDS = 5.0


class Link:
    """This rank's connections: on rank 0 one to every other rank, elsewhere one to rank 0.

    The handlers are called in the link's own thread, which also runs what `call` is given.
    """

    def __init__(self, rank: int, size: int, on_message: Callable[[int, Message], None], on_lost: Callable[[int], None]):
        """Args:
        rank: this rank.
        size: number of ranks.
        on_message: called with the sender and its message.
        on_lost: called with the rank whose connection has ended.
        """
        self._rank = rank
        self._size = size
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="epl-control", daemon=True)
        self._peers: Dict[int, Connection] = {}
        self._complete = threading.Event()
        self._listener: Optional[socket.socket] = None
        self._server: Optional[asyncio.AbstractServer] = None

    # Opening

    def open(self, broadcast: Callable[[bytes, int], bytes], single_machine: bool) -> None:
        """Connect all ranks; collective.

        Args:
          broadcast: `Backend.broadcast_bytes`; carries rank 0's address and token.
          single_machine: all ranks are on this machine, so nobody else needs to reach rank 0.

        Raises BackendError that names who can't reach whom.
        """
        self._thread.start()
        if self._rank == 0:
            offer = self._offer(single_machine)
            broadcast(json.dumps(offer).encode(), 0)
        else:
            offer = json.loads(broadcast(b"", 0).decode())
        if "error" in offer:
            raise BackendError(offer["error"])
        if self._rank != 0:
            self._connect(offer)
        if not self._complete.wait(CONNECT_SECONDS):
            raise BackendError(self._incomplete(offer))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _offer(self, single_machine: bool) -> Dict[str, Any]:
        """Rank 0: start to listen; where the others find it, or {"error": text}, which they must learn too."""
        try:
            self._listener = network.listening_socket("127.0.0.1" if single_machine else "0.0.0.0", 0)
        except OSError as error:
            return {"error": "rank 0 (%s) can't open the control channel: %s" % (where(), error)}
        remember_socket(self._listener.fileno())
        token = secrets.token_hex(32)

        def accept() -> Connection:
            return Connection(lambda connection, message: self._greeted(connection, message, token), self._ended, GREETING_LIMIT)

        async def serve() -> None:
            self._server = await self._loop.create_server(accept, sock=self._listener)

        asyncio.run_coroutine_threadsafe(serve(), self._loop).result()
        addresses = ["127.0.0.1"] if single_machine else _reachable_addresses()
        return {"addresses": addresses, "port": self._listener.getsockname()[1], "token": token}

    def _greeted(self, connection: Connection, message: Message, token: str) -> None:
        """Rank 0: the first message of a new connection. Only a rank with the token is let in."""
        rank = message.get("rank")
        if not same_token(message.get("token"), token) or not isinstance(rank, int) or not 0 < rank < self._size or rank in self._peers:
            connection.abort()
            return
        connection.admit(rank, self._heard, MESSAGE_LIMIT)
        self._peers[rank] = connection
        self._on_message(rank, {"type": "joined", "where": message.get("where")})
        if len(self._peers) == self._size - 1:
            self._complete.set()
            self.send_all({"type": "welcome"})

    def _connect(self, offer: Dict[str, Any]) -> None:
        """Other ranks: connect to the first address of rank 0 that answers."""
        connection = Connection(self._heard, self._ended, MESSAGE_LIMIT)
        connection.rank = 0
        problems = []
        for address in offer["addresses"]:
            try:
                handle = socket.create_connection((address, offer["port"]), timeout=ATTEMPT_SECONDS)
            except OSError as error:
                problems.append("%s: %s" % (address, error))
                continue
            handle.setblocking(False)
            self._peers[0] = connection
            asyncio.run_coroutine_threadsafe(self._loop.create_connection(lambda: connection, sock=handle), self._loop).result()
            self.call(connection.send, {"token": offer["token"], "rank": self._rank, "where": where()})
            return
        raise BackendError(
            "rank %d (%s) can't reach the control channel of rank 0 at port %d of %s; open it in the firewall, or choose the interface with "
            "HOROVOD_GLOO_IFACE" % (self._rank, where(), offer["port"], "; ".join(problems))
        )

    def _incomplete(self, offer: Dict[str, Any]) -> str:
        who = "some rank has"
        if self._rank == 0:
            missing = [str(rank) for rank in range(1, self._size) if rank not in self._peers]
            who = "the ranks %s have" % ", ".join(missing[:16])
        text = "%s not reached the control channel of rank 0 at %s, port %d, within %.0f s; check the firewalls between the machines"
        return text % (who, ", ".join(offer["addresses"]), offer["port"], CONNECT_SECONDS)

    # From any thread

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function in the link's thread; nothing happens once the link is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def flush(self, seconds: float) -> None:
        """Wait until everything given to `call` before is done and sent, at most so long."""
        done = threading.Event()
        self.call(done.set)
        done.wait(seconds)
        self._wait_until(lambda: not any(connection.unsent for connection in list(self._peers.values())), seconds)

    def wait_for_departures(self, seconds: float) -> None:
        """Rank 0: wait until the others have closed, at most so long."""
        self._wait_until(lambda: not self._peers, seconds)

    @staticmethod
    def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)

    def close(self, seconds: float) -> None:
        """Close all connections and end the thread."""
        self.call(self._shut)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    # In the link's thread

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        self._loop.call_later(seconds, function)

    def send(self, rank: int, message: Message) -> None:
        self.send_line(rank, encode(message))

    def send_line(self, rank: int, line: bytes) -> None:
        """Send an encoded message."""
        connection = self._peers.get(rank)
        if connection is not None:
            connection.send_line(line)

    def send_all(self, message: Message) -> None:
        """Send to all connected ranks, encoding once."""
        line = encode(message)
        for connection in list(self._peers.values()):
            connection.send_line(line)

    def _heard(self, connection: Connection, message: Message) -> None:
        if message.get("type") == "welcome":
            self._complete.set()
        elif connection.rank is not None:
            self._on_message(connection.rank, message)

    def _ended(self, connection: Connection) -> None:
        rank = connection.rank
        if rank is not None and self._peers.get(rank) is connection:  # else a stranger's
            del self._peers[rank]
            if self._complete.is_set():
                self._on_lost(rank)

    def _shut(self) -> None:
        if self._listener is not None:
            forget_socket(self._listener.fileno())
        if self._server is not None:
            self._server.close()
        for connection in list(self._peers.values()):
            connection.close()
        self._loop.call_later(0.02, self._loop.stop)


def where() -> str:
    """Where this process runs, for messages."""
    return "%s, process %d" % (socket.gethostname(), os.getpid())


def _reachable_addresses() -> List[str]:
    """The addresses at which other machines may reach this one, the chosen interface's first."""
    chosen = [os.environ.get(name, "") for name in ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")]
    found = [one for one in network.local_interfaces() if not network.is_loopback(one.address)]
    found.sort(key=lambda one: one.name not in chosen)
    addresses = [one.address for one in found] or [network.address_towards("192.0.2.1") or network.resolve(socket.gethostname())]
    return addresses + ["127.0.0.1"]
