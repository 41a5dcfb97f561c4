"""Fingerprints by which ranks find out whether they run the same thing."""

import hashlib
from typing import Dict, List, Set, Tuple

from epl.ir import op_table
from epl.ir.program import LOOP_BACK, Node, Program

Line = Tuple[str, str, str]
"""(node name, op type, fingerprint of the node and all it depends on)."""


def fingerprints(program: Program) -> List[Line]:
    """One line per node, sources first.

    A fingerprint covers op types, edges and the names of variables and fed tensors, not
    the names of other nodes: those depend on what else a script built. Of attributes it
    covers numbers and types, of ops without state: what has state may differ on purpose
    (a shard index, a callback's token). Of constants it covers those that steer updates (a
    learning rate); others may be samples that a rank has read.
    """
    known: Dict[str, str] = {}
    lines: List[Line] = []
    fed = {f.node for f in program.feeds}
    steering = _steering(program)
    for node in program.topological():
        parts = [node.op]
        if node.op == "Const":
            value = node.attr("value") if node.name in steering else None
            if value is not None:
                parts.append(hashlib.sha1(value.SerializeToString(deterministic=True)).hexdigest())
        elif not op_table.is_stateful(node, program):
            parts.extend(_numbers(node))
        if node.op in op_table.VARIABLES or node.name in fed:
            parts.append(node.name)
        for source, index in node.inputs:
            behind = "loop" if program.nodes[source].op in LOOP_BACK else known[source]
            parts.append("%s:%d" % (behind, index))
        parts.extend(sorted("^" + ("loop" if program.nodes[s].op in LOOP_BACK else known[s]) for s in node.controls))
        known[node.name] = hashlib.sha1("|".join(parts).encode()).hexdigest()[:16]
        lines.append((node.name, node.op, known[node.name]))
    return lines


def _steering(program: Program) -> Set[str]:
    """What the updates use and no gradient is computed from."""
    gradients = {**program.raw_gradients, **program.apply_gradients}
    present = [ref for ref in gradients if ref[0] in program.nodes]
    above = program.ancestors([name for name, _ in present])
    after: Set[str] = set()
    stack = [c for ref in present for c, index in program.consumers.get(ref[0], ()) if index == ref[1] and c not in above]
    while stack:
        name = stack.pop()
        if name not in after:
            after.add(name)
            stack.extend(c for c, _ in program.consumers.get(name, ()) if c not in above)
    found: Set[str] = set()
    stack = [s for name in after for s, _ in program.nodes[name].inputs]
    while stack:
        name = stack.pop()
        if name not in found and name not in above:
            found.add(name)
            stack.extend(s for s, _ in program.nodes[name].inputs)
    return found


def _numbers(node: Node) -> List[str]:
    """The attributes that are numbers, types or lists of them."""
    values = dict(node.proto.attr) if node.proto is not None else {}
    values.update(node.attrs)
    found = []
    for name in sorted(values):
        value = values[name]
        if value is None or name.startswith("_"):
            continue
        kind = value.WhichOneof("value")
        if kind in ("i", "f", "b", "type") or kind == "list" and not (value.list.s or value.list.func):
            found.append("%s=%s" % (name, value.SerializeToString(deterministic=True).hex()))
    return found


def program_digest(program: Program, lines: List[Line]) -> str:
    """One fingerprint of a run signature; fetches count in order, targets as a set."""
    known = {name: mark for name, _, mark in lines}
    parts = ["%s:%d" % (known[n], i) for n, i in program.fetches]
    parts.append("targets")
    parts.extend(sorted(known[t] for t in program.targets))
    parts.append("feeds")
    parts.extend(sorted("%s %s" % (f.node, f.mode) for f in program.feeds))
    return hashlib.sha1("|".join(parts).encode()).hexdigest()[:16]


def first_difference(ours: List[Line], theirs: List[Line]) -> Tuple[Line, Line]:
    """The first nodes in which two programs differ; ("", "nothing", "") where one has ended."""
    none = ("", "nothing", "")
    mine, other = {line[2] for line in ours}, {line[2] for line in theirs}
    left = next((line for line in ours if line[2] not in other), none)
    right = next((line for line in theirs if line[2] not in mine), none)
    return left, right
