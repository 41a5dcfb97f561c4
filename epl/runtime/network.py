"""The addresses and network interfaces of this machine."""

import socket
from typing import List, NamedTuple, Optional, Tuple

from epl.errors import ClusterError


class Interface(NamedTuple):
    """A network interface and its IPv4 address."""

    name: str
    address: str

    def __str__(self) -> str:
        return "%s (%s)" % (self.name, self.address)


def local_interfaces() -> List[Interface]:
    """The interfaces of this machine that have an IPv4 address; [] when nothing can tell."""
    try:
        import psutil  # comes with Horovod; without it only the interface's name stays unknown
    except ImportError:
        return []
    found = sorted(psutil.net_if_addrs().items())
    return [Interface(name, entry.address) for name, entries in found for entry in entries if entry.family == socket.AF_INET]


def interface_of(address: str) -> Optional[Interface]:
    """The interface that has this address, or None."""
    return next((one for one in local_interfaces() if one.address == address), None)


def is_loopback(address: str) -> bool:
    return address.startswith("127.")


def loopback_interface() -> Optional[Interface]:
    return next((one for one in local_interfaces() if is_loopback(one.address)), None)


def describe_interfaces() -> str:
    """For error messages: "eth0 (10.0.0.5), lo (127.0.0.1)"."""
    return ", ".join(str(one) for one in local_interfaces()) or "unknown"


def interface_hint() -> str:
    """For error messages: how to choose another interface, and which ones there are."""
    return (
        "HOROVOD_GLOO_IFACE=NAME chooses the interface of Gloo, 'mpirun --mca btl_tcp_if_include NAME --mca oob_tcp_if_include NAME' that of MPI; "
        "this machine has %s" % describe_interfaces()
    )


def resolve(host: str) -> str:
    """The IPv4 address of a host. Raises ClusterError that names the host."""
    try:
        return socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        raise ClusterError("the host %r can't be resolved to an IPv4 address (%s); check its spelling, /etc/hosts and DNS" % (host, error)) from None


def address_towards(address: str) -> Optional[str]:
    """The own address from which packets to `address` leave, by the routing table; None without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # connecting a datagram socket sends nothing
            return probe.getsockname()[0]
        except OSError:
            return None


def split_address(address: str) -> Tuple[str, Optional[int]]:
    """The host and port of "10.0.0.1:8000"; the port is None when there is none."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        return host.strip("[]"), int(port)
    return address, None


def listening_socket(address: str, port: int, backlog: int = 512) -> socket.socket:
    """A TCP socket that listens at (address, port); port 0 takes a free one. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener
