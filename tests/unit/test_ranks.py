import json

import pytest

from epl.errors import ClusterError
from epl.runtime.ranks import RankInfo, _tasks_per_node, detect_ranks, launched_ranks


def variables(prefix, rank, size, local_rank=None, local_size=None):
    values = {prefix + "RANK": rank, prefix + "SIZE": size, prefix + "LOCAL_RANK": local_rank, prefix + "LOCAL_SIZE": local_size}
    return {name: str(value) for name, value in values.items() if value is not None}


OMPI = "OMPI_COMM_WORLD_"
MV2 = "MV2_COMM_WORLD_"
TWO_HOSTS = json.dumps({"cluster": {"worker": ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.1:2"]}, "task": {"type": "worker", "index": 2}})
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_TASKS_PER_NODE": "2(x2),1"}

DETECTED = {
    "nothing": ({}, RankInfo(0, 1, 0, 1, "none")),
    "empty_values": ({"OMPI_COMM_WORLD_RANK": "", "TF_CONFIG": " "}, RankInfo(0, 1, 0, 1, "none")),
    "open_mpi": (variables(OMPI, 3, 4, 1, 2), RankInfo(3, 4, 1, 2, "mpi")),
    "open_mpi_with_pmix": (dict(variables(OMPI, 1, 2, 1, 2), PMIX_RANK="1"), RankInfo(1, 2, 1, 2, "mpi")),
    "mvapich": (variables(MV2, 0, 2, 0, 1), RankInfo(0, 2, 0, 1, "mpi")),
    "hydra": (dict(variables("PMI_", 1, 2), MPI_LOCALRANKID="0", MPI_LOCALNRANKS="1"), RankInfo(1, 2, 0, 1, "mpi")),
    "pmi_local_by_its_own": (variables("PMI_", 1, 2, 1, 2), RankInfo(1, 2, 1, 2, "mpi")),
    "pmi_local_unknown": (variables("PMI_", 1, 2), RankInfo(1, 2, 1, 2, "mpi")),
    "pmi_local_by_slurm": (dict(SLURM, PMI_RANK="3", PMI_SIZE="5"), RankInfo(3, 5, 1, 2, "mpi")),
    "pmi_slurm_of_a_daemon": (dict(SLURM, PMI_RANK="2", PMI_SIZE="5"), RankInfo(2, 5, 2, 5, "mpi")),
    "pmix_with_slurm": (dict(SLURM, PMIX_RANK="3"), RankInfo(3, 5, 1, 2, "mpi")),
    "pmix_step_size_first": ({"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"}, RankInfo(1, 2, 1, 2, "mpi")),
    "slurm_alone_is_a_batch_script": (SLURM, RankInfo(0, 1, 0, 1, "none")),
    "horovodrun": (variables("HOROVOD_", 2, 4, 0, 2), RankInfo(2, 4, 0, 2, "horovod")),
    "horovod_and_mpi_agree": (dict(variables("HOROVOD_", 1, 2), **variables(OMPI, 1, 2, 0, 1)), RankInfo(1, 2, 0, 1, "horovod")),
    "pmi_of_an_outer_step": (dict(variables(OMPI, 1, 2, 1, 2), PMI_RANK="0", PMI_SIZE="1"), RankInfo(1, 2, 1, 2, "mpi")),
    "one_rank": (variables(OMPI, 0, 1, 0, 1), RankInfo(0, 1, 0, 1, "mpi")),
    "tf_config": ({"TF_CONFIG": TWO_HOSTS}, RankInfo(2, 3, 1, 2, "tf_config")),
    "launcher_before_tf_config": (dict(variables(OMPI, 1, 2, 1, 2), TF_CONFIG=TWO_HOSTS), RankInfo(1, 2, 1, 2, "mpi")),
}


@pytest.mark.parametrize("environ,expected", DETECTED.values(), ids=DETECTED)
def test_detect_ranks(environ, expected):
    assert detect_ranks(environ) == expected
    launched = launched_ranks(environ)
    assert launched == (expected if expected.launcher in ("mpi", "horovod") else None)


REFUSED = {
    "half": ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE is not; set both"),
    "other_half": ({"PMI_SIZE": "2"}, "PMI_SIZE is set but PMI_RANK is not"),
    "half_local": ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2"}, "HOROVOD_LOCAL_SIZE is set but HOROVOD_LOCAL_RANK is not"),
    "text": (variables(OMPI, "one", 2), "OMPI_COMM_WORLD_RANK = 'one' is not a number from 0"),
    "negative": (variables("HOROVOD_", -1, 2), "HOROVOD_RANK = '-1' is not a number"),
    "rank_too_big": (variables(OMPI, 2, 2), "OMPI_COMM_WORLD_RANK = 2 does not fit a job of 2 ranks; expected 0 to 1"),
    "size_zero": (variables("PMI_", 0, 0), "PMI_RANK = 0 does not fit a job of 0 ranks"),
    "local_rank_too_big": (variables(OMPI, 2, 4, 2, 2), "rank 2 of 4 can't be local rank 2 of 2"),
    "local_size_too_big": (variables(OMPI, 0, 2, 0, 4), "rank 0 of 2 can't be local rank 0 of 4"),
    "local_rank_above_rank": (variables(OMPI, 0, 4, 1, 2), "rank 0 of 4 can't be local rank 1 of 2"),
    "two_launchers": (
        dict(variables("HOROVOD_", 0, 2), **variables(OMPI, 1, 2)),
        "contradicts itself: HOROVOD_RANK says rank 0 of 2, OMPI_COMM_WORLD_RANK says rank 1 of 2",
    ),
    "two_sizes": (dict(variables(OMPI, 0, 4), **variables("PMI_", 0, 2)), "OMPI_COMM_WORLD_RANK says rank 0 of 4, PMI_RANK says rank 0 of 2"),
    "two_local_ranks": (
        dict(variables("HOROVOD_", 1, 2, 0, 1), **variables(OMPI, 1, 2, 1, 2)),
        "by the variables beside HOROVOD_RANK this is local rank 0 of 1, by those beside OMPI_COMM_WORLD_RANK 1 of 2",
    ),
    "pmix_without_size": ({"PMIX_RANK": "0"}, "PMIX_RANK = 0 is set but nothing tells the number of ranks; start the job with"),
    "pmix_against_slurm": (dict(SLURM, PMIX_RANK="2"), "contradicts itself: PMIX_RANK = 2, SLURM_PROCID = 3"),
    "tf_config": ({"TF_CONFIG": "{"}, "TF_CONFIG is not JSON"),
}


@pytest.mark.parametrize("environ,text", REFUSED.values(), ids=REFUSED)
def test_refused(environ, text):
    with pytest.raises(ClusterError) as caught:
        detect_ranks(environ)
    assert text in str(caught.value)


@pytest.mark.parametrize("text,tasks", [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("2, 3(x2)", [2, 3, 3]), ("", []), ("two", []), ("2(x)", [])])
def test_tasks_per_node(text, tasks):
    assert _tasks_per_node(text) == tasks


def test_rank_info_is_a_value():
    assert {RankInfo(0, 1, 0, 1, "none"), RankInfo(0, 1, 0, 1, "none")} == {RankInfo(0, 1, 0, 1, "none")}
    with pytest.raises(AttributeError):
        RankInfo(0, 1, 0, 1, "none").rank = 1
