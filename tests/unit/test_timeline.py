"""The timeline: its file, clocks, merging, what it says of a schedule, and which runs are recorded."""

import json
import types

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.core.framework import step_stats_pb2

from epl.env import UNKNOWN, Env
from epl.errors import ConfigError
from epl.ir.program import APPLY, BACKWARD, FORWARD, Node, Program
from epl.planner.plan import FIRST, LAST, MIDDLE, WHOLE, Plan, Task
from epl.planner.schedules import NAMES, make_schedule, simulate
from epl.profiler.timeline import (
    Event,
    Trace,
    TraceError,
    actions_of,
    costs_of,
    expected_of,
    load_trace,
    measured,
    merge,
    predicted,
    schedule_of,
    transfers_of,
)
from epl.profiler.timeline import record as recording
from epl.profiler.timeline.collect import Where, bubbles_of, events_of, joined
from epl.profiler.timeline.measure import bubble_shares, rows_of, step_seconds
from epl.profiler.timeline.merge import clocks_of, merge_folder
from epl.profiler.timeline.trace import ACTION, BUBBLE, COLLECTIVE, COMPUTE, OPTIMIZER, STEP, TRANSFER

MS = 1000000
T0 = 1796001377781662000
"""A time of the wall clock in nanoseconds: too many digits for a float."""


def header(schedule=None, ranks=1, recorded=0, machine="m", **more):
    shape = {"schedule": "PreferForward", "stages": 1, "micro_batches": 1, "devices": 0}
    if schedule is not None:
        shape = {"schedule": schedule.name, "stages": schedule.stages, "micro_batches": schedule.micro_batches, "devices": len(schedule.devices)}
    return dict(shape, ranks=ranks, recorded=[recorded], machines={str(recorded): machine}, **more)


def step(rank, start, end, number=0):
    return Event(STEP, "step", rank, "", T0 + start * MS, T0 + end * MS, number)


def together(name, rank, start, end, kind=TRANSFER, **more):
    return Event(kind, name, rank, "CPU:0", T0 + start, T0 + end, 0, **more)


# --- the file -----------------------------------------------------------------------------


def test_a_trace_is_read_as_it_was_written(tmp_path):
    events = [
        step(0, 0, 9),
        Event(ACTION, "F0", 0, "CPU:0", T0 + 1, T0 + 1002, 0, 1, "F", 0, 3),
        Event(COMPUTE, "a/MatMul", 0, "CPU:0", T0 + 1, T0 + 1002, 0, None, "", None, None, {"op": "MatMul"}),
        Event(TRANSFER, "epl_comm/k.n1", 0, "GPU:1", T0 + 5, T0 + 7, 0, 1, "B", 2, 0, {"direction": "send", "waited_ns": 3}),
    ]
    path = str(tmp_path / "t.json")
    Trace(events, header(clocks={})).write(path)
    read = Trace.read(path)
    assert sorted(read.events, key=events.index) == events and read.header == header(clocks={})
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"], "nothing partial is left"


