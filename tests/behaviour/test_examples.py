"""The examples train, and agree with their own plain runs."""

import ast
import difflib
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from epl.planner.schedules import make_schedule, peak_activations, simulate

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ("digits", "char_transformer")


def run(command, **variables):
    environ = dict(os.environ, PYTHONPATH=str(ROOT), **variables)
    environ["PATH"] = os.pathsep.join([str(pathlib.Path(sys.executable).parent), environ["PATH"]])
    done = subprocess.run(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def script(example):
    return os.path.join("examples", example + ".py")


def assert_equal_to_plain(output, steps, layout):
    assert "Comparison: EPL on %s against plain TensorFlow on one device" % layout in output
    assert re.search(r"equal within 1e-05 over the first \d+ steps: yes", output)
    shown = re.findall(r"^(?:.*\s)?(\d+) +[\d.]+ +[\d.]+ +[\d.e+-]+$", output, re.MULTILINE)
    assert shown[0] == "1" and shown[-1] == str(steps)


@pytest.mark.parametrize("example", EXAMPLES)
def test_two_local_devices(example):
    output = run([sys.executable, script(example), "--steps", "24"], EPL_CLUSTER_DEVICES_PER_WORKER="2")
    assert_equal_to_plain(output, 24, "1 rank(s) x 2 device(s)")


@pytest.mark.ranks
@pytest.mark.parametrize("example", [pytest.param(e, marks=[pytest.mark.slow] if e == "digits" else []) for e in EXAMPLES])
def test_two_ranks(example):
    output = run([sys.executable, "-m", "epl.cli.launch", "--num_workers", "2", script(example), "--steps", "24"])
    assert_equal_to_plain(output, 24, "2 rank(s) x 1 device(s)")


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_with_two_devices():
    launch = [sys.executable, "-m", "epl.cli.launch", "--num_workers", "2"]
    output = run(launch + [script("digits"), "--steps", "6", "--global-batch", "32"], EPL_CLUSTER_DEVICES_PER_WORKER="2")
    assert_equal_to_plain(output, 6, "2 rank(s) x 2 device(s)")


def test_plain_needs_no_epl(tmp_path):
    """The plain run of an example does not import EPL."""
    blocker = tmp_path / "epl.py"
    blocker.write_text("raise ImportError('the plain run imported epl')\n")
    environ = dict(os.environ, PYTHONPATH=str(tmp_path))
    command = [sys.executable, script("digits"), "--plain", "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "step    2  loss" in done.stdout


def test_batch_that_can_not_be_divided():
    environ = dict(os.environ, PYTHONPATH=str(ROOT), EPL_CLUSTER_DEVICES_PER_WORKER="3")
    done = subprocess.run([sys.executable, script("digits")], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 1
    assert "--global-batch 64 can't be divided over 3 replicas" in done.stdout


TUTORIAL = ROOT / "docs" / "en" / "tutorials" / "pipeline.md"
LAYOUTS = {
    "epl-launch --num_workers 2": (2, 1, 1, 2, 4),
    "python": (1, 2, 1, 2, 4),
    "epl-launch --num_workers 4": (4, 1, 2, 2, 4),
    "epl-launch --num_workers 4 --stages 4": (4, 1, 1, 4, 4),
    "epl-launch --num_workers 2 --schedule PreferForward --micro-batches 8": (2, 1, 1, 2, 8),
    "epl-launch --num_workers 2 --schedule ZeroBubbleH1": (2, 1, 1, 2, 4),
    "epl-launch --num_workers 2 --schedule Interleaved --stages 4": (2, 1, 1, 2, 4),
    "epl-launch --num_workers 2 --schedule ZeroBubbleV --stages 4": (2, 1, 1, 2, 4),
}
"""What the tutorial trains, by command without the script: ranks, devices of a rank, replicas, devices of a replica, micro-batches."""
FAST = ("epl-launch --num_workers 2",)


def tutorial_commands():
    """(variables, command) of each command of the tutorial that is not `epl plan`."""
    blocks = re.findall(r"```bash\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)
    found = []
    for line in "".join(blocks).splitlines():
        words = shlex.split(line)
        variables = dict(word.split("=") for word in words if re.match(r"EPL_\w+=", word))
        if "plan" not in words:
            found.append((variables, words[len(variables) :]))
    return found


def without_script(command):
    return " ".join(word for word in command if not word.endswith(".py"))


@pytest.mark.parametrize(
    "variables, command",
    [
        pytest.param(
            variables,
            command,
            id=without_script(command),
            marks=([pytest.mark.ranks] if command[0] == "epl-launch" else []) + ([] if without_script(command) in FAST else [pytest.mark.slow]),
        )
        for variables, command in tutorial_commands()
    ],
)
def test_tutorial_of_pipelines(variables, command):
    label = without_script(command)
    programs = {"python": [sys.executable], "epl-launch": [sys.executable, "-m", "epl.cli.launch"]}
    short = ["--steps", "3"] + (["--layers", "2"] if label in FAST else [])
    output = run(programs[command[0]] + command[1:] + short, **variables)
    layout = "%d rank(s) x %d device(s), %d replica(s) on %d device(s) each, %d micro-batches," % LAYOUTS[label]
    assert_equal_to_plain(output, 3, layout)
    assert "does not fit this program" not in output  # the schedule is kept


def test_tutorial_has_all_layouts():
    assert [without_script(command) for _, command in tutorial_commands()] == list(LAYOUTS)


def test_tutorial_shows_the_plan():
    text = TUTORIAL.read_text(encoding="utf-8")
    command = re.search(r"^epl (plan .*)$", text, re.MULTILINE).group(1)
    output = run([sys.executable, "-m", "epl.cli.main"] + shlex.split(command))
    shown, why = (without_counts(part) for part in re.findall(r"```\n(plan of .*?)```.*?```\n(Node .*?)```", text, re.DOTALL)[0])
    assert shown in without_counts(output) and why in without_counts(output), output


def without_counts(plan):
    """A plan without the numbers of nodes and bytes, which depend on TensorFlow's version."""
    return re.sub(r"(?<!\[)(?<!, ) *(?<!\w)\d{2,}|_\d+(?=:)", " N", plan)


def build_model_of(example):
    """The lines of `build_model` in an example."""
    text = (ROOT / script(example)).read_text(encoding="utf-8")
    function = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "build_model")
    return ast.get_source_segment(text, function).splitlines()


def test_tutorial_shows_the_difference():
    """The model of the pipeline is that of the first example with scopes: the page shows all that differs but for indentation."""
    plain, staged = (build_model_of(example) for example in ("char_transformer", "char_transformer_pipeline"))
    expected = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, [x.strip() for x in plain], [x.strip() for x in staged]).get_opcodes():
        expected += [" " + line for line in staged[c:d]] if tag == "equal" else ["-" + x for x in plain[a:b]] + ["+" + x for x in staged[c:d]]
    shown = re.search(r"```diff\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL).group(1)
    assert shown == "\n".join(expected) + "\n"
    changed = [line[1:].strip() for line in expected if line[0] == "+"]
    assert all(line.startswith(("def build_model", "with ")) and "stages" in line for line in changed), changed


def test_table_of_schedules():
    """The figures of the second table of schedules."""
    text = (ROOT / "docs" / "en" / "pipelines.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) % \| ([\d., ]+) \|$", text, re.MULTILINE)
    assert len(rows) == 7
    for name, stages, bubble, activations in rows:
        schedule = make_schedule(name, int(stages), 8, 4)
        share = 4 / int(stages)  # of a device's layers in one stage
        timeline = simulate(schedule, {kind: share for kind in "FBW"})
        kept = peak_activations(schedule, [share] * int(stages))
        assert (bubble, activations) == ("%.0f" % (100 * timeline.bubble_share), ", ".join("%g" % k for k in kept)), name


README_STUBS = """
import numpy as np
import tensorflow.compat.v1 as tf

def my_dataset():
    x = np.arange(512, dtype=np.float32).reshape(256, 2) / 512
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1] * 3))

def my_model(x, y):
    return tf.reduce_mean(tf.square(tf.layers.dense(x, 1) - y))

"""


@pytest.mark.parametrize("page", ["README.md", "README_cn.md"])
def test_readme_script(page, tmp_path):
    text = (ROOT / page).read_text(encoding="utf-8")
    first = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    code = README_STUBS + first + "\nprint('DONE', epl.Env.get().cluster.total_gpu_num)\n"
    path = tmp_path / "train.py"
    path.write_text(code, encoding="utf-8")
    assert "DONE 2" in run([sys.executable, str(path)], EPL_CLUSTER_DEVICES_PER_WORKER="2")
