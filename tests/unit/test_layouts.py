import pytest

from epl.cluster import layouts
from epl.cluster.devices import choose_devices, device_name, select_visible, share_of_machine, worker_of
from epl.cluster.virtual_device import VirtualDevice, build_virtual_devices
from epl.errors import ClusterError, EplError


def gpu(worker, index):
    return "/job:worker/replica:0/task:%d/device:GPU:%d" % (worker, index)


def flat(num_workers, num_devices):
    return [gpu(worker, index) for worker in range(num_workers) for index in range(num_devices)]


def test_names():
    assert device_name(2, "CPU", 3) == "/job:worker/replica:0/task:2/device:CPU:3"
    assert worker_of(gpu(12, 0)) == 12
    assert layouts.worker_devices(2, "GPU", 2) == [[gpu(0, 0), gpu(0, 1)], [gpu(1, 0), gpu(1, 1)]]


def test_all():
    assert layouts.all_devices(layouts.worker_devices(2, "GPU", 4)) == [[[device] for device in flat(2, 4)]]


def test_specific_is_taken_as_given():
    given = [[[gpu(1, 0)], [gpu(0, 1)]], [[gpu(0, 0), gpu(1, 1)], [gpu(1, 3)]]]
    assert layouts.specific(given, 2) == given
    assert layouts.specific(tuple(tuple(map(tuple, slices)) for slices in given), 2) == given


MACHINES = [
    (["192.34.5.1:8000", "192.34.5.2:8001"], [0, 1]),
    (["1:8000", "2:8001", "1:8002", "2:8003"], [0, 2, 1, 3]),
    (["b:1", "a:1", "c:1", "a:2", "b:2"], [0, 4, 1, 3, 2]),
    (["h1", "h2", "h1:1"], [0, 2, 1]),
    (["[::1]:1", "[::2]:1", "[::1]:2"], [0, 2, 1]),
]


@pytest.mark.parametrize("hosts,order", MACHINES)
def test_group_by_machine(hosts, order):
    assert layouts.group_by_machine(hosts) == order


def test_aware_row():
    assert layouts.aware_row(layouts.worker_devices(2, "GPU", 1), 1) == [[[gpu(0, 0)]], [[gpu(1, 0)]]]
    assert layouts.aware_row(layouts.worker_devices(4, "GPU", 1), 2) == [[[gpu(0, 0)], [gpu(1, 0)]], [[gpu(2, 0)], [gpu(3, 0)]]]
    assert layouts.aware_row(layouts.worker_devices(2, "GPU", 2), 2) == [[[device] for device in flat(2, 2)]]


COUNTS = [
    ([None], [], 4, [1]),
    ([None, None], [], 4, [1, 1]),
    ([None], [True], 4, [4]),
    ([1, None], [False, True], 8, [1, 8]),
    ([2, None, 3], [True, False, True], 8, [2, 1, 3]),
]


@pytest.mark.parametrize("given,is_split,total,counts", COUNTS)
def test_resolve_counts(given, is_split, total, counts):
    assert layouts.resolve_counts(given, is_split, total) == counts


# Devices are numbered over all workers; each row is the slices of one taskgraph.
PLACED = [
    # One stage: one device per replica, or two.
    (4, [1], False, True, [[[0], [1], [2], [3]]]),
    (4, [2], False, True, [[[0, 1], [2, 3]]]),
    # Two stages: a replica occupies neighbouring devices.
    (4, [1, 1], False, True, [[[0], [2]], [[1], [3]]]),
    (2, [1, 1], False, True, [[[0]], [[1]]]),
    (4, [1, 1, 1, 1], False, True, [[[0]], [[1]], [[2]], [[3]]]),
    (6, [1, 2], False, True, [[[0], [3]], [[1, 2], [4, 5]]]),
    # Stages first.
    (4, [1, 1], False, False, [[[0], [1]], [[2], [3]]]),
    (6, [1, 2], False, False, [[[0], [1]], [[2, 3], [4, 5]]]),
    (8, [2, 1, 1], False, False, [[[0, 1], [2, 3]], [[4], [5]], [[6], [7]]]),
    (4, [1], False, False, [[[0], [1], [2], [3]]]),
    # Shared devices.
    (2, [1], True, True, [[[0], [1]]]),
    (1, [1, 1, 1], True, True, [[[0]], [[0]], [[0]]]),
    (4, [4, 4], True, True, [[[0, 1, 2, 3]], [[0, 1, 2, 3]]]),
    (4, [1, 2], True, True, [[[0], [2]], [[0, 1], [2, 3]]]),
    (4, [1, 2], True, False, [[[0], [2]], [[0, 1], [2, 3]]]),
]


