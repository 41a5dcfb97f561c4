"""Rank 0's side of the control channel: collects what the ranks say, answers, and judges.

No network and no threads in here: the channel calls it from its event loop with
messages, and gives it a function that sends.
"""

import dataclasses
import time
from typing import Any, Callable, Dict, Optional, Tuple

from epl.runtime.judge import RankState, Trouble, Waiting, describe, judge, report, waiting_line
from epl.runtime.wire import Message

Key = Tuple[str, int]
"""Topic and running number."""


class Hub:
    """The book of all ranks."""

    def __init__(
        self,
        size: int,
        stall_timeout: float,
        send: Callable[[int, Message], None],
        send_all: Callable[[Message], None],
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Args:
        size: number of ranks.
        stall_timeout: seconds of silence after which a rank counts as stopped.
        send: sends a message to a rank; the hub's own rank 0 is one of them.
        send_all: sends a message to all ranks.
        log: writes a line for the user.
        clock: seconds; tests pass their own.
        """
        self._stall_timeout = stall_timeout
        self._send = send
        self._send_all = send_all
        self._log = log
        self._clock = clock
        now = clock()
        self.states = [RankState(rank, heard=now, since=now) for rank in range(size)]
        self._posts: Dict[Key, Dict[int, Any]] = {}
        self._decided: Dict[str, int] = {}
        self._last_tick = now
        self._last_line = now
        self.trouble: Optional[Trouble] = None
        self.closed = False
        """Whether all ranks have said goodbye."""

    def joined(self, rank: int, where: str) -> None:
        self.states[rank].where = where
        self.states[rank].heard = self._clock()

    def received(self, rank: int, message: Message) -> None:
        """Take one message of a rank."""
        state = self.states[rank]
        now = self._clock()
        state.heard = now
        if "entry" in message:
            self._note_place(state, message, now)
        kind = message.get("type")
        if kind == "post":
            self._post(state, (str(message["topic"]), int(message["seq"])), message, now)
        elif kind == "want":
            self._want(state, (str(message["topic"]), int(message["seq"])), bool(message.get("ordered")), now)
        elif kind == "decide" and rank == 0:
            self._decide((str(message["topic"]), int(message["seq"])), message.get("value"))
        elif kind == "fail":
            if state.failed is None:
                state.failed, state.follows, state.failed_at = str(message["text"]), bool(message.get("follows")), now
            self.check()
        elif kind == "bye":
            state.left, state.since = True, now
            state.note = str(message.get("note") or "")
            self.check()
            self._close_when_all_left()
        elif kind == "withdraw":
            state.waiting = None
        elif kind == "ask":
            self._send(rank, {"type": "report", "seq": message.get("seq"), "text": self.report()})

    def lost(self, rank: int) -> None:
        """The connection of a rank has ended."""
        state = self.states[rank]
        if not state.left and not self.closed:
            state.lost = True
            self.check()
        self._send_all({"type": "gone", "rank": rank})

    def tick(self) -> None:
        """Called about twice a second: judge, and let the ranks know that rank 0 lives."""
        now = self._clock()
        # After a stop of this process itself (SIGSTOP, a suspended machine) everybody looks silent.
        gap = now - self._last_tick
        if gap > max(3.0, self._stall_timeout / 4):
            for state in self.states:
                state.heard += gap
        self._last_tick = now
        self.check()
        if self.trouble is None and now - self._last_line > self._stall_timeout:
            line = waiting_line(self.states, now, self._stall_timeout)
            if line is not None:
                self._last_line = now
                self._log(line)

    def check(self) -> None:
        """Announce what is broken, once."""
        if self.trouble is not None or self.closed:
            return
        self._update_missing()
        self.trouble = judge(self.states, self._clock(), self._stall_timeout)
        if self.trouble is not None:
            self._send_all(dict(self.trouble.to_json(), type="trouble"))

    def describe(self, rank: int) -> str:
        return describe(self.states[rank], self._clock())

    def report(self) -> str:
        return report(self.states, self._clock())

    def _note_place(self, state: RankState, message: Message, now: float) -> None:
        state.entry = int(message["entry"])
        state.program = None if message.get("program") is None else str(message["program"])
        state.step = int(message.get("step") or 0)
        state.since = now - float(message.get("age") or 0.0)
        if "recent" in message:
            state.recent = [(int(entry), str(program), int(step)) for entry, program, step in message["recent"]]

    def _post(self, state: RankState, key: Key, message: Message, now: float) -> None:
        posts = self._posts.setdefault(key, {})
        posts[state.rank] = message.get("payload")
        if len(posts) < len(self.states):
            state.waiting = Waiting("agree", key[0], key[1], now, (), bool(message.get("ordered")))
            return
        del self._posts[key]
        for other in self.states:
            if other.waiting is not None and other.waiting.is_for("agree", key):
                other.waiting = None
        payloads = [posts[rank] for rank in range(len(self.states))]
        if all(payload == payloads[0] for payload in payloads):
            payloads = payloads[:1]  # the usual case; spares size x size payloads on the network
        self._send_all({"type": "agreed", "topic": key[0], "seq": key[1], "payloads": payloads})

    def _update_missing(self) -> None:
        """Enter whom each waiting rank waits for. Not kept up to date with each post, which would cost size x size steps."""
        for key, posts in self._posts.items():
            missing = tuple(state.rank for state in self.states if state.rank not in posts)
            for rank in posts:
                waiting = self.states[rank].waiting
                if waiting is not None and waiting.is_for("agree", key):
                    self.states[rank].waiting = dataclasses.replace(waiting, missing=missing)

    def _want(self, state: RankState, key: Key, ordered: bool, now: float) -> None:
        """A rank waits for a decision, unless it is on its way already."""
        if key[1] > self._decided.get(key[0], -1):
            state.waiting = Waiting("decide", key[0], key[1], now, (0,), ordered)

    def _decide(self, key: Key, value: Any) -> None:
        self._decided[key[0]] = max(key[1], self._decided.get(key[0], -1))
        for state in self.states:
            if state.waiting is not None and state.waiting.is_for("decide", key):
                state.waiting = None
        self._send_all({"type": "decided", "topic": key[0], "seq": key[1], "value": value})

    def _close_when_all_left(self) -> None:
        if self.trouble is None and not self.closed and all(state.left for state in self.states):
            self.closed = True
            self._send_all({"type": "closed"})
