"""`epl plan`: what it shows of a script, and how it refuses."""

import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

from epl.cli.main import main
from epl.cli.plan import own_arguments, text

ROOT = pathlib.Path(__file__).resolve().parents[2]
BEGIN = """
    import sys
    import tensorflow.compat.v1 as tf
    import epl

    tf.disable_v2_behavior()
    tf.disable_control_flow_v2()
    tf.enable_resource_variables()
    """
STAGES = (
    BEGIN
    + """
    epl.init(epl.Config({"pipeline.num_micro_batch": 4}))
    print("arguments", sys.argv[1:])
    x = tf.placeholder(tf.float32, [None, 4], "x")
    p = tf.placeholder(tf.bool, [], "p")
    with epl.replicate(1, "first"):
        w = tf.get_variable("w", [4, 8])
        h = tf.nn.relu(tf.matmul(x, w), "h")
    with epl.replicate(1, "second"):
        v = tf.get_variable("v", [8, 1])
        chosen = tf.cond(p, lambda: tf.matmul(h, v), lambda: tf.matmul(h, READ), name="maybe")
        loss = tf.reduce_mean(chosen)
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_or_create_global_step())
    try:
        with tf.train.MonitoredTrainingSession() as session:
            raise SystemExit("nothing may run")
    except Exception:
        pass
    finally:
        epl.shutdown()
    """
)


REFUSED = (
    "uses variable 'w' of taskgraph 0 inside the conditional of 'maybe/Switch', which is in taskgraph 1 and can't be cut between ranks. "
    "Read the variable outside of tf.cond, and use the value inside"
)


@pytest.fixture
def plan(tmp_path):
    """Plan a script in a process of its own; exit code, stdout, stderr."""

    def run(script, *options, arguments=()):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(script))
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("EPL_", "HOROVOD_", "OMPI_", "TF_CONFIG"))}
        environ["PYTHONPATH"] = str(ROOT)
        command = [sys.executable, "-m", "epl.cli.main", "plan", *options, "train.py", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    return run


def test_the_plan_of_two_stages(plan):
    arguments = ("--rate", "3", "--why", "maybe/MatMul_1", "--", "--why", "mine")
    code, out, err = plan(
        STAGES.replace("READ", "v * tf.stop_gradient(tf.reduce_sum(w))"), "--devices_per_worker", "2", "--why", "v", arguments=arguments
    )
    assert code == 0, err
    assert "arguments ['--rate', '3', '--why', 'mine']" in err and "nothing may run" not in err
    head, _, tail = out.partition("taskgraph 0: ")
    rows = [line.split() for line in head.splitlines() if re.match(r"\d|everywhere", line)]
    assert [[row[0]] + row[-2:] for row in rows] == [["0", "1", "128"], ["1", "1", "32"], ["everywhere", "1", "8"]]
    assert all(int(count) for count in rows[0][1:3] + rows[1][1:3])
    assert "taskgraph 0: " + tail == textwrap.dedent("""\
        taskgraph 0: replicate(device_count=1, name='first')
          replica 0 on /job:worker/replica:0/task:0/device:CPU:0
        taskgraph 1: replicate(device_count=1, name='second')
          replica 0 on /job:worker/replica:0/task:0/device:CPU:1

        tensors that cross: 2
          0 -> 1  forward   h:0 float32 [?, 8]
          1 -> 0  backward  gradients/AddN:0 float32 [?, 8]

        can't be spread over processes: Node 'maybe/Sum/ReadVariableOp' REST

        Node 'v' belongs to taskgraph 1: it was built in its scope (rule: own)

        Node 'maybe/MatMul_1' belongs to taskgraph 1: it was built in its scope (rule: own)
        """).replace("REST", REFUSED)


def test_the_plan_of_another_cluster_as_json(plan):
    code, out, err = plan(STAGES.replace("READ", "v"), "--json", "--workers=2", "--devices-per-worker=2", "--why=maybe/Merge:0")
    assert code == 0, err
    report = json.loads(out)
    assert {key: report[key] for key in ("ranks", "devices_per_rank", "replicas", "micro_batches", "refused")} == {
        "ranks": 2,
        "devices_per_rank": 2,
        "replicas": 2,
        "micro_batches": 4,
        "refused": None,
    }
    assert [row["devices"][1] for row in report["taskgraphs"]] == [["/job:worker/replica:0/task:1/device:CPU:%d" % k] for k in range(2)]
    assert [row["variables"] for row in report["taskgraphs"]] == [["w"], ["v"]] and report["everywhere"]["variables"] == ["global_step"]
    assert report["crossing"][0] == {"tensor": "h:0", "dtype": "float32", "shape": [None, 8], "from": 0, "to": 1, "phase": "forward"}
    assert [(item["from"], item["to"], item["phase"]) for item in report["crossing"][1:]] == [(1, 0, "backward")]
    assert report["why"] == {"maybe/Merge:0": "Node 'maybe/Merge' belongs to taskgraph 1: it was built in its scope (rule: own)"}
    assert text(report).startswith("plan of train.py\n\nranks             2\n")


ESTIMATOR = (
    BEGIN
    + """
    epl.init()
    epl.set_default_strategy(epl.replicate(1))

    def model(features, labels, mode):
        loss = tf.reduce_mean(tf.square(tf.layers.dense(features, 1) - 1.0))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)

    tf.estimator.Estimator(model, "folder").train(lambda: tf.data.Dataset.from_tensors(tf.ones([4, 2])), max_steps=1)
    """
)


def test_an_estimator_for_several_processes_asks_no_other_one(plan, tmp_path):
    code, out, err = plan(ESTIMATOR, "--workers", "3", "--json", "--why", "dense/kernel")
    assert code == 0, err
    report = json.loads(out)
    assert (report["ranks"], report["replicas"], report["crossing"]) == (3, 3, [])
    assert report["why"] == {"dense/kernel": "Node 'dense/kernel' belongs to taskgraph 0: the graph has no other"}
    assert not list(tmp_path.glob("folder/*.index"))


def test_an_unknown_node(plan):
    code, out, err = plan(STAGES.replace("READ", "v"), "--devices_per_worker=2", "--why=maybe/MatMull")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("epl plan: the graph has no node 'maybe/MatMull'; nearest: 'maybe/MatMul', ")


@pytest.mark.parametrize(
    "script, message",
    [
        ("print('hello')", "epl plan: the script ended, and there is no graph of EPL. It must call epl.init() before it builds its model"),
        ("raise ValueError('mine')", "epl plan: train.py failed before its first training run"),
        ("raise SystemExit(3)", "epl plan: train.py ended with 3 before its first training run"),
    ],
    ids=["no EPL", "error", "exit"],
)
def test_a_script_without_a_plan(plan, script, message):
    code, out, err = plan(script)
    assert (code, out) == (1, "") and err.splitlines()[-1] == message
    assert "hello" in err or "hello" not in script


@pytest.mark.parametrize(
    "arguments, message",
    [(["nothing.py"], "epl plan: there is no script nothing.py"), (["--workers", "0", __file__], "epl plan: --workers 0: expected a number from 1")],
)
def test_impossible_arguments(capsys, arguments, message):
    assert main(["plan"] + arguments) == 2
    assert capsys.readouterr().err.strip() == message


def test_the_scripts_arguments_stay_its_own():
    assert own_arguments(["--json", "a", "--why=x:0", "--why", "y", "--", "--why", "z", "--"]) == (["--json", "a", "--why", "z", "--"], ["x:0", "y"])
    assert own_arguments(["--why"]) == (["--why"], [])
