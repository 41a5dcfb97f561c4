"""The while frames of TensorFlow 1 loops."""

from typing import Dict, List, Tuple

from epl.ir import op_table
from epl.ir.program import Node, Program


def frame_paths(program: Program, order: List[Node]) -> Dict[str, Tuple[str, ...]]:
    """Node -> names of the v1 while frames around it, outermost first; `order` is topological.

    An Exit leaves its frame but counts as inside: it belongs to the loop.
    """
    paths: Dict[str, Tuple[str, ...]] = {}
    for node in order:
        path: Tuple[str, ...] = ()
        sources = [s for s, _ in node.inputs] + list(node.controls)
        for source in sources:
            above = paths.get(source, ())
            if above and program.nodes[source].op in op_table.EXITS:
                above = above[:-1]
            if len(above) > len(path):
                path = above
        if node.op in op_table.ENTERS:
            path = path + (node.str_attr("frame_name"),)
        if path:
            paths[node.name] = path
    return paths


def outer_frames(program: Program, order: List[Node]) -> Dict[str, str]:
    """Node -> name of the outermost v1 while frame around it; `order` is topological."""
    return {name: path[0] for name, path in frame_paths(program, order).items()}
