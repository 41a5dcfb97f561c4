"""`epl-launch`: what the ranks get, what the user sees, and that nothing is left behind."""

import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from epl.cli import launch
from epl.cli.launch import main
from epl.cli.supervise import Supervisor

pytest.importorskip("horovod")
pytestmark = pytest.mark.timeout(120)

ROOT = pathlib.Path(__file__).resolve().parents[2]
JOB = pathlib.Path(__file__).with_name("job_script.py")
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def run(capfd):
    """Run a command line in this process; exit code, stdout and stderr."""

    def call(*argv, **variables):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("EPL_", "HOROVOD_", "OMPI_", "TF_CONFIG", "CUDA_"))}
        environ.update(variables)
        code = main([str(one) for one in argv], environ)
        return (code,) + tuple(capfd.readouterr())

    return call


def by_rank(output):
    """The JSON line of each rank."""
    found = {}
    for line in output.splitlines():
        rank, _, rest = line.partition(" ")
        found[int(rank.strip("[]"))] = json.loads(rest)
    return found


def gone(marker):
    """Whether no process has this text in its command line."""
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        alive = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if marker in (entry / "cmdline").read_bytes().decode(errors="replace") and int(entry.name) != os.getpid():
                    alive.append(entry.name)
            except OSError:
                continue
        if not alive:
            return True
        time.sleep(0.05)
    return False


