"""The timeline of real ranks, and `epl report` on it: the order of the actions is that of the schedule."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.cli.main import main
from epl.planner.schedules import NAMES, make_schedule, simulate
from tests.harness.context import variables
from tests.harness.pool import request
from tests.unit.test_timeline import trace_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZE, BATCHES = 384, 4
DATA = np.random.RandomState(0).rand(2, BATCHES * SIZE, SIZE).astype(np.float32)


def dense(x, seed, activation=tf.nn.relu):
    return tf.layers.dense(x, SIZE, activation, kernel_initializer=tf.glorot_uniform_initializer(seed=seed))


def trained(run, schedule, folder):
    """Five steps of stages that are heavy enough to be seen; in `folder` the timeline of the third and the fourth."""
    import epl
    from epl.profiler import timeline

    with run.program({"pipeline.strategy": schedule, "pipeline.num_micro_batch": BATCHES}, annotate="none"):
        x, y = (tf.placeholder(tf.float32, [None, SIZE]) for _ in range(2))
        h = x
        for stage in range(run.layout.stages):
            with epl.replicate(1):
                for layer in range(4 // run.layout.stages):
                    h = dense(h, 1 + stage + 10 * layer)
                if stage == run.layout.stages - 1:
                    loss = tf.reduce_mean(tf.square(h - y))
        step = tf.train.get_or_create_global_step()
        train = tf.train.AdamOptimizer(0.01).minimize(loss, global_step=step)
        if folder:
            timeline(folder, steps=2)
        with run.session() as session:
            losses = [session.run([loss, train], dict(zip((x, y), DATA)))[0] for _ in range(5)]
            return losses, variables(session)


def places(events):
    return sorted({"rank %d %s" % event.row for event in events})


def recorded(run, schedule):
    """What the timeline says, and how results with and without one differ."""
    from epl.profiler.timeline import actions_of, expected_of, load_trace, measured, predicted
    from epl.profiler.timeline.measure import rows_of
    from epl.profiler.timeline.trace import BUBBLE, OPTIMIZER, TRANSFER

    folder = run.path("timeline")
    plain, with_timeline = trained(run, schedule, None), trained(run, schedule, folder)
    # Of the fifth step all ranks have written their parts.
    assert os.path.exists(os.path.join(folder, "timeline.json"))
    trace = load_trace(folder)
    rows = [rows_of(trace, step) for step in trace.steps]
    return {
        "same": plain[0] == with_timeline[0] and all(np.array_equal(plain[1][name], value) for name, value in with_timeline[1].items()),
        "steps": trace.steps,
        "expected": [[str(a) for a in row] for row in expected_of(trace)],
        "orders": [[[str(a) for a in row] for row in actions_of(trace, step)] for step in trace.steps],
        "overlaps": sum(b.start < a.end for step in rows for row in step for a, b in zip(row, row[1:])),
        "actions": [places(row) for row in rows[0]],
        "shares": [measured(trace, step).bubble_share for step in trace.steps] + [predicted(trace).bubble_share],
        "transfers": sorted({(e.rank, e.info["direction"], e.phase, e.stage) for e in trace.of(TRANSFER) if e.micro_batch == 3}),
        "bubbles": places(trace.of(BUBBLE)),
        "optimizer": places(trace.of(OPTIMIZER)),
    }


LAYOUTS = ("2x1-s2-m4", "1x2-s2-m4")
CHUNKED = ("Interleaved", "ZeroBubbleV")
SELDOM = ("PreferBackwardOptimizer", "ZeroBubbleH1", "ZeroBubbleV")
"""Schedules whose order only the slow tests record."""


def schedules(*pairs):
    """Parameters for the recorded timelines of (layout, schedule)."""
    params = [
        pytest.param(
            request(recorded, layout, schedule=schedule, timeout=180),
            id="%s %s" % (layout, schedule),
            marks=[pytest.mark.slow] if schedule in SELDOM else [],
        )
        for layout, schedule in pairs
    ]
    return pytest.mark.parametrize("outcome", params, indirect=True)


def is_as_planned(found):
    return found["same"] and found["steps"] == [2, 3] and found["orders"] == [found["expected"]] * 2 and found["overlaps"] == 0


@schedules(*[("2x1-s2-m4", name) for name in NAMES if name not in CHUNKED], *[("2x1-s4v2-m4", name) for name in CHUNKED])
def test_ranks_keep_the_order_of_each_schedule(outcome):
    for found in outcome.ranks:
        assert is_as_planned(found), found


@schedules(*[(layout, "PreferBackward") for layout in LAYOUTS])
def test_a_timeline_has_all_that_devices_did(outcome):
    for found in outcome.ranks:
        assert is_as_planned(found), found
        assert all(0 < share < 1 for share in found["shares"])
        places = ["rank 0 CPU:0", "rank 1 CPU:0"] if len(outcome.ranks) == 2 else ["rank 0 CPU:0", "rank 0 CPU:1"]
        assert found["actions"] == [[place] for place in places]
        assert found["bubbles"] == places == found["optimizer"]
        # Between devices of one process TensorFlow copies nothing on CPUs.
        expected = [(0, "receive", "B", 0), (0, "send", "F", 0), (1, "receive", "F", 1), (1, "send", "B", 1)] if len(outcome.ranks) == 2 else []
        # Rank 1 also gets the labels, which are fed on rank 0 and belong to no action there.
        assert set(expected) <= {tuple(one) for one in found["transfers"]}


# --- the command --------------------------------------------------------------------------

SCRIPT = """
    import numpy as np
    import tensorflow.compat.v1 as tf
    import epl

    tf.disable_v2_behavior()
    epl.init(epl.Config({"pipeline.num_micro_batch": 2, "cluster.devices_per_worker": 2}))
    x = tf.placeholder(tf.float32, [None, 32])
    with epl.replicate(1):
        h = tf.layers.dense(x, 32, tf.nn.relu)
    with epl.replicate(1):
        loss = tf.reduce_mean(tf.layers.dense(h, 1))
    train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(4):  # one less than the timeline would have
            session.run(train, {x: np.ones([8, 32])})
    """


def test_the_variable_and_the_command(tmp_path):
    """A script that ends early, as a user runs it."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("EPL_", "HOROVOD_", "OMPI_", "TF_CONFIG"))}
    environ.update(PYTHONPATH=str(ROOT), EPL_TIMELINE="trace")

    def run(*command):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("train.py")
    out = run("-m", "epl.cli.main", "report", "trace", "-o", "report.html")
    assert "1 ranks, 2 stages, 2 micro-batches, steps 2, 3" in out and "schedule PreferBackward, kept in all steps" in out
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page and "schedule PreferBackward, kept in all steps" in page


@pytest.fixture
def folder(tmp_path):
    """The trace of a job of 2 replicas of 3 stages that ran as simulated, and the simulated step."""
    schedule = make_schedule("ZeroBubbleH1", 3, 4)
    timeline = simulate(schedule, {"F": 3, "B": 4, "W": 2})
    trace_of(schedule, timeline, replicas=2).write(str(tmp_path / "timeline.json"))
    return tmp_path, timeline


def test_the_table(folder, capsys):
    path, timeline = folder
    assert main(["report", str(path)]) == 0
    out = capsys.readouterr().out
    share = "%.1f %%" % (100 * timeline.bubble_share)
    assert [line.split()[1:] for line in out.splitlines() if line.startswith("all")] == [share.split() * 2]
    assert out.count("\nrank ") == 6 and out.count("replica 1") == 3
    assert "B of stage 0 4.00, F of stage 0 3.00, W of stage 0 2.00" in out
    assert main(["report", str(path / "timeline.json"), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["bubble"] == pytest.approx(timeline.bubble_share) == pytest.approx(numbers["predicted_bubble"])
    assert [one["busy_ms"] for one in numbers["devices"]] == pytest.approx(list(timeline.busy) * 2)
    assert numbers["period_ms"] == pytest.approx(timeline.period) and numbers["in_order"]


@pytest.mark.parametrize("name, begin", [("r.html", b"<!DOCTYPE html>"), ("r.svg", b"<?xml"), ("r.PNG", b"\x89PNG"), ("r.pdf", b"%PDF")])
def test_pictures(folder, capsys, name, begin):
    path, _ = folder
    assert main(["report", str(path), "-o", str(path / name), "--step", "0"]) == 0
    content = (path / name).read_bytes()
    assert content.startswith(begin) and len(content) > 5000


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["none"], "there is no folder or file none"),
        ([""], "there is no timeline in"),
        (["timeline.json", "-o", "r.jpg"], "r.jpg: expected a name that ends in .html"),
        (["timeline.json", "--step", "7"], "no step 7 in the trace; it has the steps 0"),
        (["timeline.json", "-o", "none/r.svg"], "none/r.svg"),
        (["other.json"], "other.json can't be read"),
    ],
)
def test_refusals(folder, capsys, monkeypatch, arguments, expected):
    path, _ = folder
    (path / "empty").mkdir()
    (path / "other.json").write_text("{}")
    monkeypatch.chdir(path)
    if arguments == [""]:
        arguments = ["empty"]
    assert main(["report", *arguments]) == 1
    assert expected in capsys.readouterr().err


def test_without_matplotlib(folder, capsys, monkeypatch):
    path, _ = folder
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(path), "-o", str(path / "r.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert main(["report", str(path)]) == 0, "the table needs none"
