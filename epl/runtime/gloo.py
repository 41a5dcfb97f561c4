"""What Horovod's Gloo needs to start: a place for each rank, and a store in which the ranks look up each other.

Used by `epl.runtime.rendezvous` (the first worker serves) and `epl.cli.launch` (the
launcher serves).
"""

import json
import socket
import socketserver
import threading
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

from epl.errors import BackendError

GLOO_TIMEOUT_SECONDS = 300
"""Gloo gives up after 30 s by default, which is less than ranks may differ in loading a big script."""

_HELLO_LIMIT = 1 << 20
_ANSWER_LIMIT = 4096


class Slot(NamedTuple):
    """The place of a rank in its job and on its machine, named as Horovod names it."""

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def assign_slots(machines: Sequence[str]) -> List[Slot]:
    """The slots of ranks 0, 1, ..., whose machines are given."""
    members: Dict[str, List[int]] = {}
    for rank, machine in enumerate(machines):
        members.setdefault(machine, []).append(rank)
    slots = []
    for rank, machine in enumerate(machines):
        local_rank = members[machine].index(rank)
        # The ranks with the same local rank on the other machines.
        across = [other for other, ranks in members.items() if len(ranks) > local_rank]
        slots.append(Slot(machine, rank, len(machines), local_rank, len(members[machine]), across.index(machine), len(across)))
    return slots


def slot_environment(slot: Slot, address: str, port: int, interface: Optional[str]) -> Dict[str, str]:
    """The environment variables that make Horovod use Gloo with the store at (address, port)."""
    variables = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }
    for name, value in slot._asdict().items():
        variables["HOROVOD_" + name.upper()] = str(value)
    if interface:
        variables["HOROVOD_GLOO_IFACE"] = interface
    return variables


def user_choices(environ: Mapping[str, str]) -> Dict[str, str]:
    """The variables of Gloo that a user may set and that win over ours."""
    return {name: environ[name] for name in ("HOROVOD_GLOO_IFACE", "HOROVOD_GLOO_TIMEOUT_SECONDS") if environ.get(name)}


class GlooStore:
    """Horovod's own rendezvous server at an address of our choice, answering our hello too.

    The store must live as long as the job: Horovod asks it again for each new process set.
    """

    HELLO = "/epl/hello"
    VIGIL = "/epl/vigil"

    def __init__(
        self,
        address: str,
        port: int,
        slots: Sequence[Slot],
        hello: Optional[Callable[[Mapping[str, Any]], Dict[str, Any]]] = None,
        vigil: Optional[Callable[[socket.socket], None]] = None,
    ):
        """Listen at (address, port). Raises OSError, or BackendError without Horovod.

        Args:
          address: of an own interface.
          port: 0 takes a free one.
          slots: the places of all ranks.
          hello: answers a POST to HELLO.
          vigil: gets, for good, the connection of each POST to VIGIL.
        """
        try:
            from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
        except ImportError as error:
            raise BackendError("Horovod can't be loaded (%s); install it with: pip install 'pyepl[horovod]'" % error) from None

        class Handler(RendezvousHandler):
            def do_POST(self) -> None:  # noqa: N802, the name is fixed by http.server
                if vigil is not None and self.path == GlooStore.VIGIL:
                    self.send_response(200)
                    self.end_headers()
                    # The server ends its own handle of the connection, and must not end the connection.
                    vigil(socket.socket(fileno=self.request.detach()))
                    return
                length = int(self.headers.get("Content-Length") or 0)
                if hello is None or self.path != GlooStore.HELLO or length > _HELLO_LIMIT:
                    self.send_status_code(404)
                    return
                try:
                    answer = json.dumps(hello(json.loads(self.rfile.read(length).decode()))).encode()
                except (ValueError, KeyError, TypeError, OSError):
                    self.send_status_code(400)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        class Server(RendezvousHTTPServer):
            daemon_threads = True  # a request that hangs must not keep the process alive
            request_queue_size = 1024  # all ranks ask at the same moment

            def server_bind(self) -> None:
                # HTTPServer asks DNS for its own name here, which can take many seconds and is not needed.
                socketserver.TCPServer.server_bind(self)
                self.server_name, self.server_port = self.server_address[:2]

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A peer that hangs up is no event worth a traceback on the user's terminal."""

        self._server = Server((address, port), Handler, 0)
        self._server.init(list(slots))
        self.port: int = self._server.server_address[1]
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="epl-gloo-store", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join(timeout=5)
            self._thread = None
        self._server.server_close()


def ask_for_vigil(address: str, port: int, timeout: float) -> socket.socket:
    """A connection that the store at this address has given to its vigil. Raises OSError."""
    handle = socket.create_connection((address, port), timeout=timeout)
    try:
        handle.sendall(b"POST %s HTTP/1.0\r\n\r\n" % GlooStore.VIGIL.encode())
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            more = handle.recv(1)  # what follows the answer is not for here
            if not more or len(answer) > _ANSWER_LIMIT:
                raise OSError("it is no worker of EPL")
            answer += more
        if answer.split(None, 2)[1:2] != [b"200"]:
            raise OSError("it is no worker of this version of EPL")
    except BaseException:
        handle.close()
        raise
    handle.setblocking(False)
    return handle
