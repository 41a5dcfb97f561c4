"""Files that EPL writes: whoever reads one sees the old one or all of the new one, and no log of an earlier run is lost."""

import os
import sys
import types

import pytest
import tensorflow.compat.v1 as tf

from epl.cli import report
from epl.cli.supervise import Command, run_commands
from epl.profiler import memory_profiler_hook
from epl.profiler.memory_profiler_hook import DeviceMemory, MemoryProfilerHook, draw_memory
from epl.profiler.timeline import draw


class Broken(Exception):
    """Ends the writing in the middle."""


class Half:
    """A figure, a table of a page or metadata whose writing breaks in the middle."""

    def __init__(self, old):
        self._old = old

    def savefig(self, target, **options):
        if hasattr(target, "write"):
            target.write("<svg></svg>")
        else:
            with open(target, "w") as out:
                out.write("half")
            self._break()

    def replace(self, *arguments):
        self._break()

    def SerializeToString(self):
        self._break()

    def _break(self):
        assert self._old.read_text() == "old", "the file is overwritten before the new one is whole"
        raise Broken


@pytest.fixture
def old(tmp_path):
    """Makes a file of an earlier time, alone in its folder."""

    def make(name):
        (tmp_path / name).write_text("old")
        return tmp_path / name

    return make


def check_untouched(path):
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == [path.name], "nothing is left behind"


@pytest.mark.parametrize("ending", report.FORMATS)
def test_a_picture_whose_writing_breaks(ending, old, monkeypatch):
    path = old("report" + ending)
    monkeypatch.setattr(draw, "draw", lambda trace, step: Half(path))
    with pytest.raises(Broken):
        report.write_picture(None, None, str(path), ending, Half(path))
    check_untouched(path)


def test_a_page_takes_the_place_of_the_old_one(old, monkeypatch):
    path = old("report.html")
    monkeypatch.setattr(draw, "draw", lambda trace, step: Half(path))
    report.write_picture(None, None, str(path), ".html", "the table")
    assert "the table" in path.read_text() and os.listdir(path.parent) == [path.name]


def test_a_picture_of_memory_whose_writing_breaks(old, monkeypatch):
    from matplotlib.figure import Figure

    path = old("memory_1.png")
    monkeypatch.setattr(Figure, "savefig", lambda self, target, **options: Half(path).savefig(target))
    with pytest.raises(Broken):
        draw_memory({"cpu": DeviceMemory(8, [0, 1], [4, 0], [])}, str(path), "Run 1")
    check_untouched(path)


def test_metadata_whose_writing_breaks(old, monkeypatch):
    path = old("run_metadata_1.bin")
    monkeypatch.setattr(memory_profiler_hook, "profile_memory", lambda metadata: {})
    hook = MemoryProfilerHook(save_steps=1, output_dir=str(path.parent), dump_metadata=True, visualize=False)
    hook.before_run(None)
    with pytest.raises(Broken):
        hook.after_run(None, types.SimpleNamespace(run_metadata=Half(path)))
    check_untouched(path)
    hook.after_run(None, types.SimpleNamespace(run_metadata=tf.RunMetadata()))
    assert path.read_bytes() == b"" and os.listdir(path.parent) == [path.name]


FOLLOWS = """
import time
print("now", flush=True)
for _ in range(200):
    time.sleep(0.05)
    if open(%r).read() == "now\\n":
        break
else:
    raise SystemExit(1)
"""


def run_with_log(path, code):
    return run_commands([Command(0, [sys.executable, "-c", code], dict(os.environ), str(path))])


def test_logs_of_earlier_runs_stay(tmp_path, capfd):
    path = tmp_path / "rank_0.log"
    for number in range(3):
        assert run_with_log(path, "print('run %d')" % number) == 0
    found = {name: (tmp_path / name).read_text() for name in sorted(os.listdir(tmp_path))}
    assert found == {"rank_0.log": "run 2\n", "rank_0.log.1": "run 0\n", "rank_0.log.2": "run 1\n"}


def test_a_log_that_is_followed_is_not_cut(tmp_path, capfd):
    """Whoever has the log of a run open reads it to its end, whatever begins meanwhile; a new run's log grows as the run goes on."""
    path = tmp_path / "rank_0.log"
    path.write_text("the first run\n")
    with open(path, "rb", buffering=0) as follower:
        assert follower.read(4) == b"the "
        assert run_with_log(path, FOLLOWS % str(path)) == 0
        assert follower.read() == b"first run\n"


def test_an_empty_log_is_no_run(tmp_path, capfd):
    path = tmp_path / "rank_0.log"
    path.write_text("")
    assert run_with_log(path, "print('run')") == 0
    assert os.listdir(tmp_path) == ["rank_0.log"] and path.read_text() == "run\n"
