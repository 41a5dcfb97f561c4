"""Redirecting edges after a pseudo-op was lowered."""

from typing import Callable, Dict, Iterable, Mapping, Optional

from epl.ir.program import Node, Program, Ref


def rewire(program: Program, nodes: Dict[str, Node], mapping: Mapping[Ref, Ref], keep: Optional[Callable[[Node], bool]] = None) -> Program:
    """Replace references by `mapping` in all edges and fetches, and drop what is then unused.

    Args:
      program: fetches and targets come from it.
      nodes: the nodes to rewrite; not changed.
      mapping: old tensor -> new tensor.
      keep: nodes for which it returns True keep their inputs.
    """
    result: Dict[str, Node] = {}
    for name, node in nodes.items():
        if any(ref in mapping for ref in node.inputs) and not (keep and keep(node)):
            node = node.replace(inputs=[mapping.get(ref, ref) for ref in node.inputs])
        if any(c not in nodes for c in node.controls):
            node = node.replace(controls=tuple(dict.fromkeys(mapping.get((c, 0), (c, 0))[0] for c in node.controls)))
        result[name] = node
    fetches = [mapping.get(ref, ref) for ref in program.fetches]
    targets = [mapping.get((name, 0), (name, 0))[0] if name not in nodes else name for name in program.targets]
    return program.replace(nodes=result, fetches=fetches, targets=list(dict.fromkeys(targets))).pruned()


def add_controls(nodes: Dict[str, Node], name: str, sources: Iterable[str]) -> None:
    """Make a node wait for others (in place, in a dictionary that the caller owns)."""
    node = nodes[name]
    wanted = dict.fromkeys(node.controls)
    wanted.update((s, None) for s in sources if s != name)
    if len(wanted) != len(node.controls):
        nodes[name] = node.replace(controls=tuple(wanted))
