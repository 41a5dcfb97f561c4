"""Who has said hello in a rendezvous: the first worker's list."""

import hashlib
import hmac
import json
import threading
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set

Reply = Dict[str, Any]


class Claim(NamedTuple):
    """A process that says it is some worker."""

    nonce: str
    process: str
    """Where it runs, for messages: "host vm, process 123"."""


class Roll:
    """Worker 0's list of who has said hello. Thread-safe; knows nothing of the network."""

    def __init__(self, hosts: Sequence[str], claim: Claim):
        self._hosts = list(hosts)
        self._digest = digest_of(hosts)
        self._lock = threading.Lock()
        self._claims: Dict[int, Claim] = {0: claim}
        self._replaced: Set[str] = set()
        self._refused: Optional[str] = None
        self._gone: Set[int] = set()
        self._complete = False
        self.nonce = claim.nonce

    def hello(self, message: Mapping[str, Any]) -> Reply:
        """Enter a worker and answer "wait", "ready", "taken" (the job runs without it) or "refused"."""
        with self._lock:
            answer = self._enter(message)
            answer["server"] = self.nonce
            return answer

    def _enter(self, message: Mapping[str, Any]) -> Reply:
        index, claim = int(message["index"]), Claim(str(message["nonce"]), str(message["process"]))
        if message["digest"] != self._digest:
            theirs = ", ".join(str(host) for host in message["hosts"])
            return self._refusal(
                "worker %d (%s) has another list of workers in TF_CONFIG than worker 0: %s instead of %s; give all processes the same 'cluster'"
                % (index, claim.process, theirs, ", ".join(self._hosts))
            )
        held = self._claims.get(index)
        if held is not None and held.nonce != claim.nonce:
            text = self._duplicate(index, held, claim)
            if not self._missing():
                return {"state": "taken", "error": text}
            # A restarted process may take the place of its dead predecessor, but not that of
            # worker 0, which lives, nor may a predecessor be heard again afterwards.
            if index == 0 or claim.nonce in self._replaced:
                return self._refusal(text)
            self._replaced.add(held.nonce)
        self._claims[index] = claim
        self._gone.discard(index)
        if self._refused is not None:
            return {"state": "refused", "error": self._refused}
        missing = self._missing()
        self._complete = self._complete or not missing
        answer: Reply = {"state": "wait" if missing else "ready", "missing": missing}
        if self._gone:
            answer["gone"] = sorted(self._gone)
        return answer

    def process_of(self, index: int) -> Optional[str]:
        """Where this worker runs, if it is there."""
        with self._lock:
            claim = self._claims.get(index)
            return claim.process if claim is not None else None

    def holds(self, index: int, nonce: str) -> bool:
        """Whether this process is that worker."""
        with self._lock:
            return self._holds(index, nonce)

    def _holds(self, index: int, nonce: str) -> bool:
        claim = self._claims.get(index)
        return claim is not None and hmac.compare_digest(claim.nonce.encode(), nonce.encode())

    def ended(self, index: int, nonce: str) -> bool:
        """This process is no more. Whether the others count on it already; else its worker is missing again."""
        with self._lock:
            if not self._holds(index, nonce):
                return False
            if not self._complete:
                del self._claims[index]
                self._gone.add(index)
            return self._complete

    def _refusal(self, text: str) -> Reply:
        """Refuse this worker and with it the whole job, which can't become complete."""
        self._refused = self._refused or text
        return {"state": "refused", "error": text}

    def _duplicate(self, index: int, held: Claim, claim: Claim) -> str:
        return (
            "two processes claim to be worker %d (%s): %s and %s; give every process its own TF_CONFIG['task']['index'] (epl-launch: its own "
            "--machine_rank), and check that no process of an earlier run is left" % (index, self._hosts[index], held.process, claim.process)
        )

    def _missing(self) -> List[int]:
        return [index for index in range(len(self._hosts)) if index not in self._claims]

    def missing(self) -> List[int]:
        with self._lock:
            return self._missing()

    def gone(self) -> Set[int]:
        """Those of the missing that were there and have ended."""
        with self._lock:
            return set(self._gone)

    def refused(self) -> Optional[str]:
        """Why the job can't start, or None."""
        with self._lock:
            return self._refused


def digest_of(hosts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(hosts)).encode()).hexdigest()
