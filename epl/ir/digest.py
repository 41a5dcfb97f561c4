"""Fingerprints by which ranks find out whether they run the same thing."""

import hashlib
from typing import Dict, List, Tuple

from epl.ir import op_table
from epl.ir.program import LOOP_BACK, Program

Line = Tuple[str, str, str]
"""(node name, op type, fingerprint of the node and all it depends on)."""


def fingerprints(program: Program) -> List[Line]:
    """One line per node, sources first.

    A fingerprint covers op types, edges and the names of variables and fed tensors, not
    the names of other nodes: those depend on what else a script built. Attributes are
    left out since some may differ on purpose (a shard index, a callback's token).
    """
    known: Dict[str, str] = {}
    lines: List[Line] = []
    fed = {f.node for f in program.feeds}
    for node in program.topological():
        parts = [node.op]
        if node.op in op_table.VARIABLES or node.name in fed:
            parts.append(node.name)
        for source, index in node.inputs:
            behind = "loop" if program.nodes[source].op in LOOP_BACK else known[source]
            parts.append("%s:%d" % (behind, index))
        parts.extend(sorted("^" + ("loop" if program.nodes[s].op in LOOP_BACK else known[s]) for s in node.controls))
        known[node.name] = hashlib.sha1("|".join(parts).encode()).hexdigest()[:16]
        lines.append((node.name, node.op, known[node.name]))
    return lines


def program_digest(program: Program, lines: List[Line]) -> str:
    """One fingerprint of a run signature; fetches count in order, targets as a set."""
    known = {name: mark for name, _, mark in lines}
    parts = ["%s:%d" % (known[n], i) for n, i in program.fetches]
    parts.append("targets")
    parts.extend(sorted(known[t] for t in program.targets))
    parts.append("feeds")
    parts.extend("%s %s" % (f.node, f.mode) for f in program.feeds)
    return hashlib.sha1("|".join(parts).encode()).hexdigest()[:16]


def first_difference(ours: List[Line], theirs: List[Line]) -> Tuple[Line, Line]:
    """The first nodes in which two programs differ; ("", "nothing", "") where one has ended."""
    none = ("", "nothing", "")
    mine, other = {line[2] for line in ours}, {line[2] for line in theirs}
    left = next((line for line in ours if line[2] not in other), none)
    right = next((line for line in theirs if line[2] not in mine), none)
    return left, right
