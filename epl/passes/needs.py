"""Needs: what has to be computed in replicas whose own values no process is shown."""

from typing import List, Set

from epl.ir import op_table


class Needs:
    """Belongs to one run of the clone pass.

    A fetch has the value of one replica, but updates, values merged over replicas and the
    elements that are drawn from an input concern all of them. What only leads to a fetch is
    not needed in the others: its inputs would be sent to where nobody uses them.

    Attributes:
      nodes: what each replica needs.
      meeting: the nodes that are given a value of all replicas; in each of them some process must take part in making it.
    """

    def __init__(self, cloner: "Cloner"):  # type: ignore[name-defined]  # noqa: F821
        program, facts = cloner.program, cloner.facts
        roots: Set[str] = set(program.targets)
        self.meeting: List[str] = []
        roots.update(ref[0] for ref in program.fetches if cloner.merges_fetch(ref))
        for node in program.nodes.values():
            micro_batch = 0 if node.name in facts.batch else None
            if any(cloner.form(node, ref, micro_batch) for ref in node.inputs):
                self.meeting.append(node.name)
            if op_table.draws(program, node) or node.name in facts.writes:
                roots.update(facts.endings.done(node.name))
                roots.add(node.name)
        roots.update(facts.endings.value(ref)[0] for ref in program.ragged if ref[0] in program.nodes)
        self.nodes = frozenset(program.ancestors(roots.union(self.meeting)))
