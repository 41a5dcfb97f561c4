"""The vigil: a rank that dies while Horovod starts is named by all others.

Ranks that only know TF_CONFIG have no launcher that ends them together, and the control
channel opens only after `hvd.init()`, which blocks in C++ and knows no names. So from
the rendezvous until the control channel is open, each rank holds a connection to the
first worker, at the address of the store that it knows already. When one ends or falls
silent, the first worker tells the others which; each says so and ends its process.
"""

import asyncio
import contextlib
import os
import socket
import threading
import time
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set

from epl.runtime.gloo import ask_for_vigil
from epl.runtime.roll import Reply, Roll
from epl.runtime.speak import say
from epl.runtime.watchdog import PEER_FAILED_EXIT_CODE, flush_stdio
from epl.runtime.wire import GREETING_LIMIT, Connection, Message

BEAT_SECONDS = 1.0
ATTEMPT_SECONDS = 5.0
HOLD_SECONDS = 6.0
"""How long a rank whose Horovod gives up waits to hear which rank is the cause."""

QUIET_SECONDS = 4.0
"""The silence that makes a rank the cause when Horovod has given up somewhere; less than HOLD_SECONDS."""

CONFIRM_SECONDS = 1.5
"""The same wait of a rank that has got an exception."""

FAREWELL_SECONDS = 2.0
"""How long the first worker lives on until the others have heard the news."""

_LIMIT = 1 << 16
_TEXT = 2000
_DIED = "%s died while Horovod started: its connection broke without a goodbye (killed, out of memory, crashed, or its machine is gone)"
_SILENT = "%s has sent no sign of life for %.0f s while Horovod started (stopped, swapped out, or cut off from the network; %s)"
_FAILED = "%s failed while Horovod started: %s"


