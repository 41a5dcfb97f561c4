"""The rules by which a job is found to be broken, as pure functions of what the ranks reported.

Every rank enters the parallel programs in the same order and asks for agreements in
the same order. An *entry* is the running number of such a program on a rank. So a
rank in entry 5 that waits for one that left the job after entry 4 waits forever,
and so does one that asks for an agreement while another has gone on to a later entry.
A rank that is merely elsewhere (evaluating, compiling, writing) breaks no rule.
"""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple

from epl.errors import DivergenceError, EplError, RankFailedError, StallError

CONFIRM_SECONDS = 1.5
"""How long two reports must contradict each other; covers a report under way."""

QUIET_SECONDS = 3.0
"""Heartbeats are at most a second apart; a report mentions longer silences."""

Entry = Tuple[int, str, int]
"""Number of the entry, program, step."""


@dataclass(frozen=True)
class Waiting:
    """A call of `agree` or `decide` that has not returned."""

    kind: str
    topic: str
    sequence: int
    since: float

    missing: Tuple[int, ...]
    """The ranks it waits for."""

    ordered: bool
    """Whether it comes from the thread that enters the programs, and so has a place in their order."""

    def is_for(self, kind: str, key: Tuple[str, int]) -> bool:
        return self.kind == kind and (self.topic, self.sequence) == key

    def __str__(self) -> str:
        what = "agreement" if self.kind == "agree" else "rank 0's decision"
        return "%s %r (number %d)" % (what, self.topic, self.sequence)


@dataclass
class RankState:
    """What rank 0 knows of one rank. Times are of rank 0's clock."""

    rank: int
    where: str = "?"
    heard: float = 0.0
    entry: int = 0
    program: Optional[str] = None
    """The program it is in, or None outside of programs."""

    step: int = 0
    since: float = 0.0
    """When it entered the program, left the last one, or said goodbye."""

    recent: List[Entry] = field(default_factory=list)
    """Its last entries, the present one included."""

    waiting: Optional[Waiting] = None
    failed: Optional[str] = None
    follows: bool = False
    """Whether the failure looks like the consequence of another rank's."""

    failed_at: float = 0.0
    lost: bool = False
    """Its connection broke without a goodbye."""

    left: bool = False
    """It said goodbye."""

    note: str = ""
    """An exception that ended one of its threads."""


@dataclass(frozen=True)
class Trouble:
    """Why the job can't go on."""

    kind: str
    """failed, lost, silent, left or diverged."""

    ranks: Tuple[int, ...]
    """The ranks that broke the job."""

    text: str

    def error(self, place: str = "") -> EplError:
        """The exception for callers that wait; `place` says where they do."""
        text = "%s\n%s" % (self.text, place) if place else self.text
        if self.kind == "diverged":
            return DivergenceError(text)
        return StallError(text) if self.kind == "silent" else RankFailedError(text)

    def to_json(self) -> Dict[str, Any]:
        return {"kind": self.kind, "ranks": list(self.ranks), "text": self.text}

    @classmethod
    def from_json(cls, data: Dict[str, Any]) -> "Trouble":
        return cls(str(data["kind"]), tuple(int(rank) for rank in data["ranks"]), str(data["text"]))


def describe(state: RankState, now: float) -> str:
    """What a rank is doing, in a few words."""
    if state.program is not None:
        doing = "is in program %r, step %d, for %.0f s" % (state.program, state.step, now - state.since)
    elif state.waiting is not None:
        doing = "waits for %s for %.0f s" % (state.waiting, now - state.waiting.since)
    elif state.left:
        doing = "has left the job, and waits for the others to leave for %.0f s" % (now - state.since)
    elif state.entry:
        last = state.recent[-1] if state.recent else None
        doing = "is outside of parallel programs for %.0f s" % (now - state.since) + (" (the last was %r, step %d)" % last[1:] if last else "")
    else:
        doing = "has not entered a parallel program yet"
    silence = now - state.heard
    if not state.left and silence > QUIET_SECONDS:
        doing = doing.replace("is in", "was in").replace("waits for", "waited for").replace("is outside", "was outside")
        doing += ", and has sent no sign of life for %.0f s" % silence
    return "rank %d (%s) %s" % (state.rank, state.where, doing)


def report(states: Sequence[RankState], now: float, limit: int = 16) -> str:
    """What every rank is doing, a line each; of a big job those that stand out first."""

    def oddity(state: RankState) -> Tuple[bool, float, int, int]:
        return not (state.failed or state.lost), min(state.heard, now - QUIET_SECONDS), state.entry, state.rank

    ordered = sorted(states, key=oddity)
    shown = sorted(ordered[:limit], key=lambda state: state.rank)
    lines = ["  " + describe(state, now) for state in shown]
    if len(states) > limit:
        lines.append("  and %d more ranks" % (len(states) - limit))
    return "\n".join(lines)


def judge(states: Sequence[RankState], now: float, stall_timeout: float) -> Optional[Trouble]:
    """The first rule that is broken, or None."""
    for rule in (_failed, _lost, _silent, _left, _crossed, _overtaken, _different_programs):
        trouble = rule(states, now, stall_timeout)
        if trouble is not None:
            everybody = report(states, now)
            return Trouble(trouble.kind, trouble.ranks, "%s\nWhat each rank was doing:\n%s" % (trouble.text, everybody))
    return None


def _place(state: RankState) -> str:
    if state.program is not None:
        return " in program %r, step %d" % (state.program, state.step)
    if state.waiting is not None:
        return " while it waited for %s" % state.waiting
    return ""


