"""Loss scale: gradients are computed of the loss times a factor, and divided by it before they are used.

With a dynamic factor a flag says whether all gradients are finite. It is computed of the
aggregated gradients of all stages, so every process finds the same.
"""

from typing import Dict, FrozenSet, List, Optional, Set, Tuple

from tensorflow.core.framework import types_pb2

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import DT_FLOAT, DT_INT32, Builder
from epl.ir.endings import FENCE
from epl.ir.program import APPLY, BACKWARD, SAME, Feed, Node, Program, Ref, Shape
from epl.passes.amp.casts import PREFIX
from epl.passes.instances import tensor_label

SCALE = PREFIX + "loss_scale"
"""The fed factor of a dynamic scale."""
FINITE = PREFIX + "finite"
"""The flag of a dynamic scale."""
UNSCALE = "UNSCALE_GRADIENTS/"
COMPLEX = {types_pb2.DT_COMPLEX64: types_pb2.DT_FLOAT, types_pb2.DT_COMPLEX128: types_pb2.DT_DOUBLE}
DT_BOOL = types_pb2.DT_BOOL
_ADVICE = "Set `amp.loss_scale` to a number, or `amp.dtype` to bfloat16 with a number."


class Scaling:
    """Scales the gradients of a classified program."""

    def __init__(self, program: Program, fixed: Optional[float], decides: bool):
        """`fixed`: the factor, or None for a dynamic one. `decides`: whether this run ends a step, and so needs the flag."""
        self._program = program
        self._fixed = fixed
        self._decides = decides and fixed is None
        self._nodes = dict(program.nodes)
        self._build = Builder(self._nodes, "", APPLY)
        self._replaced: Dict[Ref, Ref] = {}
        self._shapes: Dict[Ref, Shape] = {}

    def run(self) -> Program:
        program = self._program
        seeds = [n for n in program.nodes.values() if n.attr(A.SEED) is not None and n.phase == BACKWARD]
        records = {n.int_attr(A.BACKWARD) for n in seeds} - _inner(program)
        raw = {ref: tag for ref, tag in program.raw_gradients.items() if ref[0] in program.nodes and tag.record in records}
        if not raw:
            return program
        if self._decides:
            _refuse_unskippable(program)
        scale, inverse = self._factors()
        for seed in seeds:
            if seed.int_attr(A.BACKWARD) in records:
                self._scale_seed(seed, scale)
        for ref, tag in raw.items():
            if tag.component in ("dense", "values"):
                self._unscale(ref, inverse)
        fetches = tuple(self._replaced.get(ref, ref) for ref in program.fetches)
        feeds = program.feeds
        if self._fixed is None:
            feeds += (Feed((SCALE, 0), SCALE, SAME),)
        if self._decides:
            fetches += (self._finite(),)
        shapes, shape_of = self._shapes, program.shape_of
        return program.replace(
            nodes=self._nodes, fetches=fetches, feeds=feeds, shape_of=lambda ref: shapes[ref] if ref in shapes else shape_of(ref)
        )

    def _factors(self) -> Tuple[Ref, Ref]:
        build = self._build
        if self._fixed is not None:
            return build.const(SCALE, self._fixed, DT_FLOAT), build.const(PREFIX + "inverse", 1.0 / self._fixed, DT_FLOAT)
        scale = build.op("Placeholder", SCALE, dtype=A.of_type(DT_FLOAT), shape=A.of_shape([]))
        return scale, build.op("Reciprocal", PREFIX + "inverse", [scale], T=A.of_type(DT_FLOAT))

    def _scale_seed(self, seed: Node, scale: Ref) -> None:
        dtype = op_table.dtype_of(self._program, seed.name, 0)
        name = PREFIX + "scaled/" + seed.name
        marks = {A.BACKWARD: seed.attr(A.BACKWARD)}
        made: Dict[str, Node] = {}
        build = Builder(made, "", BACKWARD)
        build.mul(name, (seed.name, 0), build.cast(name + "/scale", scale, DT_FLOAT, dtype), dtype)
        for key, node in made.items():
            self._nodes[key] = node.replace(origin=seed.origin, taskgraph=seed.taskgraph, attrs=dict(node.attrs, **marks))
        self._redirect((seed.name, 0), (name, 0), [n for n in self._program.nodes.values() if n.name != seed.name])

    def _unscale(self, ref: Ref, inverse: Ref) -> None:
        dtype = op_table.dtype_of(self._program, *ref)
        name = UNSCALE + tensor_label(ref)
        made: Dict[str, Node] = {}
        build = Builder(made, "", APPLY)
        build.mul(name, ref, build.cast(name + "/factor", inverse, DT_FLOAT, dtype), dtype)
        self._place(made, self._program.nodes[ref[0]])
        users = [self._program.nodes[c] for c, index in self._program.consumers.get(ref[0], ()) if index == ref[1]]
        self._redirect(ref, (name, 0), [node for node in users if node.attr(A.BACKWARD) is None])
        self._replaced[ref] = (name, 0)
        self._keep_shape((name, 0), ref)

    def _place(self, made: Dict[str, Node], at: Node) -> None:
        for key, node in made.items():
            self._nodes[key] = node.replace(origin=at.origin, taskgraph=at.taskgraph)

    def _keep_shape(self, ref: Ref, source: Ref) -> None:
        shape = self._program.shape_of(source)
        if shape is not None:
            self._shapes[ref] = shape

    def _redirect(self, old: Ref, new: Ref, users: List[Node]) -> None:
        for user in users:
            node = self._nodes[user.name]
            if old in node.inputs:
                self._nodes[user.name] = node.replace(inputs=[new if ref == old else ref for ref in node.inputs])

    def _finite(self) -> Ref:
        """Whether all gradients are finite: there are no numbers that are not.

        They are counted, and not multiplied by 0, which Grappler takes for 0.
        """
        parts: Dict[Optional[int], List[Ref]] = {}
        for ref, tag in self._program.facts.gradients.items():
            dtype = op_table.dtype_of(self._program, *ref)
            if tag.component not in ("dense", "values"):
                continue
            name = "%s/%s" % (FINITE, tensor_label(ref))
            gradient = self._program.nodes[ref[0]]
            made: Dict[str, Node] = {}
            build = Builder(made, "", APPLY)
            if dtype in COMPLEX:
                ref, dtype = build.op("ComplexAbs", name + "/size", [ref], T=A.of_type(dtype), Tout=A.of_type(COMPLEX[dtype])), COMPLEX[dtype]
            good = build.op("IsFinite", name + "/good", [ref], T=A.of_type(dtype))
            bad = build.cast(name + "/bad", build.op("LogicalNot", name + "/not", [good]), DT_BOOL, DT_FLOAT)
            all_of_it = build.const(name + "/all", [-1], DT_INT32)
            flat = build.op("Reshape", name + "/flat", [bad, all_of_it], T=A.of_type(DT_FLOAT), Tshape=A.of_type(DT_INT32))
            axes = build.const(name + "/axes", [0], DT_INT32)
            part = build.op("Sum", name + "/sum", [flat, axes], T=A.of_type(DT_FLOAT), Tidx=A.of_type(DT_INT32))
            self._place(made, gradient)
            parts.setdefault(gradient.taskgraph, []).append(part)
        totals = []
        for taskgraph, found in parts.items():
            made = {}
            label = "all" if taskgraph is None else str(taskgraph)
            total = Builder(made, "", APPLY).add_n("%s/total/%s" % (FINITE, label), found, DT_FLOAT)
            self._nodes.update({key: node.replace(taskgraph=taskgraph) for key, node in made.items()})
            self._shapes[total] = ()
            totals.append(total)
        total = self._build.add_n(FINITE + "/total", totals, DT_FLOAT)
        return self._build.op("Less", FINITE, [total, self._build.const(FINITE + "/one", 1.0, DT_FLOAT)], T=A.of_type(DT_FLOAT))