def test_the_rows_and_threads_of_the_viewer():
    events = [Event(kind, kind, 1, "CPU:0", T0 + start, T0 + end, 0, 2) for kind, start, end in ((ACTION, 0, 9), (BUBBLE, 9, 12), (ACTION, 12, 20))]
    events += [Event(TRANSFER, "t%d" % i, 1, "CPU:0", T0 + i, T0 + 10 + i, 0) for i in range(3)]
    records = Trace(events, header()).to_chrome()["traceEvents"]
    names = {r["tid"]: r["args"]["name"] for r in records if r["name"] == "thread_name"}
    assert sorted(names.values()) == ["actions", "transfers", "transfers 2", "transfers 3"], "what overlaps has lines of its own"
    assert [r["args"]["name"] for r in records if r["name"] == "process_name"] == ["rank 1 CPU:0 (stage 2)"]
    shown = [r for r in records if r["ph"] == "X"]
    for thread in names:
        inside = sorted((r for r in shown if r["tid"] == thread), key=lambda r: r["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in zip(inside, inside[1:]))


@pytest.mark.parametrize("content", ["", "[]", '{"traceEvents": []}', '{"otherData": {"epl_timeline": {"version": 99}}}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "rank0.json"
    path.write_text(content)
    with pytest.raises(TraceError, match="rank0.json"):
        load_trace(str(tmp_path))


# --- clocks and merging -------------------------------------------------------------------


def test_clocks_follow_from_what_is_done_together():
    """Rank 1's machine is 7 ms ahead, rank 3's 2 ms behind; rank 2 shares the machine of rank 1, and 3 meets only 2."""
    ahead = {0: 0, 1: 7 * MS, 2: 7 * MS, 3: -2 * MS}
    events = []
    for name, one, other, begins, end in (
        ("f", 0, 1, (100, 10), 140),
        ("b", 0, 1, (200, 290), 300),
        ("g", 2, 3, (400, 350), 410),
        ("h", 2, 3, (500, 550), 580),
    ):
        for rank, begin in zip((one, other), begins):
            events.append(together(name, rank, begin * 1000 + ahead[rank], end * 1000 + ahead[rank]))
    clocks = clocks_of(events, {0: "a", 1: "b", 2: "b", 3: "c"})
    for rank, clock in clocks.items():
        assert abs(clock.ahead - ahead[rank]) <= clock.error <= 45000
    assert clocks[0].error == 0 < clocks[1].error < clocks[3].error


def test_ranks_of_one_machine_have_one_clock():
    events = [together("f", 0, 0, 10), together("f", 1, 500, 900)]
    assert {(c.ahead, c.error) for c in clocks_of(events, {0: "a", 1: "a"}).values()} == {(0, 0)}


def test_machines_that_never_meet_are_believed():
    assert clocks_of([], {0: "a", 1: "b"})[1] == (0, 10**9)


def test_merging_takes_waiting_out_of_transfers():
    parts = [
        Trace([step(0, 0, 20), together("t", 0, 9 * MS, 12 * MS)], header(ranks=2)),
        Trace([step(1, 1, 20), together("t", 1, 2 * MS, 13 * MS, info={"direction": "receive"})], header(ranks=2, recorded=1)),
    ]
    merged = merge(parts[::-1])
    assert [(e.rank, e.start - T0, e.end - T0, e.info) for e in merged.of(TRANSFER)] == [
        (0, 9 * MS, 12 * MS, None),
        (1, 9 * MS, 13 * MS, {"direction": "receive", "waited_ns": 7 * MS}),
    ]
    assert merged.header["recorded"] == [0, 1] and merged.steps == [0]
    assert step_seconds(merged) == pytest.approx({0: 0.020})


def test_merging_moves_the_events_of_other_machines():
    parts = [
        Trace([step(0, 0, 20), together("t", 0, 10 * MS, 11 * MS), together("u", 0, 14 * MS, 16 * MS)], header(ranks=2)),
        Trace([step(1, 50, 70), together("t", 1, 59 * MS, 61 * MS), together("u", 1, 65 * MS, 66 * MS)], header(ranks=2, recorded=1, machine="n")),
    ]
    merged = merge(parts)
    clock = merged.header["clocks"]["1"]
    assert abs(clock["ahead_ns"] - 50 * MS) <= clock["error_ns"] == MS
    assert {e.start - T0 for e in merged.of(STEP)} == {0, 50 * MS - clock["ahead_ns"]}


def test_parts_that_do_not_belong_together(tmp_path):
    part = Trace([step(0, 0, 20)], header(ranks=2))
    with pytest.raises(TraceError, match="rank1.json are missing"):
        merge([part])
    with pytest.raises(TraceError, match="different jobs"):
        merge([part, Trace([step(1, 0, 20)], dict(header(ranks=2, recorded=1), micro_batches=7))])
    old = Trace([step(1, 100, 120)], header(ranks=2, recorded=1))
    with pytest.raises(TraceError, match="different times"):
        merge([part, old])
    with pytest.raises(TraceError, match="no timeline in"):
        load_trace(str(tmp_path))
    old.write(str(tmp_path / "rank1.json"))
    with pytest.raises(TraceError, match="rank0.json are missing"):
        load_trace(str(tmp_path))
    part.write(str(tmp_path / "rank0.json"))
    assert merge_folder(str(tmp_path), if_complete=True) is None, "the other rank has not overwritten its old part yet"
    Trace([step(1, 1, 20)], header(ranks=2, recorded=1)).write(str(tmp_path / "rank1.json"))
    Trace([step(2, 1, 20)], header(ranks=3, recorded=2)).write(str(tmp_path / "rank2.json"))
    assert len(load_trace(str(tmp_path)).events) == 2, "the part of a larger job does not count"
    assert (tmp_path / "timeline.json").exists()


# --- what it says -------------------------------------------------------------------------


def trace_of(schedule, timeline, replicas=1):
    """A trace in which everything takes as long as simulated, in milliseconds."""
    events = []
    for replica in range(replicas):
        for device, spans in enumerate(timeline.devices):
            rank = replica * len(schedule.devices) + device
            for (kind, micro_batch, chunk), start, end in spans:
                times = T0 + round(start * MS), T0 + round(end * MS)
                events.append(Event(ACTION, "%s%d" % (kind, micro_batch), rank, "CPU:0", *times, 0, chunk, kind, micro_batch, replica))
            events.append(step(rank, 0, round(timeline.makespan)))
    return Trace(events + bubbles_of(events), header(schedule, ranks=len(schedule.devices) * replicas))


@pytest.mark.parametrize("name", NAMES)
def test_a_simulated_step_is_measured_as_it_was_simulated(name):
    schedule = make_schedule(name, 4, 6)
    timeline = simulate(schedule, {"F": 3, "B": 4, "W": 2})
    trace = trace_of(schedule, timeline, replicas=2)
    assert schedule_of(trace) == schedule
    for replica in range(2):
        assert actions_of(trace, replica=replica) == schedule.devices
        found = measured(trace, replica=replica)
        assert found.bubble_share == pytest.approx(timeline.bubble_share) and found.period == pytest.approx(timeline.period / 1000)
        assert sum(bubble_shares(found)) / len(schedule.devices) == pytest.approx(timeline.bubble_share)
    assert predicted(trace).bubble_share == pytest.approx(timeline.bubble_share)
    assert costs_of(trace)["F", 1] == pytest.approx(0.003)
    gaps = sum(e.end - e.start for e in trace.of(BUBBLE)) / MS
    inside = sum(spans[-1].end - spans[0].start for spans in timeline.devices)
    assert gaps == pytest.approx(2 * (inside - sum(timeline.busy)))


def test_transfers_are_measured_from_the_end_of_an_action():
    schedule = make_schedule("1F1B", 2, 3)
    trace = trace_of(schedule, simulate(schedule, {"F": 3, "B": 4}, transfer=2))
    for event in trace.of(ACTION):
        forward = event.phase == "F"
        if event.stage == (0 if forward else 1):
            later = event._replace(kind=TRANSFER, rank=1 - event.rank, stage=1 - event.stage, info={"direction": "receive"})
            trace.events.append(later._replace(start=event.end, end=event.end + 2 * MS))
            # What came long before, fed values for instance, delays nothing.
            trace.events.append(later._replace(start=T0, end=T0 + 1))
    assert transfers_of(trace) == pytest.approx((0.002,))
    assert predicted(trace).period == pytest.approx(simulate(schedule, {"F": 3, "B": 4}, transfer=2).period / 1000)
    assert predicted(trace, (0.0,)).period == pytest.approx(simulate(schedule, {"F": 3, "B": 4}).period / 1000)


def test_a_first_stage_without_gradients_of_inputs():
    schedule = make_schedule("ZeroBubbleH1", 3, 4)
    costs = {("F", 0): 1, ("F", 1): 1, ("F", 2): 1, ("B", 0): 0, ("B", 1): 1, ("B", 2): 1, "W": 1}
    trace = trace_of(schedule, simulate(schedule, costs))
    trace.events = [e for e in trace.events if (e.phase, e.stage) != ("B", 0)]
    assert actions_of(trace) == expected_of(trace) != schedule.devices
    assert predicted(trace).period == pytest.approx(simulate(schedule, costs).period / 1000)
    trace.events = [e for e in trace.events if (e.name, e.stage) != ("W2", 1)]
    assert actions_of(trace) != expected_of(trace)


def test_a_step_that_a_rank_lacks_does_not_count():
    schedule = make_schedule("1F1B", 2, 2)
    trace = trace_of(schedule, simulate(schedule))
    trace.events.append(step(0, 90, 99, number=1))
    assert trace.steps == [0] and actions_of(trace) == schedule.devices
    with pytest.raises(TraceError, match="no complete"):
        actions_of(Trace([], header(schedule)))


def test_overlapping_actions_count_once():
    schedule = make_schedule("1F1B", 1, 2)
    events = [step(0, 0, 9)]
    for name, start, end in (("F0", 0, 4), ("F1", 2, 6), ("B0", 1, 3), ("B1", 7, 8)):
        events.append(Event(ACTION, name, 0, "CPU:0", T0 + start * MS, T0 + end * MS, 0, 0, name[0], int(name[1]), 0))
    trace = Trace(events + bubbles_of(events), header(schedule))
    assert measured(trace).busy == pytest.approx((0.007,)) and bubble_shares(measured(trace)) == pytest.approx((1 / 8,))
    assert [(e.start - T0, e.end - T0) for e in trace.of(BUBBLE)] == [(6 * MS, 7 * MS)]
    assert [e.name for e in rows_of(trace)[0]] == ["F0", "B0", "F1", "B1"]


def test_joined():
    assert joined([(5, 7), (0, 2), (1, 3), (9, 9)]) == [(0, 3), (5, 7), (9, 9)]
    assert joined([(5, 7), (0, 2)], gap=3) == [(0, 7)]


# --- from TensorFlow's statistics ---------------------------------------------------------

RECEIVED, SENT = "epl_comm/k.n3_0.r1.m0.to3", "epl_comm/k.n3_0.r1.m0.to2"


def program():
    """Stage 1 of 2, micro-batch 0 of replica 1 of the job: it receives h, and sends the gradient of h."""

    def node(name, op, inputs=(), phase=FORWARD, **more):
        given = dict(dict(origin=name, micro_batch=0, taskgraph=1), **more)
        return Node(name, op, [(source, 0) for source in inputs], phase=phase, **given)

    def made(name, op, inputs=()):
        return Node(name, op, [(source, 0) for source in inputs], phase=APPLY)

    nodes = [
        made("epl_anchor", "Placeholder"),
        made(RECEIVED, "HorovodAlltoall", ["epl_anchor"]),
        made(RECEIVED + "/shaped", "Reshape", [RECEIVED]),
        node("w/read", "ReadVariableOp", micro_batch=None),
        node("wt", "Transpose", ["w/read"]),
        node("h", "MatMul", [RECEIVED + "/shaped", "wt"]),
        node("loss", "Mean", ["h"]),
        node("g", "MatMul", ["loss", "wt"], BACKWARD),
        node("gw", "MatMul", ["loss", RECEIVED + "/shaped"], BACKWARD),
        made(SENT + "/flat", "Reshape", ["g"]),
        made(SENT, "HorovodAlltoall", [SENT + "/flat"]),
        made("sum", "HorovodAllreduce", ["gw"]),
        node("update", "ApplyGradientDescent", ["sum"], APPLY, micro_batch=None),
        made("epl_alarm/k/taken", "QueueDequeueV2"),
        made("epl_alarm/k/last", "QueueEnqueueV2").replace(controls=[RECEIVED, SENT, "sum"]),
    ]
    slots = {"wt": "F", "h": "F", "loss": "F", "g": "B", "gw": "W"}
    return Program({n.name: n for n in nodes}, facts=types.SimpleNamespace(slots=slots, gradients={"g": 1}))


TASK = Task(Plan(micro_batches=2, accumulate_in_run=True, places=((0, 1), (2, 3))), 3, ("/device:GPU:0",), (("", "/device:GPU:0"),), (1,))


def stats(rows, device="/job:localhost/replica:0/task:0/device:GPU:0", found=None, micros=False):
    """Rows of (name, op, start, end) in microseconds."""
    found = found or step_stats_pb2.StepStats()
    inside = found.dev_stats.add(device=device)
    for name, op, start, end in rows:
        one = inside.node_stats.add(node_name=name, timeline_label="[mem] %s = %s(a, ^b)" % (name, op))
        if micros:
            one.all_start_micros, one.op_end_rel_micros = T0 // 1000 + start, end - start
        else:
            one.all_start_nanos, one.op_end_rel_nanos = T0 + start * 1000, (end - start) * 1000
    return found


RAN = [
    ("_SOURCE", "NoOp", 0, 1),
    (RECEIVED, "HorovodAlltoall", 1, 100),
    (RECEIVED + "/shaped", "Reshape", 100, 101),
    ("wt/epl_k", "Transpose", 2, 5),
    ("h", "_MklMatMul", 110, 150),
    ("loss", "Mean", 150, 160),
    ("g", "MatMul", 161, 200),
    ("gw", "MatMul", 200, 240),
    ("a/ArithmeticOptimizer/AddOps_b", "AddN", 201, 202),
    (SENT, "HorovodAlltoall", 205, 230),
    ("sum", "HorovodAllreduce", 240, 260),
    ("update", "ApplyGradientDescent", 260, 270),
    ("epl_alarm/k/taken", "QueueDequeueV2", 1, 262),
    ("epl_alarm/k/last", "QueueEnqueueV2", 260, 262),
]


def collected(found, task=TASK):
    names = {name: name + "/epl_k" if name == "wt" else name for name in program().nodes}
    return events_of(found, program(), names, task, Where(5))


def brief(events, *kinds):
    return [(e.name, (e.start - T0) // 1000, (e.end - T0) // 1000) for e in sorted(events, key=lambda e: e.start) if e.kind in kinds]


def test_events_of_a_run():
    events = collected(stats(RAN))
    assert brief(events, ACTION) == [("F0", 110, 160), ("B0", 161, 240)], "the transposition is done long before h arrives"
    assert {(e.stage, e.micro_batch, e.replica, e.rank, e.device, e.step) for e in events if e.kind == ACTION} == {(1, 0, 1, 3, "GPU:0", 5)}
    assert brief(events, OPTIMIZER) == [("optimizer", 260, 270)] and brief(events, COLLECTIVE) == [("sum", 240, 260)]
    receive, send = sorted((e for e in events if e.kind == TRANSFER), key=lambda e: e.start)
    assert (receive.name, receive.phase, receive.info) == (RECEIVED, "F", {"op": "alltoall", "direction": "receive"})
    assert (send.name, send.phase, send.info) == (SENT, "B", {"op": "alltoall", "direction": "send"})
    assert all((e.stage, e.micro_batch, e.replica) == (1, 0, 1) for e in (receive, send))
    assert "wt/epl_k" in {e.name for e in events if e.kind == COMPUTE}


def test_a_long_preparation_is_part_of_an_action():
    rows = [(name, op, 2, 52) if op == "Transpose" else (name, op, start, end) for name, op, start, end in RAN]
    assert brief(collected(stats(rows)), ACTION)[0] == ("F0", 2, 160)


def test_folded_constants_begin_nothing():
    rows = [(name, "Const", 2, 3) if name == "g" else (name, op, start, end) for name, op, start, end in RAN]
    assert brief(collected(stats(rows)), ACTION)[1] == ("B0", 200, 240)


def test_times_of_gpu_kernels():
    """The executor's times are those of launches; the kernels run later. A copy is a transfer."""
    found = stats([("h", "MatMul", 110, 112), ("loss", "Mean", 112, 113)])
    stats([("h", "k1", 120, 130), ("h", "k2", 130, 150), ("loss", "k", 150, 155)], "/device:GPU:0/stream:all", found, micros=True)
    stats([("h", "k1", 120, 130)], "/device:GPU:0/stream:14", found, micros=True)
    stats([("h", "MemcpyP2P", 90, 95)], "/device:GPU:0/memcpy", found, micros=True)
    events = collected(found)
    assert brief(events, ACTION) == [("F0", 120, 155)]
    assert brief(events, COMPUTE) == [("h", 120, 150), ("loss", 150, 155)]
    assert len(brief(events, TRANSFER)) == 1


def test_one_stage_without_slots():
    task = Task(Plan(micro_batches=3), part=MIDDLE)
    one = program()
    one.facts.slots = {}
    events = events_of(stats(RAN, "/device:CPU:0"), one, {name: name for name in one.nodes}, task, Where(0, position=1))
    assert {(e.name, e.stage, e.micro_batch) for e in events if e.kind == ACTION} == {("F1", 0, 1), ("B1", 0, 1)}


# --- which runs are recorded --------------------------------------------------------------


class Store:
    def names(self, one, key):
        return {name: name for name in one.nodes}


def executable(part=WHOLE, trains=True, micro_batches=1):
    # Horovod's ops are known to TensorFlow only where it was imported.
    one = program()
    one = one.replace(nodes={n.name: n.replace(op="Identity") if n.op.startswith("Horovod") else n for n in one.nodes.values()})
    one.facts.slots, one.facts.gradients = {}, {"g": 1} if trains else {}
    return types.SimpleNamespace(program=one, task=Task(Plan(micro_batches=micro_batches), part=part))


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    monkeypatch.setattr(Env.get(), "recorder", UNKNOWN)
    monkeypatch.delenv("EPL_TIMELINE", raising=False)
    monkeypatch.chdir(tmp_path)
    return recording.timeline


def run(one, options=None, fails=False):
    """What a session does; whether the run was traced."""
    traced = recording.next_run(one, Store(), options, None)
    if traced is None:
        return False
    try:
        with traced:
            assert recording.next_run(one, Store(), traced.options, traced.metadata) is None, "the traced run itself"
            traced.metadata.step_stats.CopyFrom(stats(RAN, "/device:CPU:0"))
            if fails:
                raise ValueError
    except ValueError:
        pass
    return True


def test_steps_after_a_warm_up_are_recorded(recorder, tmp_path):
    recorder("out")
    (tmp_path / "out").mkdir()
    for name in ("rank0.json", "timeline.json"):
        (tmp_path / "out" / name).write_text("old")
    traced = []
    for number in range(7):
        traced.append(run(executable()))
        assert not run(executable(trains=False)), "an evaluation"
        if number == 1:
            assert not list((tmp_path / "out").iterdir()), "an old trace is removed before the first recorded step ends"
    assert traced == [False, True, True, True, True, False, False], "one more is traced and thrown away: it prepares the tracing"
    trace = load_trace("out")
    assert trace.steps == [2, 3, 4] and actions_of(trace) == schedule_of(trace).devices
    assert json.loads((tmp_path / "out" / "timeline.json").read_text())["otherData"]["epl_timeline"]["clocks"]
    assert Env.get().recorder is None


def test_the_runs_of_a_step(recorder):
    recorder("out", steps=1, skip=1)
    assert [run(executable(part, micro_batches=3)) for part in (FIRST, MIDDLE, LAST) * 3] == [True] * 6 + [False] * 3
    trace = load_trace("out")
    assert trace.steps == [1] and len(trace.of(STEP)) == 3
    assert {e.name for e in trace.of(ACTION)} == {"F0", "B0", "F1", "B1", "F2", "B2"}
    assert trace.header["micro_batches"] == 3


def test_failed_runs_and_those_that_the_user_traces(recorder, tmp_path):
    recorder("out", steps=3, skip=0)
    of_user = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    assert run(executable(), fails=True) and not run(executable(), options=of_user) and run(executable(), options=tf.RunOptions())
    trace = load_trace("out")
    assert trace.steps == [2], "the steps are counted, so that all ranks mean the same ones"


def test_a_script_that_ends_early(recorder, tmp_path):
    with recorder("out", steps=3, skip=0):
        run(executable())
    assert load_trace("out").steps == [0] and not run(executable())
    with recorder("none"):
        run(executable())
    assert not (tmp_path / "none").exists()


def test_a_trace_that_cant_be_written_harms_nothing(recorder, monkeypatch, caplog):
    monkeypatch.setattr(Trace, "write", lambda *_: 1 / 0)
    recorder("out", steps=1, skip=0)
    assert run(executable())


def test_the_environment(recorder, monkeypatch):
    monkeypatch.setenv("EPL_TIMELINE", "out")
    monkeypatch.setenv("EPL_TIMELINE_STEPS", "1")
    monkeypatch.setenv("EPL_TIMELINE_SKIP", "0")
    assert run(executable()) and not run(executable()) and load_trace("out").steps == [0]
    Env.get().recorder = UNKNOWN
    monkeypatch.setenv("EPL_TIMELINE_SKIP", "few")
    with pytest.raises(ConfigError, match="EPL_TIMELINE_SKIP='few'"):
        run(executable())


def test_nothing_is_recorded_by_default(recorder):
    assert not run(executable()) and Env.get().recorder is None


@pytest.mark.parametrize("options", [{"steps": 0}, {"skip": -1}, {"steps": "3"}])
def test_numbers_of_steps(recorder, options):
    with pytest.raises(ConfigError, match="%s=" % list(options)[0]):
        recorder("out", **options)
