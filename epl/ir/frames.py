"""The while frames of TensorFlow 1 loops."""

from typing import Dict, List, Tuple

from epl.ir import op_table
from epl.ir.program import Node, Program


def outer_frames(program: Program, order: List[Node]) -> Dict[str, str]:
    """Node -> name of the outermost v1 while frame around it; `order` is topological."""
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
    # An Exit leaves its frame but belongs to the loop: it is cloned with it.
    return {name: path[0] for name, path in paths.items()}
