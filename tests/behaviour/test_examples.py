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


@pytest.mark.parametrize("example", [pytest.param(e, marks=[pytest.mark.slow] if e == "digits" else []) for e in EXAMPLES])
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


@pytest.mark.slow
def test_mixed_precision_reaches_the_accuracy():
    """The script compares itself with plain training to 1e-5, which half precision can't reach: its exit code is 1."""
    environ = dict(os.environ, EPL_AMP_LEVEL="o1", PYTHONPATH=ROOT)
    done = subprocess.run([sys.executable, script("digits")], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with_it, without = re.findall(r"step  300 .* test accuracy +([\d.]+) %", done.stdout)
    assert float(without) > 97 and float(with_it) > float(without) - 1
    assert "equal within 1e-05 over the first 20 steps: NO" in done.stdout and done.returncode == 1


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


TUTORIALS = ROOT / "docs" / "en" / "tutorials"
LAYOUTS = {
    "pipeline": {
        "epl-launch --num_workers 2": (2, 1, 1, 2, 4),
        "python": (1, 2, 1, 2, 4),
        "epl-launch --num_workers 4": (4, 1, 2, 2, 4),
        "epl-launch --num_workers 4 --stages 4": (4, 1, 1, 4, 4),
        "epl-launch --num_workers 2 --schedule PreferForward --micro-batches 8": (2, 1, 1, 2, 8),
        "epl-launch --num_workers 2 --schedule ZeroBubbleH1": (2, 1, 1, 2, 4),
        "epl-launch --num_workers 2 --schedule Interleaved --stages 4": (2, 1, 1, 2, 4),
        "epl-launch --num_workers 2 --schedule ZeroBubbleV --stages 4": (2, 1, 1, 2, 4),
    },
    "classification": {
        "epl-launch --num_workers 2": (2, 1),
        "python": (1, 2),
        "epl-launch --num_workers 4 --group 2": (4, 1),
    },
    "moe": {
        "epl-launch --num_workers 2": (2, 1),
        "python": (1, 2),
        "epl-launch --num_workers 4 --group 2": (4, 1),
        "epl-launch --num_workers 2 --choices 1": (2, 1),
    },
}
"""What the tutorials train, by command without the script: ranks, devices of a rank; of pipelines also replicas, devices of a replica,
micro-batches."""
FAST = {
    "pipeline": ("epl-launch --num_workers 2",),
    "classification": (),
    "moe": ("python",),
}
FEWER_LAYERS = {"pipeline": ["--layers", "2"], "classification": [], "moe": ["--layers", "1"]}


def page_of(tutorial):
    return (TUTORIALS / (tutorial + ".md")).read_text(encoding="utf-8")


def tutorial_commands(tutorial):
    """(variables, command) of each command of a tutorial that is not `epl plan`."""
    blocks = re.findall(r"```bash\n(.*?)```", page_of(tutorial), re.DOTALL)
    found = []
    for line in "".join(blocks).splitlines():
        words = shlex.split(line)
        variables = dict(word.split("=") for word in words if re.match(r"EPL_\w+=", word))
        if "plan" not in words:
            found.append((variables, words[len(variables) :]))
    return found


def without_script(command):
    return " ".join(word for word in command if not word.endswith(".py"))


def marks_of(tutorial, command):
    ranks = [pytest.mark.ranks] if command[0] == "epl-launch" else []
    return ranks + ([] if without_script(command) in FAST[tutorial] else [pytest.mark.slow])


@pytest.mark.parametrize(
    "tutorial, variables, command",
    [
        pytest.param(tutorial, variables, command, id="%s %s" % (tutorial, without_script(command)), marks=marks_of(tutorial, command))
        for tutorial in LAYOUTS
        for variables, command in tutorial_commands(tutorial)
    ],
)
def test_tutorial(tutorial, variables, command):
    label = without_script(command)
    programs = {"python": [sys.executable], "epl-launch": [sys.executable, "-m", "epl.cli.launch"]}
    short = ["--steps", "3"] + (FEWER_LAYERS[tutorial] if label in FAST[tutorial] else [])
    output = run(programs[command[0]] + command[1:] + short, **variables)
    ranks, devices, *pipeline = LAYOUTS[tutorial][label]
    layout = "%d rank(s) x %d device(s)" % (ranks, devices)
    if pipeline:
        layout += ", %d replica(s) on %d device(s) each, %d micro-batches," % tuple(pipeline)
    assert_equal_to_plain(output, 3, layout)
    assert "does not fit this program" not in output  # the schedule is kept


@pytest.mark.parametrize("tutorial", LAYOUTS)
def test_tutorials_have_all_layouts(tutorial):
    assert [without_script(command) for _, command in tutorial_commands(tutorial)] == list(LAYOUTS[tutorial])


def test_tutorial_shows_the_plan():
    text = page_of("pipeline")
    command = re.search(r"^epl (plan .*)$", text, re.MULTILINE).group(1)
    output = run([sys.executable, "-m", "epl.cli.main"] + shlex.split(command))
    shown, why = (without_counts(part) for part in re.findall(r"```\n(plan of .*?)```.*?```\n(Node .*?)```", text, re.DOTALL)[0])
    assert shown in without_counts(output) and why in without_counts(output), output


@pytest.mark.parametrize("tutorial", ("classification", pytest.param("moe", marks=pytest.mark.slow)))
def test_tutorial_shows_what_is_divided(tutorial):
    """Each line of the plan that the page shows is in the output, in this order."""
    text = page_of(tutorial)
    command = re.search(r"^epl (plan .*)$", text, re.MULTILINE).group(1)
    output = run([sys.executable, "-m", "epl.cli.main"] + shlex.split(command))
    if tutorial == "classification" and "3118 different ones" not in output and sys.version_info[:2] != (3, 11):
        pytest.skip("the documentation of this Python, which is the text, has other words")
    lines = iter(without_counts(output).splitlines())
    for shown in re.search(r"```\n(split over .*?)```", text, re.DOTALL).group(1).splitlines():
        assert shown == "..." or without_counts(shown) in lines, (shown, output)


def without_counts(plan):
    """A plan without the numbers of nodes and bytes, which depend on TensorFlow's version."""
    return re.sub(r"(?<!\[)(?<!, ) *(?<!\w)\d{2,}|_\d+(?=:)", " N", plan)


def build_model_of(example):
    """The lines of `build_model` in an example."""
    text = (ROOT / script(example)).read_text(encoding="utf-8")
    function = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "build_model")
    return ast.get_source_segment(text, function).splitlines()