def _failed(states: Sequence[RankState], now: float, stall_timeout: float) -> Optional[Trouble]:
    # A failure that looks like a consequence (Horovod's connection broke) waits a moment for its cause.
    failed = [state for state in states if state.failed is not None and (not state.follows or now - state.failed_at > CONFIRM_SECONDS)]
    if not failed or (all(state.follows for state in failed) and any(state.lost for state in states)):
        return None
    first = min(failed, key=lambda state: (state.follows, state.failed_at))
    text = "rank %d (%s) failed%s:\n%s" % (first.rank, first.where, _place(first), (first.failed or "").rstrip())
    quiet = [state for state in states if not state.left and not state.lost and now - state.heard > QUIET_SECONDS and state.rank != first.rank]
    if first.follows and quiet:
        text += "\nIts cause is likely: " + "; ".join(describe(state, now) for state in quiet[:4])
    return Trouble("failed", (first.rank,), text)


def _lost(states: Sequence[RankState], now: float, stall_timeout: float) -> Optional[Trouble]:
    lost = [state for state in states if state.lost]
    if not lost:
        return None
    text = "; ".join(
        "rank %d (%s) died%s: its connection broke without a goodbye (killed, out of memory, crashed, or its machine is gone)"
        % (state.rank, state.where, _place(state))
        for state in lost
    )
    return Trouble("lost", tuple(state.rank for state in lost), text)


def _silent(states: Sequence[RankState], now: float, stall_timeout: float) -> Optional[Trouble]:
    silent = [state for state in states if not state.left and now - state.heard > stall_timeout]
    if not silent:
        return None
    text = "; ".join(
        "rank %d (%s)%s has sent no sign of life for %.0f s (stopped, swapped out, or cut off from the network; cluster.stall_timeout is %g s)"
        % (state.rank, state.where, _place(state), now - state.heard, stall_timeout)
        for state in silent
    )
    return Trouble("silent", tuple(state.rank for state in silent), text)


def _left(states: Sequence[RankState], now: float, stall_timeout: float) -> Optional[Trouble]:
    """A rank that said goodbye is needed by another."""
    gone = [state for state in states if state.left]
    if not gone:
        return None
    first = min(gone, key=lambda state: state.entry)
    for state in states:
        needed = None
        if state.program is not None and state.entry > first.entry:
            needed = first
        elif state.waiting is not None:
            needed = next((one for one in gone if one.rank in state.waiting.missing), None)
        if needed is not None:
            text = "rank %d (%s) ended in good order after %d parallel programs, but rank %d needs it%s" % (
                needed.rank,
                needed.where,
                needed.entry,
                state.rank,
                _place(state),
            )
            if needed.note:
                text += "\nOn rank %d a thread had ended with:\n%s" % (needed.rank, needed.note.rstrip())
            return Trouble("left", (needed.rank,), text)
    return None


def _crossed(states: Sequence[RankState], now: float, stall_timeout: float) -> Optional[Trouble]:
    """Two ranks wait for each other in different agreements."""
    groups: Dict[Tuple[str, str, int], RankState] = {}
    for state in states:
        if state.waiting is not None and state.waiting.ordered:
            groups.setdefault((state.waiting.kind, state.waiting.topic, state.waiting.sequence), state)
    waiting = list(groups.values())
    for first in waiting:
        for second in waiting:
            if first.rank < second.rank and _waits_for(first, second) and _waits_for(second, first):
                text = "the ranks do not run the same thing: rank %d waits for %s, rank %d for %s"
                both = (first.rank, first.waiting, second.rank, second.waiting)
                return Trouble("diverged", (first.rank, second.rank), text % both)
    return None


def _waits_for(first: RankState, second: RankState) -> bool:
    return first.waiting is not None and second.rank in first.waiting.missing


def _overtaken(states: Sequence[RankState], now: float, stall_timeout: float) -> Optional[Trouble]:
    """A rank waits for an agreement with one that has gone on to a later program instead."""
    for state in states:
        waiting = state.waiting
        if waiting is None or not waiting.ordered or now - waiting.since < CONFIRM_SECONDS:
            continue
        for rank in waiting.missing:
            other = states[rank]
            if other.program is not None and other.entry > state.entry and now - other.since > CONFIRM_SECONDS:
                text = "the ranks do not run the same thing: rank %d waits for %s, but rank %d is%s without having taken part" % (
                    state.rank,
                    waiting,
                    rank,
                    _place(other),
                )
                return Trouble("diverged", (state.rank, rank), text)
    return None


def _different_programs(states: Sequence[RankState], now: float, stall_timeout: float) -> Optional[Trouble]:
    """A rank is long in a program, and another had or has a different one under the same number."""
    known: Dict[int, Dict[Tuple[str, int], int]] = {}
    for state in states:
        for entry, program, step in state.recent:
            known.setdefault(entry, {}).setdefault((program, step), state.rank)
    for state in states:
        if state.program is None or now - state.since <= stall_timeout:
            continue
        others = [item for item in known.get(state.entry, {}).items() if item[0] != (state.program, state.step)]
        if others:
            (program, step), rank = others[0]
            text = "the ranks do not run the same thing: the parallel program number %d is %r, step %d, on rank %d, but %r, step %d, on rank %d"
            both = (state.entry, state.program, state.step, state.rank, program, step, rank)
            return Trouble("diverged", (state.rank, rank), text % both)
    return None


def waiting_line(states: Sequence[RankState], now: float, stall_timeout: float) -> Optional[str]:
    """A line about a job that waits longer than the timeout without being broken; None when nobody does."""
    long = [state for state in states if state.program is not None and now - state.since > stall_timeout]
    long += [state for state in states if state.waiting is not None and state.program is None and now - state.waiting.since > stall_timeout]
    if any(not state.left for state in states):
        long += [state for state in states if state.left and now - state.since > stall_timeout]
    if not long:
        return None
    return "no rank has failed, but some wait for more than %g s:\n%s" % (stall_timeout, report(states, now))