@pytest.mark.parametrize("total,counts,colocate,intra,expected", PLACED)
def test_place_taskgraphs(total, counts, colocate, intra, expected):
    placed = layouts.place_taskgraphs([gpu(0, k) for k in range(total)], counts, colocate, intra)
    assert placed == [[[gpu(0, k) for k in row] for row in slices] for slices in expected]


def test_every_device_is_used_once():
    for intra in (True, False):
        placed = layouts.place_taskgraphs(flat(3, 4), [1, 2, 3], False, intra)
        assert sorted(device for slices in placed for row in slices for device in row) == sorted(flat(3, 4))


def test_intra_node_decides_where_a_replica_lies():
    """Two workers of two devices, two stages."""
    inside = layouts.place_taskgraphs(flat(2, 2), [1, 1], prefer_intra_node=True)
    across = layouts.place_taskgraphs(flat(2, 2), [1, 1], prefer_intra_node=False)
    assert inside == [[[gpu(0, 0)], [gpu(1, 0)]], [[gpu(0, 1)], [gpu(1, 1)]]]
    assert across == [[[gpu(0, 0)], [gpu(0, 1)]], [[gpu(1, 0)], [gpu(1, 1)]]]


LAYOUTS = [("all", ("all", None)), ("auto", ("auto", None)), ({"aware_row": 2}, ("aware_row", 2)), ({"specific": [[["d"]]]}, ("specific", [[["d"]]]))]


@pytest.mark.parametrize("layout,parsed", LAYOUTS)
def test_parse_layout(layout, parsed):
    assert layouts.parse_layout(layout) == parsed


def test_local_devices_of_one_worker():
    pair = build_virtual_devices([[[gpu(0, 0)], [gpu(0, 2)]], [[gpu(0, 1)], [gpu(0, 3)]]], 0)
    assert [device.local_devices for device in pair] == [(gpu(0, 0), gpu(0, 2)), (gpu(0, 1), gpu(0, 3))]
    assert pair[1].get_device(1, 0) == gpu(0, 3)
    assert pair[0]._slice_devices == [[gpu(0, 0)], [gpu(0, 2)]]
    assert (pair[0].num_replicas, pair[0].num_devices(1), pair[0].local_replicas, pair[1].index) == (2, 1, [0, 1], 1)
    assert pair[0].all_devices == [gpu(0, 0), gpu(0, 2)]
    assert repr(pair[1]) == "VirtualDevice(1, %r)" % [[gpu(0, 1)], [gpu(0, 3)]]


def test_local_devices_of_later_taskgraphs_go_with_the_first():
    """A replica whose stages lie on two workers belongs to the worker of its first stage."""
    slices = [[[gpu(0, 0)], [gpu(0, 1)]], [[gpu(1, 0)], [gpu(1, 1)]]]
    assert [device.local_devices for device in build_virtual_devices(slices, 0)] == [(gpu(0, 0), gpu(0, 1)), (gpu(1, 0), gpu(1, 1))]
    assert [device.local_devices for device in build_virtual_devices(slices, 1)] == [(), ()]
    rows = [[[gpu(0, 0), gpu(1, 0)]], [[gpu(0, 1), gpu(1, 1)]]]
    assert [device.local_devices for device in build_virtual_devices(rows, 1)] == [(gpu(1, 0),), (gpu(1, 1),)]