def difference_to(example):
    """The lines of a diff of the model of char_transformer.py and that of another example: all that differs but for indentation."""
    plain, other = build_model_of("char_transformer"), build_model_of(example)
    found = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, [x.strip() for x in plain], [x.strip() for x in other]).get_opcodes():
        found += [" " + line for line in other[c:d]] if tag == "equal" else ["-" + x for x in plain[a:b]] + ["+" + x for x in other[c:d]]
    return found


@pytest.mark.parametrize("tutorial, example", (("pipeline", "char_transformer_pipeline"), ("moe", "moe_transformer")))
def test_tutorial_shows_the_difference(tutorial, example):
    shown = re.search(r"```diff\n(.*?)```", page_of(tutorial), re.DOTALL).group(1)
    assert shown == "\n".join(difference_to(example)) + "\n"


def test_pipeline_differs_in_scopes_alone():
    changed = [line[1:].strip() for line in difference_to("char_transformer_pipeline") if line[0] == "+"]
    assert all(line.startswith(("def build_model", "with ")) and "stages" in line for line in changed), changed


def test_tutorial_shows_the_classifier():
    """The pieces of code on the page are those of the example."""
    lines = [line.strip() for line in (ROOT / script("word_classifier")).read_text(encoding="utf-8").splitlines()]
    for block in re.findall(r"```python\n(.*?)```", page_of("classification"), re.DOTALL):
        piece = [line.strip() for line in block.splitlines()]
        assert any(lines[at : at + len(piece)] == piece for at in range(len(lines))), block


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
