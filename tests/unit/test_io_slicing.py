"""Dealing files to workers."""

import pytest

from epl.errors import ConfigError
from epl.runtime.io_slicing import slice_files


def deal(number, replicas, **switches):
    """What all workers get of files "0", "1", ..., as one text per worker."""
    files = [str(i) for i in range(number)]
    return [",".join(slice_files(files, replicas, w, **switches)) for w in range(len(replicas))]


@pytest.mark.parametrize(
    "number, replicas, switches, expected",
    [
        (2, [2, 2], {}, ["0", "1"]),
        (4, [2, 2], {}, ["0,2", "1,3"]),
        (1, [2, 2], {}, ["0", "0"]),
        (3, [2, 2], {}, ["0,1,2", "0,1,2"]),
        (3, [2, 2], {"drop_last": True}, ["0", "1"]),
        (3, [4, 2], {}, ["0,1", "2"]),
        (2, [4, 2], {}, ["0,0,1,1", "0,1"]),
        (4, [4, 2], {}, ["0,0,1,1,2,2,3,3", "0,1,2,3"]),
        (4, [4, 2], {"drop_last": True}, ["0,1", "2"]),
        (4, [4, 2], {"unbalanced": True}, ["0,1,3", "2"]),
    ],
)
def test_numbers_of_the_contract(number, replicas, switches, expected):
    assert deal(number, replicas, **switches) == expected


def test_more_rounds_and_workers():
    assert deal(8, [2, 1, 1]) == ["0,1,4,5", "2,6", "3,7"]
    assert deal(5, [2, 1, 1], unbalanced=True) == ["0,1,4", "2", "3"]
    assert deal(5, [3]) == ["0,1,2,3,4"]


def test_switches_change_nothing_when_the_rounds_are_full():
    for switches in ({"drop_last": True}, {"unbalanced": True}, {"drop_last": True, "unbalanced": True}):
        assert deal(6, [4, 2], **switches) == ["0,1,3,4", "2,5"]


def test_dropping_comes_before_dealing_the_rest():
    assert deal(4, [4, 2], drop_last=True, unbalanced=True) == ["0,1", "2"]


def test_worker_without_replicas_reads_nothing():
    assert deal(4, [2, 0, 2]) == ["0,2", "", "1,3"]
    assert deal(3, [2, 0, 2]) == ["0,1,2", "", "0,1,2"]
    assert deal(3, [2, 0, 2], unbalanced=True) == ["0,2", "", "1"]


def warnings_of(caplog, number, replicas, **switches):
    caplog.clear()
    deal(number, replicas, **switches)
    return [record.getMessage() for record in caplog.records]


def test_a_warning_says_that_every_worker_reads_all(caplog):
    for number, replicas, rounds in ((1, [2, 2], "2 (shares [1, 1])"), (3, [1, 1], "2 (shares [1, 1])"), (4, [4, 2], "3 (shares [2, 1])")):
        lines = warnings_of(caplog, number, replicas)
        assert len(lines) == len(replicas) and len(set(lines)) == 1 and {record.levelname for record in caplog.records} == {"WARNING"}
        for text in ("%d files do not fill rounds of %s" % (number, rounds), "every worker reads all of them",
                     "io.unbalanced_io_slicing", "io.drop_last_files"):  # fmt: skip
            assert text in lines[0]


def test_no_warning_when_files_are_divided(caplog):
    for number, switches in ((4, {}), (5, {"drop_last": True}), (5, {"unbalanced": True})):
        assert warnings_of(caplog, number, [1, 1], **switches) == []


def test_the_files_stay_as_they_are():
    files = ["b", "a", "c"]
    slice_files(files, [1, 1], 0, drop_last=True)
    assert files == ["b", "a", "c"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([], [1, 1], 0), "no input files to deal to the 2 workers"),
        ((["a"], [1, 1], 2), "worker_index=2, expected 0 to 1"),
        ((["a"], [1, 1], -1), "worker_index=-1"),
        ((["a"], [0, 0], 0), "not all 0"),
        ((["a"], [1, 1], 0, True), "all would be dropped"),
        ((["a"], [1, 1], 0, False, True), "leave worker 1 without any"),
        ((["a"], [1, 1], 1, False, True), "leave worker 1 without any"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ConfigError, match=message):
        slice_files(*arguments)
