"""The rules of the watchdog, on plain states."""

from epl.errors import DivergenceError, RankFailedError, StallError
from epl.runtime.hub import Hub
from epl.runtime.judge import RankState, describe, judge, report, waiting_line

STALL = 60.0
NOW = 1000.0


def state(rank, **values):
    values.setdefault("heard", NOW)
    values.setdefault("since", NOW)
    return RankState(rank, where="host%d" % rank, **values)


def inside(rank, entry, program, step, seconds, **values):
    recent = values.pop("recent", [(entry, program, step)])
    return state(rank, entry=entry, program=program, step=step, since=NOW - seconds, recent=recent, **values)


def test_nothing_is_wrong_with_ranks_that_compute_wait_or_are_elsewhere():
    states = [
        state(0, entry=5, since=NOW - 600, recent=[(5, "train", 4)]),
        inside(1, 6, "train", 5, 600),
        inside(2, 5, "train", 4, 600),
    ]
    assert judge(states, NOW, STALL) is None
    assert "rank 0 (host0) is outside of parallel programs for 600 s (the last was 'train', step 4)" in waiting_line(states, NOW, STALL)


def test_no_waiting_line_before_the_timeout():
    assert waiting_line([inside(0, 1, "train", 1, 59), state(1)], NOW, STALL) is None


def test_different_programs_under_one_number_are_a_divergence_after_the_timeout():
    states = [inside(0, 7, "train", 6, 61), inside(1, 7, "eval", 2, 5)]
    trouble = judge(states, NOW, STALL)
    assert trouble.kind == "diverged" and set(trouble.ranks) == {0, 1}
    assert "number 7 is 'train', step 6, on rank 0, but 'eval', step 2, on rank 1" in trouble.text or (
        "number 7 is 'eval', step 2, on rank 1, but 'train', step 6, on rank 0" in trouble.text
    )
    assert isinstance(trouble.error(), DivergenceError)
    assert judge([inside(0, 7, "train", 6, 50), inside(1, 7, "eval", 2, 5)], NOW, STALL) is None


def test_different_steps_of_one_program_are_a_divergence():
    assert judge([inside(0, 7, "train", 6, 61), inside(1, 7, "train", 5, 61)], NOW, STALL).kind == "diverged"


def test_a_rank_ahead_is_compared_by_what_it_did_under_the_same_number():
    ahead = inside(1, 8, "train", 7, 61, recent=[(7, "eval", 0), (8, "train", 7)])
    assert judge([inside(0, 7, "train", 6, 61), ahead], NOW, STALL).kind == "diverged"
    ahead = inside(1, 8, "train", 7, 61, recent=[(7, "train", 6), (8, "train", 7)])
    assert judge([inside(0, 7, "train", 6, 61), ahead], NOW, STALL) is None


def test_silence_counts_from_the_last_sign_of_life():
    assert judge([state(0), state(1, heard=NOW - 59)], NOW, STALL) is None
    trouble = judge([state(0), inside(1, 3, "train", 2, 70, heard=NOW - 61)], NOW, STALL)
    assert trouble.kind == "silent" and trouble.ranks == (1,)
    assert "rank 1 (host1) in program 'train', step 2 has sent no sign of life for 61 s" in trouble.text
    assert isinstance(trouble.error(), StallError)


def test_a_rank_that_left_is_silent_by_right():
    assert judge([state(0), state(1, left=True, heard=NOW - 1000)], NOW, STALL) is None


def test_a_rank_still_in_the_last_program_of_one_that_left_is_fine():
    assert judge([inside(0, 4, "train", 3, 300), state(1, entry=4, left=True)], NOW, STALL) is None
    trouble = judge([inside(0, 5, "train", 4, 1), state(1, entry=4, left=True)], NOW, STALL)
    assert trouble.kind == "left" and isinstance(trouble.error(), RankFailedError)


def test_an_echo_names_the_quiet_rank_as_its_likely_cause():
    states = [state(0, failed="Horovod: connection reset", follows=True, failed_at=NOW - 2), inside(1, 3, "train", 2, 9, heard=NOW - 9)]
    trouble = judge(states, NOW, STALL)
    assert trouble.ranks == (0,)
    assert "Its cause is likely: rank 1 (host1) was in program 'train'" in trouble.text


def test_a_death_explains_an_echo():
    states = [state(0, failed="Horovod: connection reset", follows=True, failed_at=NOW - 2), state(1, lost=True)]
    assert judge(states, NOW, STALL).ranks == (1,)


def test_the_report_of_a_big_job_is_short_and_shows_who_stands_out():
    states = [inside(rank, 5, "train", 4, 10) for rank in range(1000)]
    states[700] = inside(700, 5, "train", 4, 10, heard=NOW - 30)
    lines = report(states, NOW).splitlines()
    assert len(lines) == 17 and lines[-1].strip() == "and 984 more ranks"
    assert any("rank 700" in line and "no sign of life for 30 s" in line for line in lines)


def test_a_rank_before_its_first_program():
    assert describe(state(3), NOW) == "rank 3 (host3) has not entered a parallel program yet"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_stop_of_rank_0_itself_does_not_make_the_others_silent():
    clock, sent = Clock(), []
    hub = Hub(2, 10.0, lambda rank, message: None, sent.append, lambda line: None, clock)
    hub.tick()
    clock.now = 500.0  # SIGSTOP, SIGCONT
    hub.tick()
    assert hub.trouble is None
    for _ in range(12):
        clock.now += 1.0
        hub.received(0, {"type": "state", "entry": 0})
        hub.tick()
    assert hub.trouble.kind == "silent" and hub.trouble.ranks == (1,)
    assert [message["type"] for message in sent] == ["trouble"]


def test_waiting_lines_come_once_per_timeout():
    clock, lines = Clock(), []
    hub = Hub(2, 10.0, lambda rank, message: None, lambda message: None, lines.append, clock)
    for second in range(46):
        clock.now = float(second)
        for rank in range(2):
            hub.received(rank, {"type": "state", "entry": 1, "program": "train", "step": 0, "age": float(second), "recent": [[1, "train", 0]]})
        hub.tick()
    assert len(lines) == 4
