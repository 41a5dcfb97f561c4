"""Ranks that die while Horovod starts: all ranks in one process, whose `end` only takes notes."""

import contextlib
import json
import queue
import socket
import subprocess
import sys
import time

import pytest

from epl.errors import BackendError
from epl.runtime import aborts
from epl.runtime import vigil as module
from epl.runtime.gloo import GlooStore, ask_for_vigil, assign_slots
from epl.runtime.roll import Claim, Roll, digest_of
from epl.runtime.vigil import Keeper, Member
from epl.runtime.watchdog import PEER_FAILED_EXIT_CODE

pytest.importorskip("horovod.runner.http.http_server")
pytestmark = pytest.mark.timeout(60)
HOSTS = ["127.0.0.1:7801", "127.0.0.1:7802", "127.0.0.1:7803"]


class Job:
    """A first worker with its store, and other workers."""

    def __init__(self, stall_timeout):
        self.ends = queue.Queue()
        self._stall_timeout = stall_timeout
        self.roll = Roll(HOSTS, Claim("n0", "process 0"))
        self.keeper = Keeper(HOSTS, self.roll, stall_timeout, lambda code: self.ends.put((0, code)))
        self.store = GlooStore("127.0.0.1", 0, assign_slots(["m"] * len(HOSTS)), self.keeper.hello, self.keeper.admit)
        self.members = []
        """Workers 1 and 2, in this order."""

        self.strangers = []
        self.keeper.start()
        self.store.start()

    def member(self, rank, nonce=None):
        """A worker that has its connection, but has not said hello."""
        made = Member(rank, HOSTS, nonce or "n%d" % rank, self._stall_timeout, lambda code: self.ends.put((rank, code)))
        self.members.append(made)
        made.start()
        assert made.attend("127.0.0.1", self.store.port) is None and made.server == "n0"
        return made

    def raw(self, greeting, *messages):
        """A connection that sends these lines and nothing more."""
        handle = ask_for_vigil("127.0.0.1", self.store.port, 5.0)
        handle.setblocking(True)
        self.strangers.append(handle)
        for message in (greeting,) + messages:
            handle.sendall(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")
        return handle

    def hello(self, rank, nonce=None):
        nonce = nonce or "n%d" % rank
        message = {"index": rank, "nonce": nonce, "process": "process %d" % rank, "digest": digest_of(HOSTS), "hosts": HOSTS}
        return self.keeper.hello(message)["state"]

    def all_there(self):
        """Two more workers that have met the first, and wait in Horovod."""
        members = [self.member(rank) for rank in (1, 2)]
        assert [self.hello(1), self.hello(2)] == ["wait", "ready"]
        for member in members:
            member.arm()
        return members

    def ended(self, count, seconds=5.0):
        """The next processes that end, and their exit codes."""
        return dict(self.ends.get(timeout=seconds) for _ in range(count))

    def close(self):
        for handle in self.strangers:
            handle.close()
        for vigil in [self.keeper] + self.members:
            vigil._over = True
        for vigil in [self.keeper] + self.members:
            vigil.close()
        self.store.stop()


@contextlib.contextmanager
def job(stall_timeout=20.0):
    made = Job(stall_timeout)
    try:
        yield made
    finally:
        made.close()


def die(vigil):
    """What a killed process does to its connections."""
    vigil._over = True
    vigil._call(lambda: [connection.abort() for connection in vigil._connections()])


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def lines(capfd):
    return sorted(line for line in capfd.readouterr().err.splitlines() if line.startswith("epl: "))


def test_a_rank_that_dies_is_named_by_all_others(capfd):
    with job() as made:
        members = made.all_there()
        start = time.monotonic()
        die(members[1])
        assert made.ended(2) == {0: PEER_FAILED_EXIT_CODE, 1: PEER_FAILED_EXIT_CODE}
        assert time.monotonic() - start < 2
    text = "the job is broken: rank 2 (127.0.0.1:7803, process 2) died while Horovod started: its connection broke without a goodbye"
    found = lines(capfd)
    assert len(found) == 2
    assert found[0].startswith("epl: rank 0: " + text) and found[1].startswith("epl: rank 1: " + text)


def test_the_first_worker_ends_last(capfd):
    """Else the others could take its end for the cause."""
    with job() as made:
        made.all_there()[1]._call(lambda: die(made.members[1]))
        assert [made.ends.get(timeout=5)[0] for _ in range(2)] == [1, 0]


def test_the_first_worker_that_dies_is_named(capfd):
    with job() as made:
        made.all_there()
        die(made.keeper)
        assert set(made.ended(2)) == {1, 2}
    found = lines(capfd)
    assert len(found) == 2
    for line in found:
        assert "rank 0 (127.0.0.1:7801, process 0) died while Horovod started" in line


def test_a_silent_rank_is_named(capfd):
    with job(stall_timeout=1.5) as made:
        made.member(1)
        made.raw({"rank": 2, "nonce": "n2"})
        made.hello(1), made.hello(2)
        start = time.monotonic()
        assert set(made.ended(2)) == {0, 1}
        assert 1.4 < time.monotonic() - start < 5
    for line in lines(capfd):
        assert "rank 2 (127.0.0.1:7803, process 2) has sent no sign of life for 2 s while Horovod started" in line
        assert "cluster.stall_timeout is 1.5 s" in line


def test_the_silent_first_worker_is_named(capfd):
    with job(stall_timeout=1.5) as made:
        made.all_there()
        made.keeper._call(time.sleep, 3)
        assert set(made.ended(2)) == {1, 2}
    for line in lines(capfd)[:2]:
        assert "rank 0 (127.0.0.1:7801, process 0) has sent no sign of life for 2 s while Horovod started" in line


def test_a_process_that_stood_still_itself_names_nobody(capfd):
    with job(stall_timeout=1.0) as made:
        made.all_there()
        for vigil in [made.keeper] + made.members:
            vigil._last_tick -= 30.0
            vigil._heard = {rank: heard - 30.0 for rank, heard in vigil._heard.items()}
        time.sleep(0.5)
        assert made.ends.empty()
    assert lines(capfd) == []


def test_it_ends_silently_when_all_have_started(capfd):
    with job(stall_timeout=1.5) as made:
        members = made.all_there()
        made.keeper.started()
        members[0].started()
        members[0]._thread.join(5)
        time.sleep(1.9)  # who has started is neither missed nor thought silent
        assert made.ends.empty() and made.keeper._thread.is_alive()
        members[1].started()
        for vigil in [made.keeper] + members:
            vigil._thread.join(5)
            assert not vigil._thread.is_alive()
        assert made.ends.empty()
    assert lines(capfd) == []


def test_one_that_dies_after_others_have_started_ends_only_those_that_have_not(capfd):
    with job() as made:
        first, second = made.all_there()
        made.keeper.started()
        die(first)
        assert set(made.ended(1)) == {2}
        assert made.ends.empty()
    assert len(lines(capfd)) == 1


def test_one_that_dies_while_others_are_missing_is_missing_again(capfd):
    with job() as made:
        made.member(1)
        assert made.hello(1) == "wait" and made.roll.missing() == [2]
        die(made.members[0])
        until(lambda: made.roll.missing() == [1, 2])
        assert made.roll.gone() == {1}
        made.member(1, "again")
        made.member(2)
        assert [made.hello(1, "again"), made.hello(2)] == ["wait", "ready"]
        assert made.roll.gone() == set()
        assert made.ends.empty()
    assert lines(capfd) == []


def test_all_know_at_once_that_they_are_complete(capfd):
    """Rank 1 would ask again in a second; meanwhile rank 0 dies."""
    with job() as made:
        made.member(1), made.member(2)
        late = made.member(2, "of another run")
        made.hello(1), made.hello(2)
        until(lambda: all(member._armed for member in made.members[:2]))
        assert made.hello(2, "of another run") == "taken"
        die(made.keeper)
        assert set(made.ended(2)) == {1, 2}
        until(lambda: late.server is None)
        assert made.ends.empty(), "who is not of the job is not ended by it"


def test_the_others_hear_why_one_fails(capfd, monkeypatch):
    monkeypatch.setattr(module, "CONFIRM_SECONDS", 0.1)
    with job() as made:
        first, _ = made.all_there()
        first.failed(BackendError("the launcher announced rank 1\nand more"))
        assert set(made.ended(2)) == {0, 2}
        first.failed(BackendError("again")), first.started()
    for line in lines(capfd):
        assert line.endswith("rank 1 (127.0.0.1:7802, process 1) failed while Horovod started: BackendError: the launcher announced rank 1")


def test_the_others_hear_why_the_first_worker_fails(capfd, monkeypatch):
    monkeypatch.setattr(module, "CONFIRM_SECONDS", 0.1)
    with job() as made:
        made.all_there()
        made.keeper.failed(BackendError("no channel"))
        made.keeper.close()
        assert set(made.ended(2)) == {1, 2}
    for line in lines(capfd):
        assert line.endswith("rank 0 (127.0.0.1:7801, process 0) failed while Horovod started: BackendError: no channel")


def test_who_is_told_to_hold_waits_for_the_news(capfd):
    with job() as made:
        first, second = made.all_there()
        start = time.monotonic()
        first.hold(0.3)
        assert 0.2 < time.monotonic() - start < 2 and made.ends.empty()
        die(second)
        first.hold(5.0)
        assert (1, PEER_FAILED_EXIT_CODE) in [made.ends.get(timeout=5) for _ in range(2)]


def test_a_silent_rank_is_named_earlier_when_horovod_gives_up(capfd, monkeypatch):
    monkeypatch.setattr(module, "QUIET_SECONDS", 1.5)
    with job() as made:
        first = made.member(1)
        made.raw({"rank": 2, "nonce": "n2"})
        made.hello(1), made.hello(2)
        time.sleep(0.7)
        first.hold()
        assert set(made.ended(2)) == {0, 1}
    for line in lines(capfd):
        assert "rank 2 (127.0.0.1:7803, process 2) has sent no sign of life" in line and "Horovod has given up" in line


STRANGERS = [
    [b"GET / HTTP/1.1\r\n\r\n"],
    [b"[]\n"],
    [b"x" * 100000],
    [{"rank": 9, "nonce": "n1"}],
    [{"rank": "1", "nonce": "n1"}],
    [{"rank": 0, "nonce": "n0"}],
    [{"rank": 1}],
    [{"rank": 1, "nonce": "guessed"}, {"type": "failed", "text": "x"}],
    [{"rank": 1, "nonce": "guessed"}, {"type": "started"}],
    [{"rank": 1, "nonce": "gu\u00e9ss\u00e9"}, b"nonsense\n"],
]


@pytest.mark.parametrize("messages", STRANGERS, ids=range(len(STRANGERS)))
def test_strangers_change_nothing(messages, capfd):
    with job() as made:
        members = made.all_there()
        with contextlib.suppress(OSError):
            made.raw(*messages)
        time.sleep(0.2)
        made.strangers[-1].close()
        time.sleep(0.2)
        assert made.ends.empty()
        die(members[0])
        assert set(made.ended(2)) == {0, 2}
    for line in lines(capfd):
        assert "rank 1 (127.0.0.1:7802, process 1) died" in line


def test_a_worker_finds_the_first_one_again_after_its_restart():
    with job() as made:
        member = made.member(1)
        die(made.keeper)
        until(lambda: member.server is None)
        assert made.ends.empty(), "not all have met"
        assert member.attend("127.0.0.1", made.store.port) is None and member.server == "n0"
        member.go()
        assert member.server is None
        assert member.attend("127.0.0.1", made.store.port) is None and member.server == "n0"


@pytest.mark.parametrize("answer", [b"HTTP/1.0 404 Not Found\r\n\r\n", b"", b"SSH-2.0-x\r\n\r\n"])
def test_a_server_without_a_vigil_is_said(answer):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        member = Member(1, HOSTS, "n1", 5.0)
        member.start()
        listener.settimeout(5)
        outcome = queue.Queue()
        module.threading.Thread(target=lambda: outcome.put(member.attend("127.0.0.1", listener.getsockname()[1])), daemon=True).start()
        other, _ = listener.accept()
        other.recv(100)
        other.sendall(answer)
        other.close()
        assert "127.0.0.1:7801 lets nobody in: it is no worker of" in outcome.get(timeout=5)
        member.close()


ABORT = """
import ctypes, os, runpy, sys, threading
held_back = runpy.run_path(sys.argv[2])["held_back"]  # without TensorFlow, which takes long to load
terminate = ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev
def before():
    print("held back", flush=True)
    if sys.argv[1] == "ends":
        os._exit(70)
    if sys.argv[1] == "raises":
        raise ValueError
with held_back(before):
    if sys.argv[1] != "after":
        thread = threading.Thread(target=terminate)
        thread.start()
        thread.join()
terminate()
"""


@pytest.mark.parametrize("what, code, said", [("waits", -6, True), ("ends", 70, True), ("raises", -6, True), ("after", -6, False)])
def test_an_abort_by_cpp_is_held_back(what, code, said):
    done = subprocess.run([sys.executable, "-c", ABORT, what, aborts.__file__], capture_output=True, text=True, timeout=30)
    assert done.returncode == code, done.stderr
    assert ("held back" in done.stdout) == said
    assert ("terminate called" in done.stderr) == (code == -6)