def test_ranks_their_prefixes_and_the_variables_of_horovod(run, script):
    code, out, _ = run("--num_workers=2", "--gpu_per_worker", "1", script(SHOW))
    ranks = by_rank(out)
    assert code == 0 and sorted(ranks) == [0, 1]
    for rank, variables in ranks.items():
        assert (variables["HOROVOD_RANK"], variables["HOROVOD_SIZE"], variables["HOROVOD_LOCAL_RANK"]) == (str(rank), "2", str(rank))
        assert variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1" and variables["HOROVOD_CONTROLLER"] == "gloo"
    assert ranks[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"] == ranks[1]["HOROVOD_GLOO_RENDEZVOUS_PORT"]


def test_other_launchers_leave_no_traces(run, script):
    code, out, _ = run("--num_workers", 2, script(SHOW), OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1", PMI_RANK="0", PMI_SIZE="1", TF_CONFIG="")
    assert code == 0
    for variables in by_rank(out).values():
        assert not [name for name in variables if name.startswith(("OMPI_", "PMI_"))] and "TF_CONFIG" not in variables


def test_one_worker_runs_without_horovod(run, script):
    code, out, _ = run(script(SHOW), TF_CONFIG='{"cluster": {}}')
    variables = by_rank(out)[0]
    assert code == 0 and "HOROVOD_RANK" not in variables and variables["TF_CONFIG"] == '{"cluster": {}}'


@pytest.mark.parametrize(
    "gpus, count, expected, devices",
    [
        ("", 1, [None, None], "1"),
        ("", 2, [None, None], "2"),
        ("", 0, [None, None], None),
        ("0,1,2,3", 2, ["0,1", "2,3"], "2"),
        ("4,6", 1, ["4", "6"], None),
        ("GPU-aa,GPU-bb,GPU-cc,-1,7", 1, ["GPU-aa", "GPU-bb"], None),
        ("0,1", 0, ["", ""], None),
    ],
)
def test_each_worker_gets_its_consecutive_gpus(run, script, gpus, count, expected, devices):
    code, out, _ = run("--num_workers", 2, "--gpu_per_worker", count, script(SHOW), CUDA_VISIBLE_DEVICES=gpus)
    assert code == 0
    for rank, variables in by_rank(out).items():
        assert variables["CUDA_VISIBLE_DEVICES"] == (gpus if expected[rank] is None else expected[rank])
        assert variables.get("EPL_CLUSTER_DEVICES_PER_WORKER") == devices


def test_what_the_user_has_set_stays(run, script):
    chosen = {"EPL_CLUSTER_DEVICES_PER_WORKER": "3", "HOROVOD_GLOO_IFACE": "eth9", "HOROVOD_GLOO_TIMEOUT_SECONDS": "7", "CUDA_VISIBLE_DEVICES": ""}
    code, out, _ = run("--num_workers", 2, "--gpu_per_worker", 2, script(SHOW), **chosen)
    assert code == 0
    for variables in by_rank(out).values():
        assert {name: variables[name] for name in chosen} == chosen


@pytest.mark.parametrize("host", ["127.0.0.1", "node"])
def test_several_machines_get_tf_config(run, script, host):
    machines = "%s:7000,other:7000" % host
    code, out, _ = run("--num_workers", 2, "--machine_list", machines, "--machine_rank", 1, script(SHOW), HOROVOD_RANK="0", HOROVOD_SIZE="9")
    ranks = by_rank(out)
    assert code == 0 and sorted(ranks) == [2, 3]
    hosts = [host + ":7000", host + ":7001", "other:7000", "other:7001"]
    for rank, variables in ranks.items():
        assert json.loads(variables["TF_CONFIG"]) == {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}}
        assert "HOROVOD_RANK" not in variables


def test_the_own_machine_is_found_in_the_list(run, script):
    code, out, _ = run("--machine_list", "198.51.100.1:7000,127.0.0.1:7000", script(SHOW))
    assert code == 0 and sorted(by_rank(out)) == [1]


def test_arguments_belong_to_the_script(run, script):
    path = script("import sys; print(sys.argv[1:])")
    code, out, _ = run("--debug", path, "--num_workers", "9", "--debug=True", "a b", "--", "--x")
    assert code == 0 and out == "[0] ['--num_workers', '9', '--debug=True', 'a b', '--', '--x']\n"


@pytest.mark.parametrize("flag, shown", [(["--debug"], True), (["--debug=True"], True), (["--debug", "true"], True), (["--debug=False"], False)])
def test_the_debug_flag_in_all_its_forms(run, script, flag, shown):
    code, _, err = run(*flag + [script("")])
    assert code == 0 and ("epl-launch: [0] " in err) == shown


def test_shell_scripts_and_programs(run, script):
    path = script('echo "$1" $HOROVOD_RANK; python -c "import sys; print(sys.executable)"', "train.sh")
    code, out, _ = run("--num_workers", 2, path, "$HOME; false")
    assert code == 0
    assert sorted(out.splitlines()) == sorted("[%d] %s" % (rank, line) for rank in range(2) for line in ("$HOME; false %d" % rank, sys.executable))
    code, out, _ = run("echo", "hello")
    assert (code, out) == (0, "[0] hello\n")


def test_the_configuration_file(run, script, tmp_path):
    (tmp_path / "epl.yaml").write_text("pipeline: {num_micro_batch: 4}\n")
    code, out, _ = run("--config", tmp_path / "epl.yaml", script(SHOW))
    assert code == 0 and by_rank(out)[0]["EPL_CONFIG"] == str(tmp_path / "epl.yaml")


def test_logs_hold_all_output(run, script, tmp_path):
    path = script("import os, sys; r = os.environ['HOROVOD_RANK']; print('out', r, flush=True); print('err', r, file=sys.stderr)")
    for options, name in ((["--task_label", "job"], "job"), ([], "rank")):
        code, out, err = run("--num_workers", 2, "--log_dir", tmp_path / "logs", *options + [path])
        assert code == 0
        for rank in range(2):
            assert (tmp_path / "logs" / ("%s_%d.log" % (name, rank))).read_text() == "out %d\nerr %d\n" % (rank, rank)
            assert "[%d] out %d\n" % (rank, rank) in out and "[%d] err %d\n" % (rank, rank) in err


def test_lines_without_an_end_and_progress_bars(run, script):
    code, out, _ = run(script(r"import sys; sys.stdout.write('a\r50%\r100%\nlast')"))
    assert (code, out) == (0, "[0] 100%\n[0] last\n")


def test_the_first_failing_rank_and_its_last_lines(run, script, monkeypatch):
    monkeypatch.setattr(Supervisor.__init__, "__defaults__", (0.5, 1.0))
    path = script(
        """
        import os, signal, subprocess, sys, time
        if os.environ["HOROVOD_RANK"] == "1":
            print("\\n".join("line %d" % i for i in range(50)))
            sys.exit(7)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "1234.75"])
        time.sleep(1000)
        """
    )
    start = time.monotonic()
    code, _, err = run("--num_workers", 2, path)
    assert code == 7 and time.monotonic() - start < 15
    tail = err[err.index("epl-launch: rank 1 failed first: it ended with exit code 7") :].splitlines()
    assert tail[1:] == ["[1] line %d" % i for i in range(30, 50)]
    assert gone("1234.75") and gone(path)


def test_a_rank_killed_by_a_signal(run, script):
    code, _, err = run("--num_workers", 2, script("import os; os.kill(os.getpid(), 9)"))
    assert code == 128 + 9 and "was killed by SIGKILL" in err


def test_the_blame_is_not_with_a_rank_that_ended_because_of_another(run, script):
    path = script("import os, sys, time; r = int(os.environ['HOROVOD_RANK']); time.sleep(0.7 * r); sys.exit([70, 4][r])")
    code, _, err = run("--num_workers", 2, path)
    assert code == 4 and "rank 1 failed first" in err


def test_what_a_rank_leaves_in_the_background_is_ended(run, script):
    code, out, _ = run(script("sleep 4321.5 & echo done", "background.sh"))
    assert (code, out) == (0, "[0] done\n") and gone("4321.5")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_all(number, script, tmp_path):
    path = script("import time; print('up', flush=True); time.sleep(1000)")
    command = [sys.executable, "-m", "epl.utils.launcher", "--num_workers=2", "--gpu_per_worker=1", "--debug=True", path]
    variables = dict(os.environ, PYTHONPATH=str(ROOT))
    # Where the tests run in the background, they are started with the signal ignored.
    restore = functools.partial(signal.signal, number, signal.SIG_DFL)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    launcher = subprocess.Popen(command, env=variables, preexec_fn=restore, **pipes)
    try:
        assert {launcher.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}
        launcher.send_signal(number)
        _, err = launcher.communicate(timeout=20)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + number and "ended by %s" % number.name in err
    assert gone(path)


@pytest.mark.parametrize(
    "argv, text",
    [
        (["--num_workers", "0", "x.py"], "--num_workers 0: expected a whole number from 1"),
        (["--num_workers", "two", "x.py"], "--num_workers two: expected a whole number"),
        (["--gpu_per_worker", "-1", "x.py"], "--gpu_per_worker -1: expected a whole number from 0"),
        (["nothing.py"], "there is no script nothing.py"),
        ([], "required"),
        (["--machine_list", "10.0.0.1", "x.py"], "'10.0.0.1'; expected an address with a port"),
        (
            ["--machine_list", "10.0.0.1:1,10.0.0.2:1", "--machine_rank", "2", "x.py"],
            "--machine_rank 2: --machine_list has 2 machines",
        ),
        (["--machine_rank", "1", "x.py"], "--machine_rank 1"),
        (["--machine_list", "198.51.100.1:1,198.51.100.2:1", "x.py"], "--machine_rank is missing"),
        (["--machine_list", "127.0.0.1:7000,127.0.0.1:7001", "--machine_rank", "0", "--num_workers", "2", "x.py"], "'127.0.0.1:7001' stands twice"),
        (["--wrong", "1", "x.py"], "--wrong"),
        (["--debug=maybe", "x.py"], "--debug=maybe"),
        (["--config", "nothing.yaml", "x.py"], "nothing.yaml: there is no such file"),
        (["--task_label", "a/b", "x.py"], "--task_label"),
        (["--log_dir", "x.py/logs", "x.py"], "--log_dir x.py/logs"),
        (["data.txt"], "is no .py or .sh file and is not executable"),
    ],
)
def test_a_bad_command_line_is_one_clear_line(run, tmp_path, monkeypatch, argv, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("print('started')")
    (tmp_path / "data.txt").write_text("")
    code, out, err = run(*argv)
    assert code == 2 and out == "" and text in err
    assert err.startswith("epl-launch: ") and len(err.splitlines()) == 1


def test_too_few_gpus(run, script):
    code, _, err = run("--num_workers", 2, "--gpu_per_worker", 2, script(""), CUDA_VISIBLE_DEVICES="0,1,2")
    assert code == 2 and "is 4 GPUs, but there are 3" in err


def test_several_workers_need_horovod(run, script, monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    code, _, err = run("--num_workers", 2, script(""))
    assert code == 2 and "2 ranks need Horovod" in err
    assert run(script(""))[0] == 0


def test_several_workers_within_a_tf_config_of_several_machines(run, script):
    cluster = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})
    code, _, err = run("--num_workers", 2, script(""), TF_CONFIG=cluster)
    assert code == 2 and "TF_CONFIG describes a job of 2 machines" in err


@pytest.mark.ranks
def test_a_job_over_two_machines_with_real_ranks():
    """Both "machines" are this one; the ranks meet by TF_CONFIG alone."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0)), second.bind(("127.0.0.1", 0))
        machines = "127.0.0.1:%d,127.0.0.1:%d" % (first.getsockname()[1], second.getsockname()[1])
    variables = dict(os.environ, PYTHONPATH=str(ROOT))
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "epl.cli.launch", "--machine_list", machines, "--machine_rank", str(rank), str(JOB), "none"],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [one.communicate(timeout=100)[0] for one in runs]
    finally:
        for one in runs:
            one.terminate()
    assert [one.returncode for one in runs] == [0, 0], "\n".join(outputs)
    for rank, output in enumerate(outputs):
        assert "[%d] rank %d is done" % (rank, rank) in output and "rendezvous of 2 workers at %s" % machines.split(",")[0] in output


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_started_by_horovodrun(script, tmp_path):
    """Over Gloo, as `horovodrun --gloo` does it where there is no MPI."""
    path = script(
        """
        import json
        import numpy as np
        import tensorflow.compat.v1 as tf
        tf.disable_v2_behavior()
        import epl
        epl.init()
        epl.set_default_strategy(epl.replicate(1))
        rank = epl.Env.get().cluster.worker_index
        x = tf.placeholder(tf.float32, [None])
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        loss = tf.reduce_mean(tf.square(w * x - 3.0 * x))
        epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            losses = [float(session.run([loss, train], {x: np.float32([[1, 3], [2, 4]][rank])})[0]) for _ in range(3)]
            print("found", json.dumps([rank, losses, float(session.run(w))]), flush=True)
        """
    )
    expected, w = [], 0.0
    for _ in range(3):
        expected.append(7.5 * (w - 3) ** 2)
        w -= 0.01 * 2 * 7.5 * (w - 3)
    horovodrun = pathlib.Path(sys.executable).with_name("horovodrun")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("EPL_", "HOROVOD_", "OMPI_", "PMIX_", "TF_CONFIG"))}
    variables.update(PYTHONPATH=str(ROOT), PATH="%s:%s" % (horovodrun.parent, variables["PATH"]), TF_CPP_MIN_LOG_LEVEL="2")
    command = [str(horovodrun), "-np", "2", "--gloo", sys.executable, path]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    found = sorted(json.loads(line.partition("found ")[2]) for line in done.stdout.splitlines() if "found [" in line)
    assert [one[0] for one in found] == [0, 1], done.stdout
    for _, losses, final in found:
        assert losses == pytest.approx(expected, rel=1e-5) and final == pytest.approx(w, rel=1e-5)
