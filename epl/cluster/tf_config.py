"""TF_CONFIG: the description of a job that TensorFlow's launchers put into the environment.

    {"cluster": {"chief": [address], "worker": [...], "ps": [...], "evaluator": [...]},
     "task": {"type": "worker", "index": 0}}

For EPL the chief, the workers and the parameter servers are all workers, in this
order. "master" is the old name of "chief". An evaluator may stand in "task" alone or
in both parts; it is never counted and is a job of its own.
"""

import json
from typing import Any, Dict, List, Optional

from epl.cluster.hosts import Membership, check_address, check_distinct
from epl.errors import ClusterError

_WORKING_JOBS = ("chief", "worker", "ps")
_JOBS = _WORKING_JOBS + ("evaluator",)
_ALIASES = {"master": "chief"}


def parse_tf_config(text: Optional[str]) -> Optional[Membership]:
    """The members that TF_CONFIG describes; None when it is unset or describes no job.

    Raises ClusterError that says what to correct.
    """
    if text is None or not text.strip():
        return None
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ClusterError('TF_CONFIG is not JSON (%s); expected {"cluster": {...}, "task": {...}}, got %r' % (error, text[:200])) from None
    content = _mapping(content, "TF_CONFIG")
    cluster = _mapping(content.get("cluster") or {}, "TF_CONFIG['cluster']")
    task = _mapping(content.get("task") or {}, "TF_CONFIG['task']")
    return _member(_read_jobs(cluster), task)


def _mapping(value: Any, where: str) -> Dict[str, Any]:
    if not isinstance(value, dict):
        raise ClusterError("%s is %r; expected a JSON object {...}" % (where, value))
    return value


def _read_jobs(cluster: Dict[str, Any]) -> Dict[str, List[str]]:
    """Job -> addresses, for the jobs that are given. Raises ClusterError."""
    jobs: Dict[str, List[str]] = {}
    for given, hosts in cluster.items():
        job = _job(given, "TF_CONFIG['cluster']")
        if job in jobs:
            raise ClusterError("TF_CONFIG['cluster'] has 'chief' and 'master', which are two names of one job; keep 'chief'")
        if not isinstance(hosts, list):
            raise ClusterError("TF_CONFIG['cluster'][%r] is %r; expected a list of addresses such as [\"10.0.0.1:8000\"]" % (given, hosts))
        jobs[job] = [check_address(host, "TF_CONFIG['cluster'][%r][%d]" % (given, index)) for index, host in enumerate(hosts)]
    if len(jobs.get("chief", [])) > 1:
        raise ClusterError("TF_CONFIG['cluster']['chief'] has %d addresses; a job has one chief, name the others under 'worker'" % len(jobs["chief"]))
    return jobs


def _job(name: str, where: str) -> str:
    job = _ALIASES.get(name, name)
    if job not in _JOBS:
        raise ClusterError("%s names the job %r; expected one of %s" % (where, name, ", ".join(_JOBS)))
    return job


def _member(jobs: Dict[str, List[str]], task: Dict[str, Any]) -> Optional[Membership]:
    """This process among the jobs. Raises ClusterError."""
    hosts: List[str] = []
    places: List[str] = []
    first: Dict[str, int] = {}
    for job in _WORKING_JOBS:
        first[job] = len(hosts)
        hosts += jobs.get(job, [])
        places += ["%s %d" % (job, index) for index in range(len(jobs.get(job, [])))]
    check_distinct(hosts, places)
    if not task:
        if len(hosts) > 1:
            raise ClusterError('TF_CONFIG has %d workers but no "task"; add "task": {"type": ..., "index": ...}, other for each process' % len(hosts))
        return Membership(tuple(hosts), 0) if hosts else None
    if not isinstance(task.get("type"), str):
        raise ClusterError("TF_CONFIG['task']['type'] is %r; expected one of %s" % (task.get("type"), ", ".join(_JOBS)))
    job = _job(task["type"], "TF_CONFIG['task']['type']")
    index = _index(task.get("index", 0 if job in ("chief", "evaluator") else None))
    if job == "evaluator":
        return _evaluator(jobs.get(job, []), index)
    if not hosts:
        if index == 0:
            return None
        raise ClusterError("TF_CONFIG['task'] is %s %d, but TF_CONFIG['cluster'] names no hosts; add them" % (job, index))
    count = len(jobs.get(job, []))
    if index >= count:
        expected = "expected 0 to %d" % (count - 1) if count else "add the job to TF_CONFIG['cluster'] or correct the type"
        raise ClusterError("TF_CONFIG['task'] is %s %d, but TF_CONFIG['cluster'] has %d addresses of that job; %s" % (job, index, count, expected))
    return Membership(tuple(hosts), first[job] + index)


def _index(value: Any) -> int:
    if isinstance(value, str) and value.isdigit():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ClusterError("TF_CONFIG['task']['index'] is %r; expected a number from 0, other for each process of the job" % (value,))
    return value


def _evaluator(hosts: List[str], index: int) -> Membership:
    if hosts and index >= len(hosts):
        raise ClusterError(
            "TF_CONFIG['task'] is evaluator %d, but TF_CONFIG['cluster'] has %d addresses of that job; expected 0 to %d"
            % (index, len(hosts), len(hosts) - 1)
        )
    return Membership((hosts[index] if hosts else "localhost:0",), 0, is_evaluator=True)