class Vigil:
    """One rank's part, with a thread of its own. The first worker's is a `Keeper`, each other's a `Member`.

    Public methods may be called by any thread, the others belong to that of the vigil.
    """

    def __init__(self, rank: int, hosts: Sequence[str], others: Iterable[int], stall_timeout: float, end: Callable[[int], None] = os._exit):
        """Args:
        rank: this rank.
        hosts: the addresses of all ranks, for messages.
        others: the ranks that this one hears.
        stall_timeout: seconds of silence after which one of them counts as stopped.
        end: ends the process with an exit code; tests pass their own.
        """
        self.rank = rank
        self._hosts = list(hosts)
        self._stall_timeout = self._patience = float(stall_timeout)
        self._beat = min(BEAT_SECONDS, self._stall_timeout / 4)
        self._end = end
        self._armed = False
        self._over = False
        """Whether this rank needs the vigil no more, and is not ended by it."""

        self._news = threading.Event()
        self._ended = threading.Event()
        self._heard: Dict[int, float] = dict.fromkeys(others, 0.0)
        self._last_tick = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="epl-vigil", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._call(self._tick)

    def arm(self) -> None:
        """From now on a rank that is missing breaks the job: all have met."""
        self._call(self._arm)

    def hold(self, seconds: float = HOLD_SECONDS) -> None:
        """Horovod gives up: wait to hear which rank is the cause, and then for the end of this process by the vigil."""
        self._call(self._give_up)
        if self._news.wait(seconds):
            self._ended.wait(FAREWELL_SECONDS + 1.0)

    def started(self) -> None:
        """This rank has started and is watched over by the control channel; the vigil ends when all have."""
        if not self._over:
            self._over = True
            self._call(self._say_started)

    def failed(self, error: BaseException) -> None:
        """This rank could not start: tell the others why, unless it is because of one of them, which ends this process."""
        if self._over:
            return
        self.hold(CONFIRM_SECONDS)
        self._over = True
        text = "%s: %s" % (type(error).__name__, (str(error).splitlines() or [""])[0][:_TEXT])
        said = threading.Event()
        self._call(self._say_failed, text)
        if self._call(said.set):
            said.wait(1.0)

    def close(self) -> None:
        """End the vigil at once."""
        self._over = True
        self._call(self._shut)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> bool:
        """Run a function in the vigil's thread; whether there is one."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)
            return True
        return False

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._heard = dict.fromkeys(self._heard, time.monotonic())

    def _tick(self) -> None:
        """Say that this rank lives, and look who does not."""
        self._loop.call_later(self._beat, self._tick)
        now = time.monotonic()
        late, self._last_tick = now - self._last_tick, now
        if late > max(3.0, self._stall_timeout / 4):
            self._heard = {rank: heard + late for rank, heard in self._heard.items()}  # it was this process that stood still
        for connection in self._connections():
            connection.send({"type": "beat"})
        if self._armed:
            for rank, heard in list(self._heard.items()):
                if now - heard > self._patience:
                    limit = "cluster.stall_timeout is %g s" % self._stall_timeout if self._patience == self._stall_timeout else "Horovod has given up"
                    self._broken(rank, _SILENT % (self._who(rank), now - heard, limit))
                    break

    def _give_up(self) -> None:
        self._patience = min(self._patience, QUIET_SECONDS)

    def _who(self, rank: int) -> str:
        process = self._process_of(rank)
        return "rank %d (%s%s)" % (rank, self._hosts[rank], ", " + process if process else "")

    def _leave(self, text: str) -> bool:
        """Say why this process ends; whether it does."""
        if self._over or self._news.is_set():
            return False
        self._news.set()
        say(self.rank, "the job is broken: %s" % text)
        return True

    def _finish(self) -> None:
        flush_stdio()
        self._end(PEER_FAILED_EXIT_CODE)
        self._ended.set()
        self._shut()

    def _shut(self) -> None:
        for connection in self._connections():
            connection.close()
        self._loop.call_later(0.02, self._loop.stop)

    def _connections(self) -> List[Connection]:
        raise NotImplementedError

    def _process_of(self, rank: int) -> Optional[str]:
        raise NotImplementedError

    def _broken(self, rank: int, text: str) -> None:
        """A rank breaks the job."""
        raise NotImplementedError

    def _say_started(self) -> None:
        raise NotImplementedError

    def _say_failed(self, text: str) -> None:
        raise NotImplementedError


class Seat(NamedTuple):
    """A process that is connected with the first worker."""

    rank: int
    nonce: str


class Keeper(Vigil):
    """The first worker's part: it hears all others and tells them the news."""

    def __init__(self, hosts: Sequence[str], roll: Roll, stall_timeout: float, end: Callable[[int], None] = os._exit):
        """See `Vigil`; `roll` says which process is which rank."""
        super().__init__(0, hosts, range(1, len(hosts)), stall_timeout, end)
        self._roll = roll
        self._seats: Dict[Connection, Seat] = {}
        self._started: Set[int] = set()
        self._told: Set[Connection] = set()
        self._announced = False

    def hello(self, message: Mapping[str, Any]) -> Reply:
        """Enter a worker in the roll; called by the store."""
        answer = self._roll.hello(message)
        if answer["state"] == "ready":
            self.arm()
        return answer

    def admit(self, handle: socket.socket) -> None:
        """Take over a connection; called by the store."""
        if not self._call(self._adopt, handle):
            handle.close()

    def _adopt(self, handle: socket.socket) -> None:
        handle.setblocking(False)
        connection = Connection(self._greeted, self._left, GREETING_LIMIT)
        self._loop.create_task(self._loop.create_connection(lambda: connection, sock=handle))

    def _arm(self) -> None:
        if not self._armed:
            for connection, seat in self._seats.items():
                if self._roll.holds(*seat):
                    connection.send({"type": "complete"})  # they may ask the roll much later
        super()._arm()

    def _greeted(self, connection: Connection, message: Message) -> None:
        rank, nonce = message.get("rank"), message.get("nonce")
        if not isinstance(rank, int) or not 0 < rank < len(self._hosts) or not isinstance(nonce, str):
            connection.abort()
            return
        connection.admit(rank, self._received, _LIMIT)
        self._seats[connection] = Seat(rank, nonce)
        connection.send({"type": "welcome", "server": self._roll.nonce, "process": self._roll.process_of(0)})

    def _received(self, connection: Connection, message: Message) -> None:
        seat = self._seats.get(connection)
        if seat is None or not self._roll.holds(*seat):
            return  # has not said hello yet, or another process has its place
        self._heard[seat.rank] = time.monotonic()
        kind = message.get("type")
        if kind == "started":
            self._started.add(seat.rank)
            del self._heard[seat.rank], self._seats[connection]
            self._shut_after_all()
        elif kind == "failed":
            self._broken(seat.rank, _FAILED % (self._who(seat.rank), message.get("text")))
        elif kind == "gives up":
            self._give_up()

    def _left(self, connection: Connection) -> None:
        self._told.discard(connection)
        seat = self._seats.pop(connection, None)
        if seat is not None and self._roll.ended(*seat):
            self._broken(seat.rank, _DIED % self._who(seat.rank))

    def _broken(self, rank: int, text: str) -> None:
        if self._announced:
            return
        self._announced = True
        for connection, seat in self._seats.items():
            if self._roll.holds(*seat):
                connection.send({"type": "news", "text": text})
                if seat.rank != rank:  # which may hear it when it is woken up
                    self._told.add(connection)
        if self._leave(text):
            self._finish_when_told(time.monotonic() + FAREWELL_SECONDS)

    def _finish_when_told(self, deadline: float) -> None:
        """Go last, so that none takes the end of this process for the cause."""
        if self._told and time.monotonic() < deadline:
            self._loop.call_later(0.02, self._finish_when_told, deadline)
        else:
            self._finish()

    def _connections(self) -> List[Connection]:
        return list(self._seats)

    def _process_of(self, rank: int) -> Optional[str]:
        return self._roll.process_of(rank)

    def _say_started(self) -> None:
        self._started.add(0)
        self._shut_after_all()

    def _shut_after_all(self) -> None:
        if len(self._started) == len(self._hosts):
            self._over = True
            self._shut()

    def _say_failed(self, text: str) -> None:
        self._broken(0, _FAILED % (self._who(0), text))


