"""The control channel: what the ranks tell each other beside the collectives.

Rank 0 runs a small server (`epl.runtime.hub`), the others hold one TCP connection to
it. A thread per process sends heartbeats with the program that the process is in;
rank 0 judges by them (`epl.runtime.judge`) and tells all ranks when the job is broken.
"""

import contextlib
import json
import threading
import time
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from epl.errors import EplError, StallError
from epl.runtime.hub import Hub
from epl.runtime.judge import Trouble
from epl.runtime.link import Link, where
from epl.runtime.speak import say
from epl.runtime.wire import Message, encode

HEARTBEAT_SECONDS = 1.0
QUICK_HEARTBEAT_SECONDS = 0.25
"""Of jobs that are small enough for rank 0 to bear it: reports are then fresher."""

QUICK_SIZE = 64
GOODBYE_SECONDS = 5.0
FLUSH_SECONDS = 2.0
_REMEMBERED = 16

Place = Tuple[int, Optional[str], int, float]
"""Number of entries so far, the program inside of which this rank is, its step, and since when."""

Result = Tuple[str, str, int]
"""Kind ("agreed", "decided", "report"), topic and running number."""


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

        self.waiters = 0
        """Number of calls that are blocked in here, and get an exception when the job breaks."""

        self._backend = backend
        self._stall_timeout = float(stall_timeout)
        self._beat = min(QUICK_HEARTBEAT_SECONDS if self.size <= QUICK_SIZE else HEARTBEAT_SECONDS, self._stall_timeout / 4)
        self._place: Place = (0, None, 0, time.monotonic())
        self._ring: List[Tuple[int, str, int]] = [(0, "", 0)] * _REMEMBERED
        self._thread_of_programs: Optional[int] = None
        self._changed = threading.Condition()
        self._numbers: Dict[Tuple[str, str], int] = {}
        self._results: Dict[Result, Any] = {}
        self._note = ""
        self._gone: Set[int] = set()
        self._closed = False
        """Whether all ranks have said goodbye."""

        self._over = False
        """Whether this end has been shut, after which nothing is reported."""

        self._hub: Optional[Hub] = None
        self._link = Link(self.rank, self.size, self._heard, self._lost)
        self._chief_heard = self._last_beat = time.monotonic()
        self._chief_doing = "rank 0"

    def start(self) -> None:
        """Connect all ranks; collective. Raises BackendError that names who can't reach whom."""
        if self.rank == 0:
            self._hub = Hub(self.size, self._stall_timeout, self._send, self._send_all, lambda text: say(0, text))
            self._hub.joined(0, where())
        self._link.open(self._backend.broadcast_bytes, self._backend.single_machine)
        self._chief_heard = self._last_beat = time.monotonic()
        self._link.call(self._heartbeat)

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

    @property
    def last_entry(self) -> Optional[Tuple[int, str, int]]:
        """(number, program, step) of the parallel program that this rank has entered last."""
        number = self._place[0]
        return self._ring[number % _REMEMBERED] if number else None

    def runs_programs_here(self) -> bool:
        """Whether the calling thread is the one that enters the parallel programs."""
        return self._thread_of_programs == threading.get_ident()

    # Agreements

    def agree(self, topic: str, payload: Dict[str, Any], timeout: Optional[float] = None) -> List[Dict[str, Any]]:
        """Exchange a payload with all ranks; blocks until each has posted its next one for this topic.

        Args:
          topic: what is agreed on; each topic counts its agreements for itself.
          payload: anything that JSON can express; tuples arrive as lists.
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
            return json.loads(json.dumps(value))  # what the others get
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
        with self._changed, self._waiting():
            while key not in self._results:
                if self._over:
                    raise EplError("the control channel is closed; %s %r can't be asked for any more" % (key[0], key[1]))
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._wait_or_raise(left, "this rank waited for %s %r (number %d)" % (_kind_of(key), key[1], key[2]))
            else:
                return self._results.pop(key)
        self._post({"type": "withdraw"})
        raise StallError(
            "rank %d has waited %g s for %s %r (number %d); what each rank was doing:\n%s"
            % (self.rank, timeout or 0.0, _kind_of(key), key[1], key[2], self.report())
        )

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self.waiters += 1
        try:
            yield
        finally:
            self.waiters -= 1

    def _wait_or_raise(self, seconds: Optional[float] = None, place: str = "") -> None:
        """Wait for any change; raises the job's trouble, with where this rank was. Needs the lock."""
        if self.trouble is None:
            self._changed.wait(seconds)
        self.raise_trouble(place)

    def raise_trouble(self, place: str = "") -> None:
        """Raise the job's trouble if it is broken; `place` says where this rank was."""
        if self.trouble is not None:
            self.raised = True
            raise self.trouble.error(place)

    def report(self, timeout: float = 3.0) -> str:
        """What every rank is doing, a line each, by rank 0's book."""
        key = ("report", "", self._next_number("report", ""))
        self._post({"type": "ask", "seq": key[2]})
        deadline = time.monotonic() + timeout
        with self._changed:
            while key not in self._results and self.trouble is None and deadline > time.monotonic():
                self._changed.wait(deadline - time.monotonic())
            return str(self._results.pop(key, "  rank 0 does not answer; when it was last heard, %s" % self._chief_doing))

    # Ending

    def caused(self, trouble: Trouble) -> bool:
        """Whether this rank itself broke the job by failing or by leaving."""
        return self.rank in trouble.ranks and trouble.kind in ("failed", "left")

    def fail(self, text: str, follows: bool = False) -> None:
        """Tell everybody that this rank failed, and wait a moment until it is on its way.

        Args:
          text: what happened; a traceback.
          follows: whether it looks like the consequence of another rank's failure.
        """
        self.failed_here = True
        self._post(dict(self._where(), type="fail", text=text[-16384:], follows=follows))
        self._link.flush(FLUSH_SECONDS)

    def note(self, text: str) -> None:
        """Remember an exception that ended a thread; reported if this rank leaves while it is needed."""
        self._note = text[-8192:]

    def leave_job(self) -> None:
        """Say goodbye and wait for the goodbye of all others. Raises the job's error when it breaks meanwhile."""
        self._post(dict(self._where(), type="bye", note=self._note))
        with self._changed, self._waiting():
            while not self._closed and not self._over:
                self._wait_or_raise()

    def close(self, orderly: bool = True) -> None:
        """End the channel; orderly after goodbyes by all ranks, else at once.

        When the job breaks meanwhile its error is raised and the channel stays open, to tell the others.
        """
        if self._over:
            return
        if orderly and not self._closed:
            self.leave_job()
        if self._closed and self.rank == 0:
            # The others close first, so that none takes the end of rank 0 for a broken connection.
            self._link.wait_for_departures(GOODBYE_SECONDS)
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._link.close(GOODBYE_SECONDS)

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

    def wait_for_end_of(self, ranks: Sequence[int], timeout: float) -> None:
        """After trouble: block until these ranks have ended, at most so long."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._gone.issuperset(ranks) and not self._over and deadline > time.monotonic():
                self._changed.wait(deadline - time.monotonic())

    # In the link's thread

    def _where(self) -> Message:
        """This rank's place, for the front of a message."""
        number, program, step, since = self._place
        message: Message = {"entry": number, "program": program, "step": step, "age": time.monotonic() - since}
        message["ordered"] = self._thread_of_programs in (None, threading.get_ident())
        return message

    def _post(self, message: Message) -> None:
        """Give a message to the hub; from any thread. Raises TypeError for what JSON can't express."""
        self._link.call(self._post_line, encode(message))

    def _post_line(self, line: bytes) -> None:
        if self._hub is not None:
            # Through JSON as the others' are: a tuple of rank 0 must equal the list of rank 1.
            self._hub.received(0, json.loads(line.decode()))
        else:
            self._link.send_line(0, line)

    def _heartbeat(self) -> None:
        if self._over:
            return
        self._link.later(self._beat, self._heartbeat)
        self._post_place()
        if self._hub is not None:
            self._hub.tick()
            self._link.send_all({"type": "tick", "chief": self._hub.describe(0)})
        else:
            self._watch_chief()

    def _post_place(self) -> None:
        message = dict(self._where(), type="state")
        if message["age"] > 1.0:
            message["recent"] = [entry for entry in self._ring if entry[0]]
        self._post_line(encode(message))

    def _watch_chief(self) -> None:
        """Rank 0 judges all others; whether rank 0 itself lives is for each of them to see."""
        now = time.monotonic()
        late, self._last_beat = now - self._last_beat, now
        if late > max(3.0, self._stall_timeout / 4):
            self._chief_heard += late  # it was this process that stood still
        silence = now - self._chief_heard
        if silence > self._stall_timeout and not self._closed:
            text = "rank 0 has sent no sign of life for %.0f s (stopped, swapped out, or cut off; cluster.stall_timeout is %g s). When last heard, %s"
            self._set_trouble(Trouble("silent", (0,), text % (silence, self._stall_timeout, self._chief_doing)))

    def _send(self, rank: int, message: Message) -> None:
        if rank == 0:
            self._received(message)
        else:
            self._link.send(rank, message)

    def _send_all(self, message: Message) -> None:
        self._link.send_all(message)
        self._received(message)

    def _heard(self, rank: int, message: Message) -> None:
        """A message from the network: a rank's to the hub, or the hub's to this rank."""
        if self._hub is None:
            self._received(message)
        elif message.get("type") == "joined":
            self._hub.joined(rank, str(message.get("where")))
        else:
            if message.get("type") == "fail":
                self._post_place()
            self._hub.received(rank, message)

    def _lost(self, rank: int) -> None:
        if self._over:
            return
        if self._hub is not None:
            self._post_place()
            self._hub.lost(rank)
        elif not self._closed:
            text = "rank 0 died: its connection broke without a goodbye (killed, out of memory, crashed, or its machine is gone). When last heard, %s"
            self._set_trouble(Trouble("lost", (0,), text % self._chief_doing))
            self._ended(range(self.size))  # nobody is left to tell about the others

    def _set_trouble(self, trouble: Trouble) -> None:
        with self._changed:
            self.trouble = self.trouble or trouble
            self._changed.notify_all()

    def _received(self, message: Message) -> None:
        """Take a message of the hub."""
        kind = message.get("type")
        self._chief_heard = time.monotonic()
        if kind == "tick":
            self._chief_doing = str(message.get("chief"))
        elif kind == "trouble":
            self._set_trouble(Trouble.from_json(message))
        elif kind == "agreed":
            self._result((kind, message["topic"], message["seq"]), message["payloads"])
        elif kind == "decided" and self.rank != 0:
            self._result((kind, message["topic"], message["seq"]), message.get("value"))
        elif kind == "report":
            self._result((kind, "", message["seq"]), message["text"])
        elif kind == "gone":
            self._ended([int(message["rank"])])
        elif kind == "closed":
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _ended(self, ranks: Iterable[int]) -> None:
        with self._changed:
            self._gone.update(ranks)
            self._changed.notify_all()

    def _result(self, key: Result, value: Any) -> None:
        with self._changed:
            self._results[key] = value
            self._changed.notify_all()


def _kind_of(key: Result) -> str:
    return "the agreement" if key[0] == "agreed" else "rank 0's decision"
