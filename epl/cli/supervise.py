"""Runs the processes of a job on this machine: output, first failure, and the end of all of them."""

import collections
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import IO, Any, Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence

from epl.runtime.watchdog import PEER_FAILED_EXIT_CODE

OWN_END_SECONDS = 10.0
"""After the first failure: how long the other ranks may take to notice and to tell why they end."""

TERM_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""

TAIL_LINES = 20
_POLL_SECONDS = 0.05
_ORPHAN_SECONDS = 1.0
_LONGEST_LINE = 1 << 16


class Command(NamedTuple):
    """What to run as one rank."""

    rank: int
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Optional[str] = None
    """The file for its output, beside the console."""


class _Stream:
    """One output stream of a rank: whole lines go to the console with the rank's prefix, all bytes to the log."""

    def __init__(self, source: IO[bytes], console: Any, prefix: bytes, log: Optional[IO[bytes]], tail: Deque[bytes]):
        self.source = source
        os.set_blocking(source.fileno(), False)
        self._console = console
        self._prefix = prefix
        self._log = log
        self._tail = tail
        self._rest = b""

    def read(self) -> bool:
        """Pass on what is there; False at the end of the stream."""
        try:
            data = os.read(self.source.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if self._log is not None:
            self._log.write(data)
            self._log.flush()
        self._show(data, final=not data)
        return bool(data)

    def finish(self) -> None:
        """Pass on what is there and stop in the middle of a line."""
        if self.read():
            self._show(b"", final=True)

    def _show(self, data: bytes, final: bool) -> None:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if self._rest and (final or len(self._rest) > _LONGEST_LINE):
            lines.append(self._rest)
            self._rest = b""
        # A progress bar redraws its line by carriage returns: only the final state is a line.
        lines = [line.rstrip(b"\r").rsplit(b"\r", 1)[-1] for line in lines]
        self._tail.extend(lines)
        if lines:
            self._console.write(b"".join(self._prefix + line + b"\n" for line in lines))
            self._console.flush()


def new_log(path: str) -> IO[bytes]:
    """Open a log that is followed while it grows. One of an earlier run stays, as PATH.1; of several, the highest number is the latest."""
    if os.path.isfile(path) and os.path.getsize(path):
        number = 1
        while os.path.lexists("%s.%d" % (path, number)):
            number += 1
        os.rename(path, "%s.%d" % (path, number))
    return open(path, "ab")


class _Rank:
    """A started process, the leader of a process group of its own."""

    def __init__(self, command: Command, stdin: Any):
        self.rank = command.rank
        self.log = command.log
        self.tail: Deque[bytes] = collections.deque(maxlen=TAIL_LINES)
        self.ended_at = 0.0
        self.code: Optional[int] = None
        self.stopped_by_us = False
        self._file: Optional[IO[bytes]] = new_log(command.log) if command.log else None
        self.process = subprocess.Popen(
            list(command.arguments),
            env=dict(command.environment),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C comes to the launcher alone, and the group can be killed as a whole
        )
        prefix = b"[%d] " % command.rank
        assert self.process.stdout is not None and self.process.stderr is not None
        self.streams = [
            _Stream(self.process.stdout, sys.stdout.buffer, prefix, self._file, self.tail),
            _Stream(self.process.stderr, sys.stderr.buffer, prefix, self._file, self.tail),
        ]

    def signal(self, number: int) -> None:
        """Send a signal to the whole group, also when its leader has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def group_lives(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
            return True
        except (ProcessLookupError, PermissionError):
            return False

    def poll(self, now: float) -> bool:
        """Whether it has just ended."""
        if self.code is not None:
            return False
        self.code = self.process.poll()
        self.ended_at = now
        return self.code is not None

    def close(self) -> None:
        for stream in self.streams:
            stream.source.close()
        if self._file is not None:
            self._file.close()


class Supervisor:
    """Runs commands until all have ended; ends them all when one fails or a signal comes."""

    def __init__(self, commands: Sequence[Command], own_end_seconds: float = OWN_END_SECONDS, term_seconds: float = TERM_SECONDS):
        self._commands = list(commands)
        self._own_end_seconds = own_end_seconds
        self._term_seconds = term_seconds
        self._ranks: List[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._signals: List[int] = []
        self._deadline: Optional[float] = None
        self._next_signal = signal.SIGTERM

    def run(self) -> int:
        """The exit code: 0, the first failing rank's, or 128 + the number of the signal that ended the job."""
        # A signal that is ignored, as SIGHUP is under nohup, stays so.
        caught = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, self._remember) for number in caught}
        try:
            self._start()
            while any(rank.code is None for rank in self._ranks) or self._selector.get_map():
                self._pass_on_output()
                self._reap()
                self._end_when_due()
        except BrokenPipeError:
            # Nobody reads our output any more (`epl-launch ... | head`): the job ends, as a single program would.
            self._signals.append(signal.SIGPIPE)
        finally:
            self._sweep()
            for rank in self._ranks:
                rank.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._result()

    def _remember(self, number: int, frame: Any) -> None:
        self._signals.append(number)

    def _start(self) -> None:
        stdin = None if len(self._commands) == 1 else subprocess.DEVNULL
        for command in self._commands:
            rank = _Rank(command, stdin)
            self._ranks.append(rank)
            for stream in rank.streams:
                self._selector.register(stream.source, selectors.EVENT_READ, (rank, stream))

    def _pass_on_output(self) -> None:
        if not self._selector.get_map():
            time.sleep(_POLL_SECONDS)
            return
        for key, _ in self._selector.select(_POLL_SECONDS):
            if not key.data[1].read():
                self._selector.unregister(key.fileobj)
        now = time.monotonic()
        for key in list(self._selector.get_map().values()):
            rank = key.data[0]
            # A process that the rank has left in the background may hold the pipe open forever.
            if rank.code is not None and now - rank.ended_at > _ORPHAN_SECONDS:
                key.data[1].finish()
                self._selector.unregister(key.fileobj)

    def _reap(self) -> None:
        now = time.monotonic()
        for rank in self._ranks:
            if rank.poll(now) and rank.code != 0 and self._deadline is None:
                # A rank that ended because of another one did so after all had been told.
                known = rank.code == PEER_FAILED_EXIT_CODE
                self._deadline = now + self._own_end_seconds / (2 if known else 1)

    def _end_when_due(self) -> None:
        now = time.monotonic()
        if self._signals and self._next_signal == signal.SIGTERM:
            self._deadline = now
        elif len(self._signals) > 1:
            self._deadline = now  # the user insists
        if self._deadline is None or now < self._deadline:
            return
        for rank in self._ranks:
            if rank.code is None:
                rank.stopped_by_us = True
                rank.signal(self._next_signal)
        self._next_signal = signal.SIGKILL
        self._deadline = now + self._term_seconds

    def _sweep(self) -> None:
        """Leave no process of the ranks behind, also none that they started."""
        left = [rank for rank in self._ranks if rank.group_lives()]
        for rank in left:
            rank.signal(signal.SIGTERM)
        deadline = time.monotonic() + (1.0 if all(rank.code is not None for rank in left) else self._term_seconds)
        while any(self._alive(rank) for rank in left) and time.monotonic() < deadline:
            time.sleep(0.02)
        for rank in left:
            rank.signal(signal.SIGKILL)
            rank.process.wait()
            rank.poll(time.monotonic())

    @staticmethod
    def _alive(rank: _Rank) -> bool:
        rank.poll(time.monotonic())  # a leader that is not reaped keeps its group alive
        return rank.group_lives()

    def _result(self) -> int:
        if self._signals:
            number = self._signals[0]
            _say("ended by %s; all ranks are stopped" % signal.Signals(number).name)
            return 128 + number
        first = self.first_failure()
        if first is None:
            return 0
        code = first.code or 0
        if code == PEER_FAILED_EXIT_CODE:
            what = "no rank of this machine failed by itself; rank %d ended the job with exit code %d" % (first.rank, code)
        else:
            how = "was killed by %s" % signal.Signals(-code).name if code < 0 else "ended with exit code %d" % code
            what = "rank %d failed first: it %s" % (first.rank, how)
        _say("%s%s. The last lines of its output:" % (what, "; its log is %s" % first.log if first.log else ""))
        sys.stderr.buffer.write(b"".join(b"[%d] %s\n" % (first.rank, line) for line in first.tail))
        sys.stderr.buffer.flush()
        return 128 - code if code < 0 else code

    def first_failure(self) -> Optional[_Rank]:
        """The rank that broke the job: the first to fail that did not say that another one had."""
        failed = [rank for rank in self._ranks if rank.code and not rank.stopped_by_us]
        # Horovod's Gloo aborts at the very moment at which a peer ends.
        failed.sort(key=lambda rank: (rank.code == PEER_FAILED_EXIT_CODE, rank.ended_at, rank.code == -signal.SIGABRT))
        return failed[0] if failed else None


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write("epl-launch: %s\n" % text)
        sys.stderr.flush()


def run_commands(commands: Sequence[Command]) -> int:
    """Run the ranks of this machine; the exit code of the job."""
    return Supervisor(commands).run()


def environment_text(environment: Mapping[str, str], base: Mapping[str, str]) -> str:
    """The variables that differ from `base`, for --debug."""
    changed: Dict[str, str] = {name: value for name, value in environment.items() if base.get(name) != value}
    return " ".join("%s=%s" % item for item in sorted(changed.items()))