class Member(Vigil):
    """The part of the other ranks: they hear the first worker."""

    def __init__(self, rank: int, hosts: Sequence[str], nonce: str, stall_timeout: float, end: Callable[[int], None] = os._exit):
        """See `Vigil`; `nonce` is the one of this process in the roll."""
        super().__init__(rank, hosts, (0,), stall_timeout, end)
        self._nonce = nonce
        self._chief_process: Optional[str] = None
        self._connection: Optional[Connection] = None
        self._welcome = threading.Event()
        self.server: Optional[str] = None
        """The nonce of the first worker, while there is a connection with it."""

    def attend(self, address: str, port: int) -> Optional[str]:
        """Connect with the first worker, unless it is done; None, or what is in the way."""
        if self.server is not None:
            return None
        self._welcome.clear()
        try:
            self._call(self._adopt, ask_for_vigil(address, port, ATTEMPT_SECONDS))
        except OSError as error:
            return "%s lets nobody in: %s" % (self._hosts[0], error)
        return None if self._welcome.wait(ATTEMPT_SECONDS) else "%s gives no welcome" % self._hosts[0]

    def go(self) -> None:
        """Let the connection go: that first worker is not the present one."""
        self.server = None
        self._call(self._drop)

    def _adopt(self, handle: socket.socket) -> None:
        self._drop()
        connection = self._connection = Connection(self._received, self._lost, _LIMIT)

        async def greet() -> None:
            await self._loop.create_connection(lambda: connection, sock=handle)
            connection.send({"rank": self.rank, "nonce": self._nonce})

        self._loop.create_task(greet())

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def _received(self, connection: Connection, message: Message) -> None:
        if connection is not self._connection:
            return
        self._heard[0] = time.monotonic()
        if message.get("type") == "welcome":
            self._chief_process = str(message.get("process"))
            self.server = str(message.get("server"))
            self._welcome.set()
        elif message.get("type") == "complete":
            self._arm()
        elif message.get("type") == "news" and self._leave(str(message.get("text"))):
            self._finish()

    def _lost(self, connection: Connection) -> None:
        if connection is self._connection:
            self._connection = self.server = None
            self._look_for_chief()

    def _arm(self) -> None:
        super()._arm()
        self._look_for_chief()

    def _look_for_chief(self) -> None:
        if self._armed and self._connection is None:
            self._broken(0, _DIED % self._who(0))

    def _broken(self, rank: int, text: str) -> None:
        if self._leave(text):
            self._finish()

    def _connections(self) -> List[Connection]:
        return [] if self._connection is None else [self._connection]

    def _process_of(self, rank: int) -> Optional[str]:
        return self._chief_process

    def _give_up(self) -> None:
        super()._give_up()
        self._send({"type": "gives up"})

    def _say_started(self) -> None:
        self._send({"type": "started"})
        self._shut()

    def _say_failed(self, text: str) -> None:
        self._send({"type": "failed", "text": text})

    def _send(self, message: Message) -> None:
        if self._connection is not None:
            self._connection.send(message)
