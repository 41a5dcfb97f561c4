"""Extract: the closure of one run signature out of the whole graph."""

from typing import Dict, List, Sequence

from epl.errors import FeedError, FetchError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.program import DIVIDE, Feed, Node, Program, Ref, parse_ref


def extract(
    whole: Program,
    fetches: Sequence[str],
    feeds: Sequence[str],
    modes: Sequence[str],
) -> Program:
    """The nodes that a run needs, with fed tensors cut off and replaced by placeholders.

    Args:
      whole: all nodes of the graph.
      fetches: tensors ("name:0") and operations ("name") to run, in order.
      feeds: names of fed tensors, in order.
      modes: for each fed tensor how its value is used: DIVIDE, EACH or SAME.

    Returns:
      A program whose `fetches` are the tensors and whose `targets` are the operations.

    Raises:
      FetchError, FeedError: a name is not in the graph.
    """
    fed: Dict[Ref, Feed] = {}
    nodes: Dict[str, Node] = {}
    made: List[Node] = []
    for name, mode in zip(feeds, modes):
        ref = parse_ref(name)
        source = whole.nodes.get(ref[0])
        if source is None:
            raise FeedError("Fed tensor '%s' is not in the graph" % name)
        dtype = op_table.dtype_of(whole, *ref)
        shape = whole.shape_of(ref)
        if mode == DIVIDE and shape:
            shape = (None,) + tuple(shape[1:])
        only = ref[1] == 0 and len(op_table.output_types(source, whole)) == 1
        node = Node(
            ref[0] if only else "%s/epl_output_%d" % ref,
            "Placeholder",
            attrs={"dtype": A.of_type(dtype), "shape": A.of_shape(shape)},
            origin=ref[0],
            taskgraph=source.taskgraph,
        )
        made.append(node)
        fed[ref] = Feed(ref, node.name, mode)
    tensors: List[Ref] = []
    targets: List[str] = []
    for name in fetches:
        ref = parse_ref(name)
        if ref[0] not in whole.nodes:
            raise FetchError("Fetch '%s' is not in the graph" % name)
        if ":" in name:
            tensors.append(ref)
        else:
            targets.append(ref[0])
    replaced = {node.origin: node.name for node in made if node.name == node.origin}
    seen: Dict[str, None] = {}
    stack = [r[0] for r in tensors if r not in fed] + [t for t in targets if t not in replaced]
    while stack:
        name = stack.pop()
        if name in seen or name in replaced:
            continue
        seen[name] = None
        node = whole.nodes[name]
        stack.extend(s for s, i in node.inputs if (s, i) not in fed)
        stack.extend(node.controls)
    by_name = {node.name: node for node in made}
    for name, node in whole.nodes.items():
        if name in by_name:
            nodes[name] = by_name.pop(name)
        elif name in seen:
            nodes[name] = _redirect(node, fed)
    nodes.update(by_name)
    return whole.replace(
        nodes=nodes,
        fetches=[(fed[r].node, 0) if r in fed else r for r in tensors],
        targets=targets,
        feeds=list(fed.values()),
    )


def _redirect(node: Node, fed: Dict[Ref, Feed]) -> Node:
    if not any(ref in fed for ref in node.inputs):
        return node
    return node.replace(inputs=[(fed[r].node, 0) if r in fed else r for r in node.inputs])