def test_local_devices_of_slices_of_other_shape():
    wider = [[[gpu(0, 0)], [gpu(1, 0)]], [[gpu(0, 1), gpu(0, 2)], [gpu(1, 1), gpu(1, 2)]]]
    assert build_virtual_devices(wider, 1)[1].local_devices == (gpu(1, 1), gpu(1, 2))
    assert build_virtual_devices(wider, 1)[1].local_replicas == [1]
    fewer = [[[gpu(0, 0)], [gpu(1, 0)]], [[gpu(0, 0), gpu(1, 0)]]]
    assert build_virtual_devices(fewer, 1)[1].local_devices == (gpu(1, 0),)


VISIBLE = [(4, "", [0, 1, 2, 3]), (4, "1", [1]), (4, "3, 0", [3, 0]), (1, "1", [0]), (2, "2,3", [0, 1]), (0, "", [])]


@pytest.mark.parametrize("count,selection,positions", VISIBLE)
def test_select_visible(count, selection, positions):
    assert select_visible(count, selection) == positions


def test_share_of_machine():
    assert share_of_machine(["a", "b", "c", "d"], 1, 2) == ["c", "d"]
    assert share_of_machine(["a", "b"], 1, 2) == ["b"]


PHYSICAL = ["/physical_device:GPU:%d" % index for index in range(4)]
CHOSEN = {
    "all_real": (PHYSICAL, PHYSICAL, "", 0, ["/device:GPU:0", "/device:GPU:1", "/device:GPU:2", "/device:GPU:3"], PHYSICAL),
    "real_renumbered": (PHYSICAL, PHYSICAL, "2,3", 0, ["/device:GPU:0", "/device:GPU:1"], PHYSICAL[2:]),
    "limited": (PHYSICAL, PHYSICAL, "", 2, ["/device:GPU:0", "/device:GPU:1"], PHYSICAL[:2]),
    "pretended": (["x", "y"], [], "", 0, ["/device:CPU:0", "/device:CPU:1"], ["x", "y"]),
    "one_real": (PHYSICAL[:2], PHYSICAL[:1], "", 0, ["/device:GPU:0", "/device:CPU:1"], PHYSICAL[:2]),
}


@pytest.mark.parametrize("gpus,real,selection,limit,runtime_names,chosen", CHOSEN.values(), ids=CHOSEN)
def test_choose_gpus(gpus, real, selection, limit, runtime_names, chosen):
    devices, which = choose_devices(3, gpus, real, selection, limit)
    assert [device.runtime_name for device in devices] == runtime_names
    assert [device.name for device in devices] == [gpu(3, index) for index in range(len(runtime_names))]
    assert {device.kind for device in devices} == {"GPU"}
    assert [device.index for device in devices] == list(range(len(devices)))
    assert which == chosen


@pytest.mark.parametrize("limit,count", [(0, 1), (1, 1), (3, 3)])
def test_choose_cpus(limit, count):
    devices, which = choose_devices(1, [], [], "", limit)
    assert [device.name for device in devices] == ["/job:worker/replica:0/task:1/device:CPU:%d" % k for k in range(count)]
    assert [device.runtime_name for device in devices] == ["/device:CPU:%d" % k for k in range(count)]
    assert {device.kind for device in devices} == {"CPU"} and which == []


