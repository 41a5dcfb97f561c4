"""The members of a job: their addresses in order, and which of them is this process."""

import re
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple, Union

from epl.errors import ClusterError

Hosts = Union[str, Sequence[str], None]


@dataclass(frozen=True)
class Membership:
    """The addresses of all workers in order, and the index of this one.

    An evaluator stands apart: it is the only member of a job of its own.
    """

    hosts: Tuple[str, ...]
    index: int
    is_evaluator: bool = False


def machine_of(host: str) -> str:
    """The machine of an address: "10.0.0.1:8000" -> "10.0.0.1"; an address without a port is a machine."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def check_address(host: object, where: str) -> str:
    """`host` itself, if it can be an address. Raises ClusterError that says where it stands."""
    if not isinstance(host, str) or not host.strip():
        raise ClusterError("%s is %r; expected an address such as '10.0.0.1:8000'" % (where, host))
    if re.search(r"[\s,;]", host.strip()):
        raise ClusterError("%s is %r, which has blanks or commas in it; write one address per entry, such as '10.0.0.1:8000'" % (where, host))
    return host.strip()


def check_distinct(hosts: Sequence[str], places: Sequence[str]) -> None:
    """Refuse an address that stands at two places. Raises ClusterError that names both."""
    seen: Dict[str, str] = {}
    for host, place in zip(hosts, places):
        if host in seen:
            raise ClusterError(
                "the address %r stands twice, as %s and as %s; give every process an address of its own (another port on the same machine)"
                % (host, seen[host], place)
            )
        seen[host] = place


def split_hosts(hosts: Hosts, what: str) -> List[str]:
    """The addresses of "h1:1,h2:2" or of a sequence of strings; [] for None. Raises ClusterError."""
    if hosts is None:
        return []
    if isinstance(hosts, str):
        hosts = hosts.split(",") if hosts.strip() else []
    if not isinstance(hosts, (list, tuple)):
        raise ClusterError("%s is %r; expected addresses as one string 'h1:8000,h2:8000' or as a list of strings" % (what, hosts))
    return [check_address(host, "%s[%d]" % (what, index)) for index, host in enumerate(hosts)]


def from_arguments(worker_hosts: Hosts, ps_hosts: Hosts, job_name: str, worker_index: int) -> Optional[Membership]:
    """The members named by the arguments of `Cluster`; None when no hosts are given.

    The ps hosts follow the workers as further workers: ps i of n workers is worker n + i.
    Raises ClusterError for bad addresses, an unknown job or an index out of range.
    """
    workers, servers = split_hosts(worker_hosts, "worker_hosts"), split_hosts(ps_hosts, "ps_hosts")
    if job_name not in ("worker", "ps"):
        raise ClusterError("job_name = %r; expected 'worker' or 'ps'" % (job_name,))
    if isinstance(worker_index, bool) or not isinstance(worker_index, int):
        raise ClusterError("worker_index = %r; expected an int" % (worker_index,))
    if not workers:
        if servers or job_name != "worker" or worker_index:
            raise ClusterError("ps_hosts, job_name and worker_index mean something with worker_hosts only; give worker_hosts too, or none of them")
        return None
    hosts = workers + servers
    check_distinct(hosts, ["worker_hosts[%d]" % i for i in range(len(workers))] + ["ps_hosts[%d]" % i for i in range(len(servers))])
    count = len(workers) if job_name == "worker" else len(servers)
    if not 0 <= worker_index < count:
        expected = "expected 0 to %d" % (count - 1) if count else "give ps_hosts, or job_name='worker'"
        raise ClusterError("worker_index = %d, but there are %d hosts of job %r; %s" % (worker_index, count, job_name, expected))
    return Membership(tuple(hosts), worker_index + (len(workers) if job_name == "ps" else 0))


def from_ranks(rank: int, size: int) -> Membership:
    """The members of a job that only its launcher knows, with made-up addresses localhost:0, localhost:1, ..."""
    return Membership(tuple("localhost:%d" % index for index in range(size)), rank)


def check_ranks(member: Membership, rank: int, size: int, described_by: str) -> None:
    """Refuse members that are not the launcher's ranks. Raises ClusterError that names both sides."""
    if member.is_evaluator and size > 1:
        raise ClusterError(
            "%s makes this process the evaluator, but the launcher made it rank %d of %d; start the evaluator by itself, outside mpirun and "
            "horovodrun" % (described_by, rank, size)
        )
    if len(member.hosts) != size:
        raise ClusterError(
            "%s names %d workers, but the launcher (mpirun, horovodrun) started %d ranks; start %d ranks, or correct or unset %s"
            % (described_by, len(member.hosts), size, len(member.hosts), described_by)
        )
    if member.index != rank:
        raise ClusterError(
            "%s makes this process worker %d, but the launcher (mpirun, horovodrun) made it rank %d of %d; give each rank its own index, or unset %s"
            % (described_by, member.index, rank, size, described_by)
        )
