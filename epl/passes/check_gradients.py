"""Check that gradients with recomputation are those without it.

The backward part exists a second time and is given the kept activations. The two gradients
of each variable are compared where they are made, per replica and micro-batch.
"""

from typing import Dict, List

from tensorflow.core.framework import types_pb2

from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import DT_INT32, Builder
from epl.ir.program import BACKWARD, LOOP_BACK, Node, Program, Ref
from epl.ir.tags import GradientTag
from epl.passes.copies import with_copies

PREFIX = "EPL_CHECK_GRADIENTS/"
TOLERANCE = 1e-3
"""Largest difference that is let pass, in parts of the largest element of a gradient."""


def with_checks(plain: Program, program: Program) -> Program:
    """Compare the gradients of a program with those of the one that it was made of.

    Loops, conditionals and what processes exchange are not done twice.

    Args:
      plain: a classified program without recomputation. program: the same with it.
    """
    nodes = dict(program.nodes)
    second: Dict[str, str] = {}
    for node in plain.topological():
        if _is_checked(plain, node):
            second[node.name] = PREFIX + node.name
    for name, copy in second.items():
        node = plain.nodes[name]
        inputs = [(second.get(source, source), index) for source, index in node.inputs]
        controls = [second.get(source, source) for source in node.controls if source in second or source in nodes]
        nodes[copy] = node.replace(name=copy, origin=copy, inputs=inputs, controls=controls)
    for name in dict.fromkeys(s for copy in second.values() for s, _ in nodes[copy].inputs):
        if name not in nodes:
            nodes[name] = plain.nodes[name]  # what recomputation has moved
    added = list(second.values())
    targets: List[str] = []
    for ref, tag in plain.facts.gradients.items():
        dtype = op_table.dtype_of(plain, *ref) if ref[0] in second else 0
        if dtype in op_table.FLOATS:
            made = _compared(nodes, ref, (second[ref[0]], ref[1]), tag, dtype, plain.nodes[ref[0]])
            added += made
            targets.append(made[-1])
    program = program.replace(nodes=nodes, targets=program.targets + tuple(targets)).pruned()
    return with_copies(program, {copy: name for name, copy in second.items()}, added)


def _is_checked(program: Program, node: Node) -> bool:
    facts = program.facts
    if node.phase != BACKWARD or node.name not in facts.batch or node.op in LOOP_BACK or node.op.startswith(op_table.PSEUDO):
        return False
    if node.name in facts.frames or facts.endings.in_branch(node.name) or op_table.is_call(program, node):
        return False
    return node.name not in facts.first and not op_table.is_stateful(node, program)


def _compared(nodes: Dict[str, Node], found: Ref, expected: Ref, tag: GradientTag, dtype: int, gradient: Node) -> List[str]:
    """Add the comparison of two gradients; the names of those that are not constants, the check last."""
    made: Dict[str, Node] = {}
    build = Builder(made, gradient.device, BACKWARD)
    name = "%scompare/%s_%d" % ((PREFIX,) + found)
    sides = [build.cast("%s/%d" % (name, i), ref, dtype, types_pb2.DT_DOUBLE) for i, ref in enumerate((found, expected))]
    double, int32 = A.of_type(types_pb2.DT_DOUBLE), A.of_type(DT_INT32)

    def largest(what: str, value: Ref) -> Ref:
        size = build.op("Abs", "%s/%s/size" % (name, what), [value], T=double)
        flat = build.op("Reshape", "%s/%s/flat" % (name, what), [size, build.const(name + "/all", [-1], DT_INT32)], T=double, Tshape=int32)
        return build.op("Max", "%s/%s" % (name, what), [flat, build.const(name + "/axis", [0], DT_INT32)], T=double, Tidx=int32)

    apart = largest("difference", build.op("Sub", name + "/sub", sides, T=double))
    allowed = build.scale(name + "/allowed", largest("whole", sides[1]), TOLERANCE, types_pb2.DT_DOUBLE)
    alike = build.op("LessEqual", name + "/alike", [apart, allowed], T=double)
    text = (
        "gradient_checkpoint.check_gradients: the gradient of variable '%s' with recomputation differs from the one without it. "
        "Largest difference, and largest difference allowed:" % tag.variable
    )
    told = build.const(name + "/text", text, types_pb2.DT_STRING)
    types = A.of_types([types_pb2.DT_STRING, types_pb2.DT_DOUBLE, types_pb2.DT_DOUBLE])
    build.op("Assert", name + "/check", [alike, told, apart, allowed], T=types, summarize=A.of_int(1))
    for key, node in made.items():
        nodes[key] = node.replace(origin=key, taskgraph=gradient.taskgraph)
    return [key for key, node in made.items() if node.op != "Const"]
