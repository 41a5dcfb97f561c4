"""The control channel: what the ranks tell each other beside the collectives.

Rank 0 runs a small server (`epl.runtime.hub`), the others hold one TCP connection to
it. A thread per process sends heartbeats with the program that the process is in;
rank 0 judges by them (`epl.runtime.judge`) and tells all ranks when the job is broken.
"""

import asyncio
import json
import os
import secrets
import socket
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from epl.errors import BackendError, EplError, StallError
from epl.runtime import network
from epl.runtime.hub import Hub
from epl.runtime.judge import Trouble
from epl.runtime.speak import say
from epl.runtime.wire import GREETING_LIMIT, MESSAGE_LIMIT, Connection, Message, encode, forget_socket, remember_socket, same_token

HEARTBEAT_SECONDS = 1.0
CONNECT_SECONDS = 60.0
GOODBYE_SECONDS = 5.0
_REMEMBERED = 16

Place = Tuple[int, Optional[str], int, float]
"""Number of entries so far, the program inside of which this rank is, its step, and since when."""

Result = Tuple[str, str, int]
"""Kind ("agreed", "decided"), topic and running number."""


class ControlChannel:
    """One rank's end of the channel. All public methods are thread-safe.

    Every rank enters the same parallel programs and asks for the same agreements and
    decisions, in the same order; that is what the judging relies on. Programs that a
    rank runs for itself are not entered here.
    """

    def __init__(self, backend: Any, stall_timeout: float = 60.0):
        """Args:
        backend: a connected `Backend`, for the rank, the size and the exchange of the address.
        stall_timeout: seconds without a sign of life after which a rank counts as stopped.
        """
        self.rank: int = backend.rank
        self.size: int = backend.size
        self.trouble: Optional[Trouble] = None
        """Why the job is broken, once it is."""

        self.raised = False
        """Whether a caller got an exception about the trouble, and so may end the process in an orderly way."""

        self.failed_here = False
        """Whether `fail` was called."""

        self._backend = backend
        self._stall_timeout = float(stall_timeout)
        self._beat = min(HEARTBEAT_SECONDS, self._stall_timeout / 4)
        self._place: Place = (0, None, 0, time.monotonic())
        self._ring: List[Tuple[int, str, int]] = [(0, "", 0)] * _REMEMBERED
        self._thread_of_programs: Optional[int] = None
        self._changed = threading.Condition()
        self._numbers: Dict[Tuple[str, str], int] = {}
        self._results: Dict[Result, Any] = {}
        self._reports: Dict[int, str] = {}
        self._note = ""
        self._closed = False
        """Whether all ranks have said goodbye."""

        self._over = False
        """Whether this end has been shut, after which nothing is reported."""

        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._thread: Optional[threading.Thread] = None
        self._server: Optional[Any] = None
        self._listener: Optional[socket.socket] = None
        self._hub: Optional[Hub] = None
        self._peers: Dict[int, Connection] = {}
        self._connection: Optional[Connection] = None
        self._welcome = threading.Event()
        self._chief_heard = time.monotonic()
        self._chief_doing = "rank 0"
        self._last_beat = time.monotonic()

    # Opening

    def start(self) -> None:
        """Connect all ranks; collective. Raises BackendError that names who can't reach whom."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="epl-control", daemon=True)
        self._thread.start()
        if self.rank == 0:
            offer = self._offer()
            self._backend.broadcast_bytes(json.dumps(offer).encode(), 0)
        else:
            offer = json.loads(self._backend.broadcast_bytes(b"", 0).decode())
        if "error" in offer:
            raise BackendError(offer["error"])
        if self.rank != 0:
            self._connect(offer)
        if not self._welcome.wait(CONNECT_SECONDS):
            raise BackendError(self._not_connected(offer))
        self._chief_heard = self._last_beat = time.monotonic()
        self._call(self._heartbeat)

    def _run_loop(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function in the loop's thread; nothing once the loop is closed."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass

    def _offer(self) -> Dict[str, Any]:
        """Rank 0: start the server; where the others find it, or {"error": text}."""
        assert self._loop is not None
        # Only who is on this machine needs to reach it when all ranks are here.
        local = self._backend.single_machine
        try:
            self._listener = network.listening_socket("127.0.0.1" if local else "0.0.0.0", 0)
        except OSError as error:
            return {"error": "rank 0 can't open the control channel: %s" % error}
        remember_socket(self._listener.fileno())
        port = self._listener.getsockname()[1]
        token = secrets.token_hex(32)
        self._hub = Hub(self.size, self._stall_timeout, self._send_to, self._send_to_all, lambda text: say(0, text))
        self._hub.joined(0, where())

        def stranger(connection: Connection, message: Message) -> None:
            self._greeted(connection, message, token)

        def accept() -> Connection:
            connection = Connection(stranger, self._peer_lost)
            connection.limit = GREETING_LIMIT
            return connection

        async def serve() -> None:
            assert self._loop is not None
            self._server = await self._loop.create_server(accept, sock=self._listener)

        asyncio.run_coroutine_threadsafe(serve(), self._loop).result()
        addresses = ["127.0.0.1"] if local else _reachable_addresses()
        return {"addresses": addresses, "port": port, "token": token}

    def _greeted(self, connection: Connection, message: Message, token: str) -> None:
        """Rank 0: the first message of a new connection. Only a peer with the token is let in."""
        rank = message.get("rank")
        if not same_token(message.get("token"), token) or not isinstance(rank, int) or not 0 < rank < self.size or rank in self._peers:
            connection.abort()
            return
        assert self._hub is not None
        connection.rank = rank
        connection.limit = MESSAGE_LIMIT
        connection.set_handler(self._peer_said)
        self._peers[rank] = connection
        self._hub.joined(rank, str(message.get("where")))
        if len(self._peers) == self.size - 1:
            self._send_to_all({"type": "welcome"})

    def _connect(self, offer: Dict[str, Any]) -> None:
        """Other ranks: connect to the first address of rank 0 that answers."""
        assert self._loop is not None
        problems = []
        for address in offer["addresses"]:
            try:
                handle = socket.create_connection((address, offer["port"]), timeout=5)
            except OSError as error:
                problems.append("%s: %s" % (address, error))
                continue
            handle.setblocking(False)
            connection = Connection(lambda _, message: self._received(message), self._chief_lost)
            self._connection = connection
            asyncio.run_coroutine_threadsafe(self._loop.create_connection(lambda: connection, sock=handle), self._loop).result()
            self._call(connection.send, {"token": offer["token"], "rank": self.rank, "where": where()})
            return
        raise BackendError(
            "rank %d (%s) can't reach the control channel of rank 0 at port %d of %s; open it in the firewall, or choose the interface with "
            "HOROVOD_GLOO_IFACE" % (self.rank, where(), offer["port"], "; ".join(problems))
        )

    def _not_connected(self, offer: Dict[str, Any]) -> str:
        if self.rank == 0:
            missing = [str(rank) for rank in range(1, self.size) if rank not in self._peers]
            who = "the ranks %s have" % ", ".join(missing[:16])
        else:
            who = "some rank has"
        return "%s not reached the control channel of rank 0 at %s, port %d, within %.0f s; check firewalls between the machines" % (
            who,
            ", ".join(offer["addresses"]),
            offer["port"],
            CONNECT_SECONDS,
        )

    # The hot path

    def enter(self, program: str, step: int) -> None:
        """Say that this rank enters a parallel program; takes well below a microsecond."""
        number = self._place[0] + 1
        self._ring[number % _REMEMBERED] = (number, program, step)
        self._thread_of_programs = threading.get_ident()
        self._place = (number, program, step, time.monotonic())

    def leave(self) -> None:
        """Say that this rank is outside of parallel programs again."""
        self._place = (self._place[0], None, 0, time.monotonic())

    @property
    def place(self) -> Place:
        return self._place

    # Agreements

    def agree(self, topic: str, payload: Dict[str, Any], timeout: Optional[float] = None) -> List[Dict[str, Any]]:
        """Exchange a payload with all ranks; blocks until each has posted its next one for this topic.

        Args:
          topic: what is agreed on; each topic counts its agreements for itself.
          payload: anything that JSON can express.
          timeout: seconds. Without one it waits as long as the missing ranks live and do
            not contradict: a rank that evaluates for ten minutes is waited for.

        Returns the payloads by rank.
        Raises StallError when a rank is silent or the timeout passes, DivergenceError when
        a missing rank is itself blocked elsewhere, RankFailedError when one failed or left.
        """
        number = self._next_number("agree", topic)
        self._post(dict(self._where(), type="post", topic=topic, seq=number, payload=payload))
        payloads = self._await(("agreed", topic, number), timeout)
        return payloads * self.size if len(payloads) == 1 else payloads

    def decide(self, topic: str, value: Any = None, timeout: Optional[float] = None) -> Any:
        """Rank 0's value. Rank 0 passes it and does not wait; the others pass None and wait for it.

        Errors are those of `agree`.
        """
        number = self._next_number("decide", topic)
        if self.rank == 0:
            self._post(dict(self._where(), type="decide", topic=topic, seq=number, value=value))
            return value
        key = ("decided", topic, number)
        with self._changed:
            there = key in self._results
        if not there:
            self._post(dict(self._where(), type="want", topic=topic, seq=number))
        return self._await(key, timeout)

    def _next_number(self, kind: str, topic: str) -> int:
        with self._changed:
            number = self._numbers.get((kind, topic), 0)
            self._numbers[(kind, topic)] = number + 1
            return number

    def _await(self, key: Result, timeout: Optional[float]) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while key not in self._results:
                if self.trouble is not None:
                    self.raised = True
                    raise self.trouble.error()
                if self._over:
                    raise EplError("the control channel is closed; %s %r can't be asked for any more" % (key[0], key[1]))
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            else:
                return self._results.pop(key)
        self._post({"type": "withdraw"})
        raise StallError(
            "rank %d has waited %g s for %s %r (number %d); what each rank was doing:\n%s"
            % (self.rank, timeout or 0.0, "the agreement" if key[0] == "agreed" else "rank 0's decision", key[1], key[2], self.report())
        )

    def report(self, timeout: float = 3.0) -> str:
        """What every rank is doing, a line each, by rank 0's book."""
        number = self._next_number("report", "")
        self._post({"type": "ask", "id": number})
        deadline = time.monotonic() + timeout
        with self._changed:
            while number not in self._reports and self.trouble is None and deadline > time.monotonic():
                self._changed.wait(deadline - time.monotonic())
            return self._reports.pop(number, "  rank 0 does not answer (it was last seen when %s)" % self._chief_doing)

    # Ending

    def fail(self, text: str, follows: bool = False) -> None:
        """Tell everybody that this rank failed, and wait a moment until it is on its way.

        Args:
          text: what happened; a traceback.
          follows: whether it looks like the consequence of another rank's failure.
        """
        self.failed_here = True
        self._post(dict(self._where(), type="fail", text=text[-16384:], follows=follows))
        self._flush(2.0)

    def note(self, text: str) -> None:
        """Remember an exception that ended a thread; reported if this rank leaves while it is needed."""
        self._note = text[-8192:]

    def leave_job(self) -> None:
        """Say goodbye and wait for the goodbye of all others. Raises the job's error when it breaks meanwhile."""
        self._post(dict(self._where(), type="bye", note=self._note))
        with self._changed:
            while not self._closed:
                if self.trouble is not None:
                    self.raised = True
                    raise self.trouble.error()
                if self._over:
                    return
                self._changed.wait()

    def close(self, orderly: bool = True) -> None:
        """End the channel; orderly after goodbyes by all ranks, else at once."""
        if self._loop is None or self._over:
            return
        try:
            if orderly and not self._closed:
                self.leave_job()
        finally:
            if self._closed and self.rank == 0:
                # The others close first, so that none takes the end of rank 0 for a broken connection.
                self._wait_until(lambda: not self._peers, GOODBYE_SECONDS)
            with self._changed:
                self._over = True
                self._changed.notify_all()
            self._call(self._shut)
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(GOODBYE_SECONDS)

    def wait_for_trouble(self, timeout: Optional[float] = None) -> Optional[Trouble]:
        """Block until the job is broken; None after the timeout or when the channel is closed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self.trouble is None and not self._over:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            return self.trouble

    def _flush(self, seconds: float) -> None:
        done = threading.Event()
        self._call(done.set)  # behind the message in the loop's queue
        done.wait(seconds)
        self._wait_until(lambda: self._unsent() == 0, seconds)

    def _unsent(self) -> int:
        connections = list(self._peers.values()) + ([self._connection] if self._connection is not None else [])
        return sum(connection.unsent for connection in connections)

    @staticmethod
    def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _shut(self) -> None:
        """In the loop: close everything and stop."""
        assert self._loop is not None
        if self._listener is not None:
            forget_socket(self._listener.fileno())
        if self._server is not None:
            self._server.close()
        for connection in list(self._peers.values()) + ([self._connection] if self._connection is not None else []):
            connection.close()
        self._loop.call_later(0.05, self._loop.stop)

    # In the loop's thread

    def _where(self) -> Message:
        """This rank's place, for the front of a message."""
        number, program, step, since = self._place
        message: Message = {"entry": number, "program": program, "step": step, "age": time.monotonic() - since}
        message["ordered"] = self._thread_of_programs in (None, threading.get_ident())
        return message

    def _post(self, message: Message) -> None:
        self._call(self._post_in_loop, message)

    def _post_in_loop(self, message: Message) -> None:
        if self._hub is not None:
            self._hub.received(0, message)
        elif self._connection is not None:
            self._connection.send(message)

    def _heartbeat(self) -> None:
        assert self._loop is not None
        if self._over:
            return
        self._loop.call_later(self._beat, self._heartbeat)
        now = time.monotonic()
        late, self._last_beat = now - self._last_beat, now
        message = dict(self._where(), type="state")
        if message["age"] > 1.0:
            message["recent"] = [entry for entry in self._ring if entry[0]]
        if self._hub is not None:
            self._hub.received(0, message)
            self._hub.tick()
            line = encode({"type": "tick", "chief": self._hub.describe_chief()})
            for connection in list(self._peers.values()):
                connection.send_line(line)
            return
        self._post_in_loop(message)
        if late > max(3.0, self._stall_timeout / 4):
            self._chief_heard += late  # it was this process that stood still
        silence = now - self._chief_heard
        if silence > self._stall_timeout and self.trouble is None and not self._closed:
            text = "rank 0 has sent no sign of life for %.0f s (stopped, swapped out, or cut off; cluster.stall_timeout is %g s); it was last seen when %s"
            self._set_trouble(Trouble("silent", (0,), text % (silence, self._stall_timeout, self._chief_doing)))

    def _send_to(self, rank: int, message: Message) -> None:
        if rank == 0:
            self._received(message)
        elif rank in self._peers:
            self._peers[rank].send(message)

    def _send_to_all(self, message: Message) -> None:
        line = encode(message)
        for connection in list(self._peers.values()):
            connection.send_line(line)
        self._received(message)

    def _peer_said(self, connection: Connection, message: Message) -> None:
        if self._hub is not None and connection.rank is not None:
            self._hub.received(connection.rank, message)

    def _peer_lost(self, connection: Connection) -> None:
        rank = connection.rank
        if rank is None or self._peers.get(rank) is not connection:
            return  # a stranger
        del self._peers[rank]
        if self._hub is not None and not self._over:
            self._hub.lost(rank)

    def _chief_lost(self, connection: Connection) -> None:
        if not self._over and not self._closed and self.trouble is None and self._welcome.is_set():
            text = "rank 0 died: its connection broke without a goodbye (killed, out of memory, crashed, or its machine is gone); it was last seen when %s"
            self._set_trouble(Trouble("lost", (0,), text % self._chief_doing))

    def _set_trouble(self, trouble: Trouble) -> None:
        with self._changed:
            self.trouble = self.trouble or trouble
            self._changed.notify_all()

    def _received(self, message: Message) -> None:
        """A message of the hub."""
        kind = message.get("type")
        self._chief_heard = time.monotonic()
        if kind in ("agreed", "decided"):
            if kind == "decided" and self.rank == 0:
                return
            value = message["payloads"] if kind == "agreed" else message.get("value")
            with self._changed:
                self._results[(kind, message["topic"], message["seq"])] = value
                self._changed.notify_all()
        elif kind == "tick":
            self._chief_doing = str(message.get("chief"))
        elif kind == "trouble":
            self._set_trouble(Trouble.from_json(message))
        elif kind == "report":
            with self._changed:
                self._reports[int(message["id"])] = str(message["text"])
                self._changed.notify_all()
        elif kind == "closed":
            with self._changed:
                self._closed = True
                self._changed.notify_all()
        elif kind == "welcome":
            self._welcome.set()


def where() -> str:
    """Where this process runs, for messages."""
    return "%s, process %d" % (socket.gethostname(), os.getpid())


def _reachable_addresses() -> List[str]:
    """The addresses at which other machines may reach this one, the chosen interface's first."""
    chosen = [os.environ.get(name, "") for name in ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")]
    found = [one for one in network.local_interfaces() if not network.is_loopback(one.address)]
    found.sort(key=lambda one: one.name not in chosen)
    addresses = [one.address for one in found]
    if not addresses:
        addresses = [network.address_towards("192.0.2.1") or socket.gethostbyname(socket.gethostname())]
    return addresses + ["127.0.0.1"]
