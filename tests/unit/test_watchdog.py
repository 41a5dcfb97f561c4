"""The thread that ends a rank, with an `end` that only takes notes."""

import queue
import sys
import threading
import time

import pytest

from epl.errors import EplError, RankFailedError
from epl.runtime.exits import ExitHooks
from epl.runtime.watchdog import PEER_FAILED_EXIT_CODE, Watchdog
from tests.unit.test_control import job, together

pytestmark = pytest.mark.timeout(60)


def ended_by(channel):
    """The exit code with which a watchdog of this channel ends the process."""
    codes = queue.Queue()
    Watchdog(channel, codes.put).start()
    return codes


def test_the_watchdog_ends_a_blocked_rank_with_one_report(capfd):
    with job(2) as channels:
        channels[0].enter("train", 3)
        codes = ended_by(channels[0])
        start = time.monotonic()
        channels[1]._link.close(2)
        assert codes.get(timeout=10) == PEER_FAILED_EXIT_CODE
        assert time.monotonic() - start < 3.0
    printed = capfd.readouterr().err
    assert printed.count("the job is broken") == 1
    assert "epl: rank 0: the job is broken; this rank was in program 'train', step 3" in printed
    assert "rank 1" in printed and "died" in printed
    assert all(line.startswith("epl: rank 0: ") for line in printed.splitlines())


def test_the_watchdog_leaves_time_to_a_rank_that_got_the_exception():
    with job(2) as channels:
        codes = ended_by(channels[0])
        errors = []

        def script(channel):
            if channel.rank == 1:
                channel._link.close(2)
                return
            try:
                channel.agree("run", {})
            except EplError as error:
                errors.append(error)
            time.sleep(2.5)
            errors.append(codes.empty())

        together(channels, script)
        assert isinstance(errors[0], RankFailedError) and errors[1] is True


class Records:
    """Exit hooks on a channel, with what they did."""

    def __init__(self, channel):
        self.left = []
        self.hooks = ExitHooks(channel, Watchdog(channel, self.left.append), lambda: self.left.append("left"), lambda: None)

    def __enter__(self):
        self.hooks.install()
        return self.hooks

    def __exit__(self, *unused):
        self.hooks.remove()


def test_the_hooks_are_removed_again():
    before = (sys.excepthook, sys.exit, threading.excepthook)
    with job(2) as channels, Records(channels[0]):
        assert sys.excepthook != before[0] and sys.exit != before[1] and threading.excepthook != before[2]
    assert (sys.excepthook, sys.exit, threading.excepthook) == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_in_a_side_thread_does_not_end_the_job():
    with job(2) as channels, Records(channels[1]):
        channels[1].enter("train", 0)
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        time.sleep(0.3)
        assert channels[0].trouble is None and "ZeroDivisionError" in channels[1]._note


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_in_the_thread_that_runs_the_programs_does():
    def script(channel):
        channel.enter("train", 2)
        raise KeyError("lost in a thread")

    with job(2) as channels, Records(channels[1]):
        thread = threading.Thread(target=script, args=[channels[1]])
        thread.start()
        thread.join()
        trouble = channels[0].wait_for_trouble(5)
        assert trouble.ranks == (1,) and "lost in a thread" in trouble.text


def test_sys_exit_counts_only_when_nothing_follows():
    with job(2) as channels, Records(channels[1]) as hooks:
        with pytest.raises(SystemExit):
            sys.exit(3)
        assert hooks.exit_status() == 3
        channels[1].enter("train", 0)  # the script has caught it and goes on
        channels[1].leave()
        assert hooks.exit_status() is None
        with pytest.raises(SystemExit):
            sys.exit()
        assert hooks.exit_status() is None
