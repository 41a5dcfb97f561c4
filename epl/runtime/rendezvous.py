"""How ranks that only know TF_CONFIG (Kubernetes TFJob, `epl-launch --machine_list`) find each other.

Worker 0 serves, at its own address of TF_CONFIG, the key-value store in which
Horovod's Gloo looks up the peers. Before any rank starts Horovod each says hello
there, so that a missing, doubled or differently configured worker is named instead
of ending in a timeout deep inside Gloo. Who dies later is named by the vigil
(`epl.runtime.vigil`), whose connections are made at the same address.
"""

import http.client
import json
import os
import secrets
import socket
import threading
import time
from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

from epl.cluster.hosts import machine_of
from epl.errors import ClusterError
from epl.runtime import network
from epl.runtime.gloo import GlooStore, Slot, assign_slots, slot_environment
from epl.runtime.roll import Claim, Reply, Roll, digest_of
from epl.runtime.speak import say
from epl.runtime.vigil import Keeper, Member, Vigil

TIMEOUT_VARIABLE = "EPL_RENDEZVOUS_TIMEOUT"
"""The environment variable with the seconds to wait for all workers."""

DEFAULT_TIMEOUT = 300.0
POLL_SECONDS = 1.0
REPORT_SECONDS = 10.0
FAREWELL_SECONDS = 2.5
"""How long a failing worker 0 goes on answering, so that the others hear why."""

TAKEN_SECONDS = 15.0
"""How long a worker whose place is taken by a running job tries again: an earlier run may just be ending."""


def timeout_seconds(environ: Mapping[str, str] = os.environ) -> float:
    """The value of EPL_RENDEZVOUS_TIMEOUT. Raises ClusterError when it is no positive number."""
    text = environ.get(TIMEOUT_VARIABLE, "").strip()
    try:
        value = float(text) if text else DEFAULT_TIMEOUT
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ClusterError("%s = %r; expected a number of seconds above 0, such as 300" % (TIMEOUT_VARIABLE, text))
    return value


