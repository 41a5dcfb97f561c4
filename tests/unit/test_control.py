"""The control channel with all ranks in one process, a thread each."""

import contextlib
import os
import queue
import signal
import socket
import threading
import time

import pytest

from epl.errors import DivergenceError, EplError, RankFailedError, StallError
from epl.runtime.control import ControlChannel
from epl.runtime.judge import Trouble

pytestmark = pytest.mark.timeout(60)


class FakeBackend:
    """What the channel needs of a backend, for ranks that are threads."""

    single_machine = True

    def __init__(self, rank, size, box):
        self.rank, self.size, self._box = rank, size, box

    def broadcast_bytes(self, data, root):
        if self.rank == root:
            for _ in range(self.size - 1):
                self._box.put(data)
            return data
        return self._box.get(timeout=10)


@contextlib.contextmanager
def job(size, stall_timeout=20.0):
    box = queue.Queue()
    channels = [ControlChannel(FakeBackend(rank, size, box), stall_timeout) for rank in range(size)]
    together(channels, lambda channel: channel.start())
    try:
        yield channels
    finally:
        for channel in reversed(channels):
            channel.close(orderly=False)


def together(channels, call):
    """Call with each channel in a thread of its own; the results or exceptions by rank."""
    results = [None] * len(channels)

    def run(number, channel):
        try:
            results[number] = call(channel)
        except EplError as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(channels)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a rank hangs"
    return results


def seconds_until(condition, limit=10.0):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit, "not within %g s" % limit
        time.sleep(0.01)
    return time.monotonic() - start


def test_agree_gives_all_payloads_by_rank_and_counts_per_topic():
    with job(3) as channels:

        def script(channel):
            first = channel.agree("graph", {"rank": channel.rank})
            other = channel.agree("plan", {"same": "for all"})
            second = channel.agree("graph", {"step": [channel.rank, None, 1.5]})
            return first, other, second

        for result in together(channels, script):
            assert result == (
                [{"rank": 0}, {"rank": 1}, {"rank": 2}],
                [{"same": "for all"}] * 3,
                [{"step": [rank, None, 1.5]} for rank in range(3)],
            )


def test_agree_of_several_threads_at_once():
    with job(2) as channels:

        def script(channel):
            answers = {}
            threads = [
                threading.Thread(target=lambda t=topic: answers.update({t: [channel.agree(t, {"n": (channel.rank, i)}) for i in range(20)]}))
                for topic in "abc"
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return answers

        for answers in together(channels, script):
            assert answers == {topic: [[{"n": [0, i]}, {"n": [1, i]}] for i in range(20)] for topic in "abc"}


def test_decide_gives_the_chiefs_values_in_order_and_the_chief_does_not_wait():
    with job(3) as channels:
        assert [channels[0].decide("save", step) for step in range(3)] == [0, 1, 2]
        values = together(channels[1:], lambda channel: [channel.decide("save") for _ in range(3)])
        assert values == [[0, 1, 2], [0, 1, 2]]
        # The others ask first.
        late = threading.Timer(0.3, lambda: channels[0].decide("save", {"path": "x"}))
        late.start()
        assert together(channels[1:], lambda channel: channel.decide("save")) == [{"path": "x"}] * 2
        late.join()


def test_a_busy_rank_is_waited_for_longer_than_the_stall_timeout(capfd):
    with job(2, stall_timeout=0.5) as channels:

        def script(channel):
            if channel.rank == 0:
                channel.enter("evaluate alone", 1)
                channel.leave()
                time.sleep(1.6)
            else:
                channel.enter("evaluate alone", 1)
                channel.leave()
            return channel.agree("run", {})

        assert together(channels, script) == [[{}, {}]] * 2
        assert channels[0].trouble is None
    printed = capfd.readouterr().err
    assert "epl: rank 0: no rank has failed, but some wait for more than 0.5 s" in printed
    assert "rank 1" in printed and "waits for agreement 'run'" in printed


def test_the_timeout_of_agree_names_who_is_missing_and_what_they_do():
    with job(3) as channels:
        channels[2].enter("train", 7)
        channels[2].leave()

        def script(channel):
            return None if channel.rank == 2 else channel.agree("run", {}, timeout=0.6)

        first, second, _ = together(channels, script)
        for error in (first, second):
            assert isinstance(error, StallError)
            assert "agreement 'run' (number 0)" in str(error)
            assert "rank 2" in str(error) and "outside of parallel programs" in str(error)


def test_different_agreements_are_a_divergence_at_once():
    with job(2) as channels:
        start = time.monotonic()
        errors = together(channels, lambda channel: channel.agree("save" if channel.rank else "run", {}))
        assert time.monotonic() - start < 3
        for error in errors:
            assert isinstance(error, DivergenceError)
            assert "rank 0 waits for agreement 'run'" in str(error) and "rank 1 for agreement 'save'" in str(error)


def test_an_agreement_against_a_later_program_is_a_divergence():
    with job(2) as channels:

        def script(channel):
            channel.enter("train", 1)
            channel.leave()
            if channel.rank == 1:
                channel.enter("eval", 5)
                return channel.wait_for_trouble(10)
            return channel.agree("save", {})

        error, trouble = together(channels, script)
        assert isinstance(error, DivergenceError)
        assert "rank 0 waits for agreement 'save' (number 0), but rank 1 is in program 'eval', step 5" in str(error)
        assert trouble.kind == "diverged"


def test_a_slower_rank_in_an_earlier_program_is_no_divergence():
    with job(2, stall_timeout=0.5) as channels:

        def script(channel):
            channel.enter("train", 1)
            if channel.rank == 1:
                time.sleep(2.0)
            channel.leave()
            return channel.agree("save", {})

        assert together(channels, script) == [[{}, {}]] * 2


def test_a_failure_reaches_all_with_its_text():
    with job(3) as channels:

        def script(channel):
            if channel.rank == 2:
                channel.enter("train", 9)
                time.sleep(0.1)
                channel.fail("ValueError: bad data")
                return None
            return channel.decide("never") if channel.rank else channel.agree("run", {})

        start = time.monotonic()
        errors = together(channels, script)[:2]
        assert time.monotonic() - start < 2
        for error in errors:
            assert isinstance(error, RankFailedError)
            assert "rank 2" in str(error) and "in program 'train', step 9" in str(error) and "ValueError: bad data" in str(error)
        seconds_until(lambda: all(channel.trouble for channel in channels))  # the failing rank is told last
        assert [channel.caused(channel.trouble) for channel in channels] == [False, False, True]


def test_the_cause_is_named_rather_than_its_echo():
    with job(3) as channels:
        channels[1].fail("Horovod has been shut down", follows=True)
        channels[2].fail("KeyError: 'x'")
        seconds_until(lambda: channels[0].trouble)
        assert channels[0].trouble.ranks == (2,)
        assert "KeyError" in channels[0].trouble.text


def test_an_echo_alone_is_reported_after_a_moment():
    with job(2) as channels:
        channels[1].fail("Horovod has been shut down", follows=True)
        assert 1.0 < seconds_until(lambda: channels[0].trouble) < 4.0
        assert channels[0].trouble.ranks == (1,)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_broken_connection_without_goodbye_is_a_death(victim):
    with job(2) as channels:
        channels[victim].enter("train", 3)
        time.sleep(0.6)
        channels[victim]._link.close(2)
        other = channels[1 - victim]
        assert seconds_until(lambda: other.trouble) < 1.0
        assert other.trouble.kind == "lost" and other.trouble.ranks == (victim,)
        assert "rank %d" % victim in other.trouble.text and "in program 'train', step 3" in other.trouble.text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_without_heartbeats_is_silent_after_the_stall_timeout(victim):
    with job(2, stall_timeout=1.0) as channels:
        time.sleep(0.5)
        channels[victim]._link.call(time.sleep, 2.0)  # stands in for SIGSTOP
        other = channels[1 - victim]
        assert 0.7 < seconds_until(lambda: other.trouble) < 1.9
        assert other.trouble.kind == "silent" and "rank %d" % victim in other.trouble.text
        assert isinstance(other.trouble.error(), StallError)


def test_a_rank_that_left_is_missed_by_an_agreement_and_by_a_program():
    for program in (False, True):
        with job(2) as channels:

            def script(channel, program=program):
                if channel.rank == 1:
                    return channel.leave_job()
                if program:
                    channel.enter("train", 4)
                    return channel.wait_for_trouble(10).error()
                return channel.agree("run", {})

            for error in together(channels, script):
                assert isinstance(error, RankFailedError)
                assert "rank 1" in str(error) and "ended in good order" in str(error) and "rank 0 needs it" in str(error)


def test_the_exception_of_a_thread_is_told_when_the_rank_leaves():
    with job(2) as channels:
        channels[1].note("ZeroDivisionError in the loader")

        def script(channel):
            return channel.leave_job() if channel.rank else channel.agree("run", {})

        assert "ZeroDivisionError in the loader" in str(together(channels, script)[0])


def test_goodbyes_of_all_close_the_channel_without_trouble():
    with job(3) as channels:
        assert together(channels, lambda channel: channel.close()) == [None] * 3
        assert [channel.trouble for channel in channels] == [None] * 3
        with pytest.raises(EplError, match="closed"):
            channels[1].agree("run", {})


def test_goodbyes_wait_for_a_busy_rank():
    with job(2, stall_timeout=0.5) as channels:

        def script(channel):
            if channel.rank == 1:
                time.sleep(1.5)
            start = time.monotonic()
            channel.close()
            return time.monotonic() - start

        waited = together(channels, script)
        assert waited[0] > 1.0 and channels[0].trouble is None


@pytest.mark.parametrize(
    "greeting",
    [
        b'{"token": "wrong", "rank": 1}\n',
        b'{"rank": 1}\n',
        b'{"token": 7, "rank": 1}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95pickle\n",
        b"x" * 100000,
    ],
)
def test_strangers_are_dropped(greeting):
    with job(2) as channels:
        port = channels[0]._link._listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.settimeout(5)
            with contextlib.suppress(OSError):  # the other end may be gone before all is sent
                stranger.sendall(greeting)
                assert stranger.recv(100) == b""
        assert together(channels, lambda channel: channel.agree("still", {})) == [[{}, {}]] * 2
        assert channels[0].trouble is None


def test_the_server_of_one_machine_listens_on_loopback_only():
    with job(2) as channels:
        assert channels[0]._link._listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="needs Python 3.7 on a POSIX system")
def test_a_forked_child_does_not_keep_a_dead_rank_alive():
    with job(2) as channels:
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        try:
            channels[1]._link.close(2)
            assert seconds_until(lambda: channels[0].trouble) < 2.0
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_enter_and_leave_are_cheap():
    with job(2) as channels:
        best = 1.0
        for _ in range(5):
            start = time.perf_counter()
            for step in range(2000):
                channels[0].enter("train", step)
                channels[0].leave()
            best = min(best, (time.perf_counter() - start) / 4000)
        assert best < 5e-6  # 0.3 microseconds on a free core


def test_trouble_survives_the_way_over_the_network():
    trouble = Trouble("diverged", (0, 3), "text\nof two lines")
    assert Trouble.from_json(trouble.to_json()) == trouble