def _inner(program: Program) -> Set[int]:
    """The gradient calls whose results other losses are made of: their gradients are part of a forward pass."""
    above: Dict[str, FrozenSet[int]] = {}
    found: Set[int] = set()
    for node in program.topological():
        records = frozenset().union(*(above.get(source, frozenset()) for source, _ in node.inputs))
        if node.attr(A.SEED) is not None:
            records |= {node.int_attr(A.BACKWARD) or 0}
        own = node.int_attr(A.BACKWARD)
        if own is not None:
            found |= records - {own}
        if records:
            above[node.name] = records
    return found


def _refuse_unskippable(program: Program) -> None:
    """A step that must be possible to skip has no writes in loops, and nothing that needs what a skipped call returns."""
    facts = program.facts
    for name in facts.writes:
        node = program.nodes.get(name)
        if node is None or node.phase != APPLY:
            continue
        if name in facts.frames:
            raise ProgramError(
                "Operation '%s' writes '%s' in a loop after the gradients; with a dynamic loss scale a step must be possible to skip, "
                "and what a loop writes can't be. %s" % (node.origin or name, facts.writes[name][0], _ADVICE)
            )
        used = {index for c, index in program.consumers.get(name, ()) if index >= 0 and not c.endswith(FENCE)}
        used |= {ref[1] for ref in program.fetches if ref[0] == name}
        if any(not op_table.is_handle(node, index, program) for index in used):
            raise ProgramError(
                "Operation '%s' writes '%s' and returns values that others use; with a dynamic loss scale a step must be possible to skip, "
                "and then there are none. %s" % (node.origin or name, facts.writes[name][0], _ADVICE)
            )