class Rendezvous:
    """The way of one worker from TF_CONFIG to the environment that Horovod's Gloo needs."""

    def __init__(self, hosts: Sequence[str], index: int, timeout: Optional[float] = None, stall_timeout: Optional[float] = None):
        """Args:
        hosts: the addresses of all workers.
        index: which of them this process is.
        timeout: seconds to wait for the others; those of EPL_RENDEZVOUS_TIMEOUT without it.
        stall_timeout: seconds of silence after which the vigil takes a worker for stopped; without it there is no vigil.
        """
        self._hosts = list(hosts)
        self._index = index
        self._timeout = timeout_seconds() if timeout is None else timeout
        self._slots: List[Slot] = assign_slots([machine_of(host) for host in hosts])
        self._claim = Claim(secrets.token_hex(16), "host %s, process %d" % (socket.gethostname(), os.getpid()))
        self._keeper: Optional[Keeper] = None
        self._member: Optional[Member] = None
        if index == 0:
            self._roll = Roll(self._hosts, self._claim)
            self._keeper = Keeper(self._hosts, self._roll, stall_timeout) if stall_timeout else None
        elif stall_timeout:
            self._member = Member(index, self._hosts, self._claim.nonce, stall_timeout)
        self._start = time.monotonic()
        self._said: Dict[str, float] = {}
        self._store: Optional[GlooStore] = None
        self._self_checks = 3
        self._joined = False
        self._unresolved: FrozenSet[str] = frozenset()
        self._gone: FrozenSet[int] = frozenset()
        name, port = network.split_address(self._hosts[0])
        if port is None:
            raise ClusterError("worker 0 of TF_CONFIG is %r, which has no port; write it as '%s:8000'" % (self._hosts[0], name))
        self._chief_host, self._port = name, port

    def join(self) -> Dict[str, str]:
        """Wait until all workers are there; the environment variables for Horovod.

        Raises ClusterError that names the worker, its address and what to check.
        """
        chief_address = self._resolve_patiently(0)
        own_address = chief_address if self._index == 0 else self._resolve_patiently(self._index)
        interface = self._choose_interface(own_address, chief_address)
        if self._index == 0:
            server = self._serve(own_address)
            threading.Thread(target=self._name_unresolvable, name="epl-resolve", daemon=True).start()
        else:
            server = chief_address
        where = os.environ.get("HOROVOD_GLOO_IFACE") or interface or "of Horovod's choice (none has the address %s)" % own_address
        if self.vigil is not None:
            self.vigil.start()
        self._tell("rendezvous of %d workers at %s, over the interface %s" % (len(self._hosts), self._hosts[0], where))
        try:
            self._wait(chief_address)
        except ClusterError:
            if self._store is not None:
                time.sleep(FAREWELL_SECONDS)
            self.stop()
            raise
        if self.vigil is not None:
            self.vigil.arm()
        self._joined = True
        return slot_environment(self._slots[self._index], server, self._port, interface.name if interface else None)

    @property
    def vigil(self) -> Optional[Vigil]:
        """Watches over all workers while they start."""
        return self._keeper or self._member

    def stop(self) -> None:
        if self.vigil is not None:
            self.vigil.close()
        if self._store is not None:
            self._store.stop()

    # Names and interfaces

    def _resolve_patiently(self, index: int) -> str:
        """The address of a worker. A name may appear late (a starting pod), so it is asked for until the timeout."""
        host = network.split_address(self._hosts[index])[0]
        while True:
            try:
                return network.resolve(host)
            except ClusterError as error:
                text = "worker %d: %s" % (index, error)
                if self._elapsed() > self._timeout:
                    raise ClusterError("%s. Waited %.0f s for it; %s changes how long" % (text, self._elapsed(), TIMEOUT_VARIABLE)) from None
                self._tell("%s; trying again for %.0f s" % (text, self._timeout - self._elapsed()), every=REPORT_SECONDS)
            time.sleep(POLL_SECONDS)

    def _name_unresolvable(self) -> None:
        """Name at once the hosts that have no address (yet); worker 0 does it for all."""
        names = {network.split_address(host)[0] for host in self._hosts}
        while names and not self._joined and self._elapsed() < self._timeout:
            for name in sorted(names):
                try:
                    network.resolve(name)
                    names.remove(name)
                except ClusterError as error:
                    indices = [str(i) for i, other in enumerate(self._hosts) if network.split_address(other)[0] == name]
                    self._tell("worker %s: %s" % (", ".join(indices), error), every=REPORT_SECONDS)
            self._unresolved = frozenset(names)
            time.sleep(REPORT_SECONDS / 2)

    def _choose_interface(self, own: str, chief: str) -> Optional[network.Interface]:
        """The interface towards the peers: the one of the own address, else the one on the way to another worker."""
        if network.is_loopback(own) and not self._all_on_one_machine():
            # /etc/hosts often maps a machine's own name to 127.0.x.1, where no peer can reach it.
            own = self._address_towards_peer(chief) or own
        found = network.interface_of(own)
        if found is None and not network.is_loopback(own):
            found = network.interface_of(self._address_towards_peer(chief) or own)
        if found is None and network.is_loopback(own):
            found = network.loopback_interface()
        return found

    def _address_towards_peer(self, chief: str) -> Optional[str]:
        if self._index != 0:
            return network.address_towards(chief)
        mine = machine_of(self._hosts[0])
        for host in self._hosts:
            if machine_of(host) != mine:
                try:
                    return network.address_towards(network.resolve(network.split_address(host)[0]))
                except ClusterError:
                    continue
        return None

    def _all_on_one_machine(self) -> bool:
        return len({machine_of(host) for host in self._hosts}) == 1

    # Worker 0

    def _serve(self, own: str) -> str:
        """Start the store at the own address of TF_CONFIG; the address under which this process reaches it."""
        if network.is_loopback(own):
            everywhere = not self._all_on_one_machine()
        else:
            everywhere = network.interface_of(own) is None  # behind address translation, as in some containers
        self._store = self._open_store("0.0.0.0" if everywhere else own, own)
        self._store.start()
        return "127.0.0.1" if everywhere else own

    def _open_store(self, address: str, own: str) -> GlooStore:
        """Listen, trying for a while when the port is taken. Raises ClusterError."""
        while True:
            try:
                if self._keeper is not None:
                    return GlooStore(address, self._port, self._slots, self._keeper.hello, self._keeper.admit)
                return GlooStore(address, self._port, self._slots, self._roll.hello)
            except OSError as error:
                reply = self._say_hello(own)[0] or {}
                if reply.get("state") == "refused" or ("error" in reply and self._elapsed() > TAKEN_SECONDS):
                    raise ClusterError(str(reply["error"])) from None
                text = "worker 0 can't listen at %s (%s)" % (self._hosts[0], error.strerror or error)
                if self._elapsed() > TAKEN_SECONDS:
                    raise ClusterError(
                        "%s: another program has the port, or the address is not of this machine, whose interfaces are %s; choose another port in "
                        "TF_CONFIG or correct the address" % (text, network.describe_interfaces())
                    ) from None
                self._tell("%s: trying again" % text, every=REPORT_SECONDS)
            time.sleep(POLL_SECONDS)

    # Waiting

    def _wait(self, chief: str) -> None:
        """Say hello until worker 0 knows everybody. Raises ClusterError."""
        while True:
            missing, problem = self._ask_own_roll(chief) if self._index == 0 else self._ask_chief(chief)
            if not missing:
                return
            text = self._missing_text(missing, problem)
            if self._elapsed() > self._timeout:
                raise ClusterError(
                    "%s after %.0f s. Check that each of them was started, that each has its own TF_CONFIG['task']['index'], and that worker 0's "
                    "address is reachable from its machine (firewall, interface; %s). %s changes how long to wait"
                    % (text, self._elapsed(), network.interface_hint(), TIMEOUT_VARIABLE)
                )
            if self._elapsed() > REPORT_SECONDS / 2:
                self._tell(text, every=REPORT_SECONDS)
            time.sleep(POLL_SECONDS if self._elapsed() > 5 else 0.2)

    def _ask_own_roll(self, chief: str) -> Tuple[List[int], Optional[str]]:
        """Worker 0: who is missing. Raises ClusterError when the job can't start.

        Its own address is called too: another process that answers there is a second worker 0.
        """
        problem = None
        if self._self_checks:
            reply, problem = self._say_hello(chief)
            self._self_checks = 0 if reply else self._self_checks - 1
            if reply and reply.get("server") != self._claim.nonce:
                raise ClusterError(str(reply.get("error") or "another process answers at the address of worker 0, %s" % self._hosts[0]))
        refused = self._roll.refused()
        if refused:
            raise ClusterError(refused)
        self._gone = frozenset(self._roll.gone())
        return self._roll.missing(), problem

    def _ask_chief(self, chief: str) -> Tuple[List[int], Optional[str]]:
        """Other workers: who is missing, by worker 0's answer. Raises ClusterError when it refuses."""
        # First the connection of the vigil, so that no worker counts as present whose end nobody would notice.
        unwatched = self._member and self._member.attend(chief, self._port)
        reply, problem = self._say_hello(chief)
        if reply is None:
            return [0], problem
        if reply.get("state") == "refused" or (reply.get("state") == "taken" and self._elapsed() > TAKEN_SECONDS):
            raise ClusterError(str(reply.get("error")))
        if reply.get("state") == "taken":
            return [self._index], str(reply.get("error"))
        if self._member is not None and self._member.server != reply.get("server"):
            self._member.go()
            return [0], unwatched or "%s has been started again" % self._hosts[0]
        self._gone = frozenset(int(index) for index in reply.get("gone", []))
        return [int(index) for index in reply.get("missing", [])], None

    def _missing_text(self, missing: Sequence[int], problem: Optional[str]) -> str:
        shown = []
        for index in missing[:16]:
            unknown = network.split_address(self._hosts[index])[0] in self._unresolved
            known = ", which can't be resolved" if unknown else ", which was there and has ended" if index in self._gone else ""
            shown.append("%d (%s%s)" % (index, self._hosts[index], known))
        more = " and %d more" % (len(missing) - 16) if len(missing) > 16 else ""
        reason = " [%s]" % problem if problem else ""
        return "still waiting for %d of %d workers: %s%s%s" % (len(missing), len(self._hosts), ", ".join(shown), more, reason)

    def _say_hello(self, address: str) -> Tuple[Optional[Reply], Optional[str]]:
        """The answer of worker 0, or None and why there is none."""
        message = {
            "index": self._index,
            "nonce": self._claim.nonce,
            "process": self._claim.process,
            "digest": digest_of(self._hosts),
            "hosts": self._hosts[:32],
        }
        connection = http.client.HTTPConnection(address, self._port, timeout=5)
        try:
            connection.request("POST", GlooStore.HELLO, json.dumps(message).encode(), {"Content-Type": "application/json"})
            response = connection.getresponse()
            reply = json.loads(response.read(1 << 20).decode())
            if response.status == 200 and isinstance(reply, dict):
                return reply, None
            return None, "%s answers, but is no worker of EPL" % self._hosts[0]
        except (OSError, http.client.HTTPException) as error:
            return None, "%s does not answer: %s" % (self._hosts[0], error)
        except ValueError:
            return None, "%s answers, but is no worker of EPL" % self._hosts[0]
        finally:
            connection.close()

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _tell(self, text: str, every: float = 0.0) -> None:
        """Say something; the same kind of thing at most every so many seconds."""
        kind = text.split(":")[0] if every else text
        now = time.monotonic()
        if now - self._said.get(kind, -1e9) >= every:
            self._said[kind] = now
            say(self._index, text)
