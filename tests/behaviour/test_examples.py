"""The examples train, and agree with their own plain runs."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

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
@pytest.mark.parametrize("example", EXAMPLES)
def test_two_ranks(example):
    output = run([sys.executable, "-m", "epl.cli.launch", "--num_workers", "2", script(example), "--steps", "24"])
    assert_equal_to_plain(output, 24, "2 rank(s) x 1 device(s)")


@pytest.mark.ranks
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