REFUSED = {
    "unknown": (lambda: layouts.parse_layout("rows"), "unknown layout 'rows'; expected 'all', 'auto', {'specific'"),
    "unknown_with_value": (lambda: layouts.parse_layout({"row": 1}), "unknown layout 'row'"),
    "no_value": (lambda: layouts.parse_layout("aware_row"), "layout 'aware_row' needs a value"),
    "superfluous": (lambda: layouts.parse_layout({"all": 2}), "layout 'all' takes no value"),
    "two": (lambda: layouts.parse_layout({"aware_row": 2, "specific": []}), "layout = {'aware_row': 2, 'specific': []}; expected"),
    "none": (lambda: layouts.parse_layout(None), "layout = None; expected"),
    "flat": (lambda: layouts.specific([["d"]], 1), "expected virtual devices as lists of slices"),
    "empty": (lambda: layouts.specific([[[]]], 1), "expected virtual devices as lists of slices"),
    "no_such_worker": (lambda: layouts.specific([[[gpu(2, 0)]]], 2), "there are 2 workers, 0 to 1"),
    "no_device": (lambda: layouts.specific([[["GPU:0"]]], 2), "the device name 'GPU:0' has no task; expected one such as '/job:worker"),
    "row_3_of_2": (lambda: layouts.aware_row([["a"], ["b"]], 3), "can't divide 2 workers into virtual devices of 3; choose a divisor of 2"),
    "row_0": (lambda: layouts.aware_row([["a"]], 0), "expected the number of workers of a virtual device, from 1"),
    "row_true": (lambda: layouts.aware_row([["a"]], True), "expected the number of workers of a virtual device, from 1"),
    "no_taskgraph": (lambda: layouts.resolve_counts([], [], 4), "there is no taskgraph to lay out"),
    "count_0": (lambda: layouts.resolve_counts([1, 0], [], 4), "taskgraph 1 asks for 0 devices; expected at least 1"),
    "marks": (lambda: layouts.resolve_counts([1, 1], [True], 4), "2 device counts, but 1 marks of split taskgraphs"),
    "not_divisible": (
        lambda: layouts.place_taskgraphs(flat(1, 4), [1, 2]),
        "one replica of the model needs 3 devices (sum of the taskgraphs' device counts [1, 2]), and the cluster's 4 devices are no multiple "
        "of it; use 3 or 6 devices, or other device_counts",
    ),
    "too_few": (
        lambda: layouts.place_taskgraphs(flat(1, 2), [1, 2]),
        "needs 3 devices (sum of the taskgraphs' device counts [1, 2]), but the cluster has only 2; add devices or lower the device_count of a "
        "scope, or set cluster.colocate_split_and_replicate = True",
    ),
    "too_few_for_one": (lambda: layouts.place_taskgraphs(flat(1, 2), [4], True), "needs 4 devices (max of the taskgraphs' device counts [4])"),
    "visible_text": (lambda: select_visible(2, "gpu0"), "cluster.run_visible_devices = 'gpu0'; expected different GPU numbers such as '0,2'"),
    "visible_twice": (lambda: select_visible(2, "1,1"), "expected different GPU numbers"),
    "visible_too_big": (lambda: select_visible(4, "1,4"), "names GPU 4, but this worker sees 4 GPUs; expected numbers below 4, or ''"),
    "visible_without_gpus": (lambda: select_visible(0, "0"), "names GPU 0, but this worker sees 0 GPUs"),
    "too_many": (
        lambda: choose_devices(0, PHYSICAL, PHYSICAL, "1,2", 3),
        "cluster.devices_per_worker = 3, but worker 0 has 2 GPUs by cluster.run_visible_devices = '1,2'; set it to at most 2, or to 0",
    ),
    "limit_negative": (lambda: choose_devices(0, [], [], "", -1), "cluster.devices_per_worker = -1; expected 0"),
    "share": (lambda: share_of_machine(["a", "b", "c"], 0, 2), "2 processes of this machine see the same 3 GPUs, which can't be shared out evenly"),
    "no_slices": (lambda: VirtualDevice([]), "virtual device 0 has the slices []; expected at least one"),
    "no_replica": (lambda: VirtualDevice([[gpu(0, 0)]]).get_device(1, 0), "taskgraph 0 has 1 replicas; there is no replica 1"),
    "no_place": (lambda: VirtualDevice([[gpu(0, 0)]]).get_device(0, 1), "replica 0 of taskgraph 0 has 1 devices; there is no device 1"),
}


@pytest.mark.parametrize("call,text", REFUSED.values(), ids=REFUSED)
def test_refused(call, text):
    with pytest.raises(ClusterError) as caught:
        call()
    assert text in str(caught.value)
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, EplError)
