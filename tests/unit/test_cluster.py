import json
import os

import pytest

from epl.cluster import Cluster, LocalDevice
from epl.cluster import cluster as cluster_module
from epl.env import Env
from epl.errors import ClusterError

LAUNCHER_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MV2_COMM_WORLD_", "HOROVOD_", "SLURM_", "MPI_LOCAL", "EPL_", "CUDA_VISIBLE", "TF_CONFIG")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)
    Env.get().clear()
    yield
    Env.get().clear()


@pytest.fixture
def pretend(monkeypatch):
    """Pretend to have GPUs, as tests of users do: by assigning a function on the class."""

    def patch(count):
        monkeypatch.setattr(Cluster, "available_gpus", lambda self, *args, **kwargs: ["GPU:%d" % index for index in range(count)])

    patch(4)
    return patch


def gpu(worker, index):
    return "/job:worker/replica:0/task:%d/device:GPU:%d" % (worker, index)


def singles(num_workers, num_devices):
    return [[gpu(worker, index)] for worker in range(num_workers) for index in range(num_devices)]


def tf_config(monkeypatch, cluster, kind=None, index=0):
    content = {"cluster": cluster}
    if kind is not None:
        content["task"] = {"type": kind, "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps(content))


def launch(monkeypatch, rank, size):
    for name, value in (("RANK", rank), ("SIZE", size), ("LOCAL_RANK", rank), ("LOCAL_SIZE", size)):
        monkeypatch.setenv("OMPI_COMM_WORLD_" + name, str(value))


@pytest.mark.parametrize("text", [None, "", "  ", "{}", '{"cluster": {}}', '{"environment": "cloud"}', '{"task": {"type": "worker", "index": 0}}'])
def test_no_tf_config(monkeypatch, pretend, text):
    if text is not None:
        monkeypatch.setenv("TF_CONFIG", text)
    cluster = Cluster()
    assert (cluster.worker_index, cluster.worker_num, cluster.gpu_num_per_worker, cluster.total_gpu_num) == (0, 1, 4, 4)
    assert cluster.available_devices == [gpu(0, 0), gpu(0, 1), gpu(0, 2), gpu(0, 3)]
    assert cluster


W1, W2, P1, P2, C = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1", "10.0.0.5:1"
TF_CONFIGS = {
    "workers": ({"worker": [W1, W2]}, "worker", 1, 1, [W1, W2]),
    "index_as_text": ({"worker": [W1, W2]}, "worker", "1", 1, [W1, W2]),
    "ps_task": ({"worker": [W1, W2], "ps": [P1, P2]}, "ps", 1, 3, [W1, W2, P1, P2]),
    "worker_beside_ps": ({"ps": [P1], "worker": [W1, W2]}, "worker", 0, 0, [W1, W2, P1]),
    "chief": ({"worker": [W1, W2], "chief": [C]}, "chief", 0, 0, [C, W1, W2]),
    "worker_behind_chief": ({"worker": [W1, W2], "chief": [C]}, "worker", 0, 1, [C, W1, W2]),
    "ps_behind_all": ({"chief": [C], "worker": [W1], "ps": [P1, P2]}, "ps", 0, 2, [C, W1, P1, P2]),
    "chief_alone": ({"chief": [C]}, "chief", 0, 0, [C]),
    "chief_and_ps": ({"chief": [C], "ps": [P1]}, "ps", 0, 1, [C, P1]),
    "master": ({"master": [C], "worker": [W1]}, "master", 0, 0, [C, W1]),
    "evaluator_not_counted": ({"worker": [W1, W2], "evaluator": [P1]}, "worker", 1, 1, [W1, W2]),
    "no_task": ({"worker": [W1]}, None, 0, 0, [W1]),
    "one_machine": ({"worker": ["localhost:1", "localhost:2"]}, "worker", 1, 1, ["localhost:1", "localhost:2"]),
}


@pytest.mark.parametrize("given,kind,index,worker_index,hosts", TF_CONFIGS.values(), ids=TF_CONFIGS)
def test_tf_config(monkeypatch, pretend, given, kind, index, worker_index, hosts):
    tf_config(monkeypatch, given, kind, index)
    cluster = Cluster()
    assert cluster.worker_index == worker_index
    assert cluster.worker_num == len(hosts)
    assert cluster.gpu_num_per_worker == 4
    assert cluster.total_gpu_num == 4 * len(hosts)
    assert cluster._cluster_spec.job_tasks("worker") == hosts
    assert cluster.ranks == tuple(range(len(hosts)))
    assert cluster.available_devices == [gpu(worker_index, k) for k in range(4)]
    assert not cluster.is_evaluator


@pytest.mark.parametrize("given,host", [({"worker": [W1, W2]}, "localhost:0"), ({"worker": [W1, W2], "evaluator": [P1]}, P1), ({}, "localhost:0")])
def test_evaluator_is_a_job_of_its_own(monkeypatch, pretend, given, host):
    tf_config(monkeypatch, given, "evaluator", 0)
    cluster = Cluster()
    assert cluster.is_evaluator
    assert (cluster.worker_index, cluster.worker_num, cluster.total_gpu_num, cluster.hosts) == (0, 1, 4, (host,))


def test_layout_all(pretend):
    cluster = Cluster(worker_hosts="h1:1,h2:1", worker_index=0, layout="all")
    assert len(cluster.virtual_devices) == 1
    assert cluster.virtual_devices[0]._slice_devices == singles(2, 4)
    assert cluster.virtual_devices[0].local_devices == tuple(gpu(0, k) for k in range(4))
    assert (cluster.worker_index, cluster.worker_num, cluster.total_gpu_num) == (0, 2, 8)


def test_layout_all_with_ps(pretend):
    cluster = Cluster(worker_hosts="h1,h2", ps_hosts=["p1", "p2"], job_name="ps", worker_index=0)
    assert (cluster.worker_index, cluster.worker_num, cluster.total_gpu_num) == (2, 4, 16)
    assert cluster._cluster_spec.job_tasks("worker") == ["h1", "h2", "p1", "p2"]
    assert cluster.virtual_devices[0]._slice_devices == singles(4, 4)
    assert cluster.virtual_devices[0].local_devices == tuple(gpu(2, k) for k in range(4))


def test_layout_specific(pretend):
    slices = [[[gpu(0, 0)], [gpu(1, 0)]], [[gpu(0, 1)], [gpu(1, 1)]]]
    cluster = Cluster(worker_hosts="h1:1,h2:1", worker_index=1, layout={"specific": slices})
    assert [device._slice_devices for device in cluster.virtual_devices] == slices
    assert [device.local_devices for device in cluster.virtual_devices] == [(gpu(1, 0),), (gpu(1, 1),)]


AWARE = [
    ("192.34.5.1:8000,192.34.5.2:8001", 0, 1, 0, [[0], [1]], (0, 1)),
    ("1:8000,2:8001,1:8002,2:8003", 1, 2, 2, [[0, 1], [2, 3]], (0, 2, 1, 3)),
    ("1:8000,2:8001,1:8002,2:8003", 2, 2, 1, [[0, 1], [2, 3]], (0, 2, 1, 3)),
]


@pytest.mark.parametrize("hosts,index,per_device,worker_index,tasks,ranks", AWARE)
def test_layout_aware_row(pretend, hosts, index, per_device, worker_index, tasks, ranks):
    pretend(1)
    cluster = Cluster(worker_hosts=hosts, worker_index=index, layout={"aware_row": per_device})
    assert cluster.worker_index == worker_index
    assert cluster.ranks == ranks
    assert cluster._cluster_spec.job_tasks("worker") == [hosts.split(",")[rank] for rank in ranks]
    assert [device._slice_devices for device in cluster.virtual_devices] == [[[gpu(task, 0)] for task in row] for row in tasks]


def test_layout_auto_waits_for_the_taskgraphs(pretend):
    cluster = Cluster(layout="auto")
    assert cluster.virtual_devices == []
    made = cluster.generate_virtual_devices([1, 1])
    assert made is cluster.virtual_devices


GENERATED = {
    "one_stage": (4, [1], {}, [[[0], [1], [2], [3]]]),
    "no_scope": (4, [None], {}, [[[0], [1], [2], [3]]]),
    "two_stages": (4, [1, 1], {}, [[[0], [2]], [[1], [3]]]),
    "four_stages": (4, [1, 1, 1, 1], {}, [[[0]], [[1]], [[2]], [[3]]]),
    "no_counts": (4, [None, None], {}, [[[0], [2]], [[1], [3]]]),
    "split": (4, [None], {"is_split": [True]}, [[[0, 1, 2, 3]]]),
    "default_and_split": (1, [1, None, None], {"is_split": [False, True, True], "colocate": True}, [[[0]], [[0]], [[0]]]),
    "colocated": (2, [1], {"colocate": True}, [[[0], [1]]]),
    "stages_first": (4, [1, 1], {"prefer_intra_node": False}, [[[0], [1]], [[2], [3]]]),
}


@pytest.mark.parametrize("devices,counts,options,expected", GENERATED.values(), ids=GENERATED)
def test_generate_virtual_devices(pretend, devices, counts, options, expected):
    pretend(devices)
    cluster = Cluster(layout="auto")
    made = cluster.generate_virtual_devices(counts, **options)
    assert [device._slice_devices for device in made] == [[[gpu(0, k) for k in row] for row in slices] for slices in expected]
    assert [len(device.local_devices) for device in made] == [sum(map(len, slices)) for slices in expected]


def test_generated_over_two_workers(monkeypatch, pretend):
    pretend(1)
    tf_config(monkeypatch, {"worker": [W1, W2]}, "worker", 1)
    cluster = Cluster(layout="auto")
    first, second = cluster.generate_virtual_devices([1, 1])
    assert (first._slice_devices, second._slice_devices) == ([[gpu(0, 0)]], [[gpu(1, 0)]])
    assert (first.local_devices, second.local_devices) == ((), ())
    assert cluster.all_devices == [gpu(0, 0), gpu(1, 0)]


def test_visible_devices(monkeypatch, pretend):
    tf_config(monkeypatch, {"worker": [W1, W2]}, "worker", 1)
    monkeypatch.setenv("EPL_CLUSTER_RUN_VISIBLE_DEVICES", "1")
    Env.get().clear()
    cluster = Cluster()
    assert (cluster.gpu_num_per_worker, cluster.total_gpu_num) == (1, 2)
    assert cluster.available_devices == [gpu(1, 0)]
    assert cluster.virtual_devices[0]._slice_devices == [[gpu(0, 0)], [gpu(1, 0)]]
    assert cluster._cluster_spec.job_tasks("worker") == [W1, W2]


def test_devices_of_a_machine_without_gpus(monkeypatch, pretend):
    pretend(0)
    cluster = Cluster()
    assert cluster.local_devices() == [LocalDevice(0, "/job:worker/replica:0/task:0/device:CPU:0", "/device:CPU:0", "CPU")]
    assert (cluster.gpu_num_per_worker, cluster.total_gpu_num, cluster.visible_device_list) == (1, 1, "")
    Env.get().config.cluster.devices_per_worker = 3
    cluster = Cluster()
    assert cluster.available_devices == ["/job:worker/replica:0/task:0/device:CPU:%d" % k for k in range(3)]
    assert cluster.total_gpu_num == 3


def test_devices_per_worker_limits_gpus(pretend):
    Env.get().config.cluster.devices_per_worker = 2
    assert Cluster().available_devices == [gpu(0, 0), gpu(0, 1)]
    Env.get().config.cluster.devices_per_worker = 5
    with pytest.raises(ClusterError, match="cluster.devices_per_worker = 5, but worker 0 has 4 GPUs; set it to at most 4"):
        Cluster()


def test_pretended_gpus_run_on_cpus(pretend):
    pretend(2)
    assert Cluster().local_devices() == [LocalDevice(k, gpu(0, k), "/device:CPU:%d" % k, "GPU") for k in range(2)]


def test_available_gpus_is_asked_by_each_cluster(pretend):
    assert Cluster().gpu_num_per_worker == 4
    pretend(8)
    assert Cluster().gpu_num_per_worker == 8


class TestRealGpus:
    """What a machine with four GPUs does, as far as that can be told without one."""

    @pytest.fixture(autouse=True)
    def four(self, monkeypatch):
        monkeypatch.setattr(cluster_module, "physical_gpus", lambda: ["/physical_device:GPU:%d" % index for index in range(4)])

    def test_all(self):
        cluster = Cluster()
        assert [device.runtime_name for device in cluster.local_devices()] == ["/device:GPU:%d" % k for k in range(4)]
        assert cluster.visible_device_list == ""

    def test_selected(self):
        Env.get().config.cluster.run_visible_devices = "3,1"
        cluster = Cluster()
        assert [device.runtime_name for device in cluster.local_devices()] == ["/device:GPU:0", "/device:GPU:1"]
        assert cluster.visible_device_list == "3,1"

    def test_two_ranks_of_one_machine_share(self, monkeypatch):
        launch(monkeypatch, 1, 2)
        cluster = Cluster()
        assert cluster.visible_device_list == "2,3"
        assert cluster.available_devices == [gpu(1, 0), gpu(1, 1)]
        assert (cluster.worker_num, cluster.total_gpu_num) == (2, 4)

    def test_ranks_kept_apart_do_not_share(self, monkeypatch):
        launch(monkeypatch, 1, 3)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        assert Cluster().gpu_num_per_worker == 4
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        with pytest.raises(ClusterError, match="3 processes of this machine see the same 4 GPUs"):
            Cluster()


def test_ranks_without_tf_config(monkeypatch, pretend):
    launch(monkeypatch, 1, 3)
    cluster = Cluster()
    assert (cluster.worker_index, cluster.worker_num, cluster.total_gpu_num) == (1, 3, 12)
    assert cluster.hosts == ("localhost:0", "localhost:1", "localhost:2")
    assert repr(cluster) == "Cluster(worker 1 of 3, 4 devices each)"


def test_ranks_that_agree_with_tf_config(monkeypatch, pretend):
    tf_config(monkeypatch, {"chief": [C], "worker": [W1]}, "worker", 0)
    launch(monkeypatch, 1, 2)
    assert Cluster().hosts == (C, W1)


def test_arguments_before_tf_config(monkeypatch, pretend):
    monkeypatch.setenv("TF_CONFIG", "not even JSON")
    assert Cluster(worker_hosts="h1:1,h2:1", worker_index=1).hosts == ("h1:1", "h2:1")


RANK_CONFLICTS = {
    "size": ((0, 3), {"worker": [W1, W2]}, "worker", 0, "TF_CONFIG names 2 workers, but the launcher (mpirun, horovodrun) started 3 ranks"),
    "one_rank": ((0, 1), {"worker": [W1, W2]}, "worker", 0, "TF_CONFIG names 2 workers, but the launcher (mpirun, horovodrun) started 1 ranks"),
    "index": (
        (1, 2),
        {"worker": [W1, W2]},
        "worker",
        0,
        "TF_CONFIG makes this process worker 0, but the launcher (mpirun, horovodrun) made it rank 1",
    ),
    "chief_shifts": ((0, 2), {"chief": [C], "worker": [W1]}, "worker", 0, "TF_CONFIG makes this process worker 1"),
    "evaluator": ((1, 2), {"worker": [W1]}, "evaluator", 0, "TF_CONFIG makes this process the evaluator, but the launcher made it rank 1 of 2"),
}


@pytest.mark.parametrize("launched,given,kind,index,text", RANK_CONFLICTS.values(), ids=RANK_CONFLICTS)
def test_ranks_that_contradict_tf_config(monkeypatch, pretend, launched, given, kind, index, text):
    tf_config(monkeypatch, given, kind, index)
    launch(monkeypatch, *launched)
    with pytest.raises(ClusterError) as caught:
        Cluster()
    assert text in str(caught.value)


def test_ranks_that_contradict_arguments(monkeypatch, pretend):
    launch(monkeypatch, 1, 2)
    with pytest.raises(ClusterError, match="worker_hosts makes this process worker 0, but the launcher .* made it rank 1 of 2"):
        Cluster(worker_hosts="h1:1,h2:1")


REFUSED_ARGUMENTS = {
    "layout": ({"layout": "square"}, "unknown layout 'square'; expected 'all', 'auto',"),
    "aware_row": ({"worker_hosts": "a:1,b:1", "layout": {"aware_row": 3}}, "layout {'aware_row': 3} can't divide 2 workers into virtual devices"),
    "index": ({"worker_hosts": "a:1,b:1", "worker_index": 2}, "worker_index = 2, but there are 2 hosts of job 'worker'; expected 0 to 1"),
    "negative": ({"worker_hosts": "a:1", "worker_index": -1}, "worker_index = -1, but there are 1 hosts of job 'worker'; expected 0 to 0"),
    "index_type": ({"worker_hosts": "a:1", "worker_index": "0"}, "worker_index = '0'; expected an int"),
    "ps_index": (
        {"worker_hosts": "a:1,b:1", "ps_hosts": "p:1", "job_name": "ps", "worker_index": 1},
        "there are 1 hosts of job 'ps'; expected 0 to 0",
    ),
    "no_ps": ({"worker_hosts": "a:1", "job_name": "ps"}, "there are 0 hosts of job 'ps'; give ps_hosts, or job_name='worker'"),
    "job": ({"worker_hosts": "a:1", "job_name": "chief"}, "job_name = 'chief'; expected 'worker' or 'ps'"),
    "no_workers": ({"ps_hosts": "p:1"}, "mean something with worker_hosts only"),
    "index_alone": ({"worker_index": 1}, "mean something with worker_hosts only"),
    "duplicate": ({"worker_hosts": "a:1,b:1", "ps_hosts": "a:1"}, "the address 'a:1' stands twice, as worker_hosts[0] and as ps_hosts[0]"),
    "empty": ({"worker_hosts": "a:1,,b:1"}, "worker_hosts[1] is ''; expected an address such as '10.0.0.1:8000'"),
    "hosts_type": ({"worker_hosts": 2}, "worker_hosts is 2; expected addresses as one string"),
}


@pytest.mark.parametrize("arguments,text", REFUSED_ARGUMENTS.values(), ids=REFUSED_ARGUMENTS)
def test_refused_arguments(pretend, arguments, text):
    with pytest.raises(RuntimeError) as caught:
        Cluster(**arguments)
    assert isinstance(caught.value, ClusterError)
    assert text in str(caught.value)
