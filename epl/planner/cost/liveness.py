"""What the devices of one process hold at most while it runs a program, found before it runs.

The program is run without values: a node takes the bytes of its results and frees what it
was the last to read, in the order in which an executor would come to it. All orders that
the passes make (schedules, recomputation, offload, gathers in time) are edges of the
program, so that nothing here knows of them.
"""

from collections import deque
from typing import Callable, Deque, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from epl.ir import op_table
from epl.ir.program import LOOP_BACK, Node, Program, Ref, Shape

UNKNOWN = 16
"""Taken for a length that is not known, such as that of a batch."""

_FORWARDING = frozenset(
    "Add AddV2 Sub Mul Div RealDiv Maximum Minimum Pow SquaredDifference Neg Abs Sign Exp Log Log1p Sqrt Rsqrt Square Reciprocal Inv "
    "Tanh Sigmoid Erf Relu Relu6 Elu Selu Softplus Softsign LeakyRelu TanhGrad SigmoidGrad ReluGrad Relu6Grad EluGrad SeluGrad SoftplusGrad "
    "SoftsignGrad LeakyReluGrad SqrtGrad RsqrtGrad InvGrad ReciprocalGrad AddN BiasAdd Softmax LogSoftmax ClipByValue Cast".split()
)
"""Ops that write their result over an input that nobody else reads."""

_NO_BUFFER = frozenset(("Const", "VariableV2", "Variable", "VarHandleOp", "ReadVariableOp", "Placeholder", "NoOp"))
"""Ops whose results lie elsewhere: in the graph, in a variable, in what is fed."""


_SHAPES = frozenset(("Shape", "ShapeN", "Size", "Rank"))
"""Ops that need no values: TensorFlow's optimizers replace most of them, or what uses them, before they could hold an activation."""


class Held(NamedTuple):
    """Bytes on one device. variables: before and after a run. peak: of other tensors that are alive at the same time, at most."""

    variables: float
    peak: float


def held_bytes(program: Program, shape_of: Callable[[Ref], Shape], rows: int = UNKNOWN) -> Dict[str, Held]:
    """For each device of a compiled program what it holds.

    What a loop's iterations keep is not known, and not counted; nor is workspace of kernels.

    Args:
      shape_of: static shapes, as far as they are known.
      rows: taken for lengths that are not.
    """
    return _Run(program, shape_of, rows).result()


class _Run:
    def __init__(self, program: Program, shape_of: Callable[[Ref], Shape], rows: int):
        self._program = program
        self._shape_of = shape_of
        self._rows = rows
        self._fetched = set(program.fetches)
        self._left: Dict[Ref, int] = {}
        """Buffer -> the reads of it and of its aliases that are still to come."""
        self._root: Dict[Ref, Ref] = {}
        self._size: Dict[Ref, float] = {}
        self._now: Dict[str, float] = {}
        self._most: Dict[str, float] = {}
        self._readers: Dict[Ref, int] = {}
        for node in program.nodes.values():
            for ref in _read(node):
                self._readers[ref] = self._readers.get(ref, 0) + 1

    def result(self) -> Dict[str, Held]:
        variables: Dict[str, float] = {}
        for node in self._program.nodes.values():
            if node.op in op_table.VARIABLES:
                variables[node.device] = variables.get(node.device, 0.0) + variable_bytes(node)
        for node in self._in_order():
            self._execute(node)
        return {device: Held(variables.get(device, 0.0), self._most.get(device, 0.0)) for device in sorted(set(variables) | set(self._most))}

    def _in_order(self) -> List[Node]:
        """The nodes as an executor comes to them: first in, first out; what talks to other processes when nothing else can be done."""
        nodes, consumers = self._program.nodes, self._program.consumers
        waiting = {n.name: sum(nodes[s].op not in LOOP_BACK for s in [s for s, _ in n.inputs] + list(n.controls)) for n in nodes.values()}
        ready: Deque[str] = deque()
        late: Deque[str] = deque()

        def add(name: str) -> None:
            (late if nodes[name].op.startswith("Horovod") else ready).append(name)

        for name, count in waiting.items():
            if count == 0:
                add(name)
        order: List[Node] = []
        while ready or late:
            name = ready.popleft() if ready else late.popleft()
            order.append(nodes[name])
            if nodes[name].op in LOOP_BACK:
                continue
            for consumer, _ in consumers.get(name, ()):
                waiting[consumer] -= 1
                if waiting[consumer] == 0:
                    add(consumer)
        return order

    def _execute(self, node: Node) -> None:
        outputs = [(node.name, index) for index in range(len(op_table.output_types(node, self._program)))]
        roots = [self._root[ref] for ref in _read(node) if ref in self._root]
        for ref in outputs:
            shared = self._shared(node, ref, roots)
            self._root[ref] = ref if shared is None else shared
            if shared is None:
                self._size[ref] = self._bytes(node, ref)
                self._left[ref] = 0
                self._change(node.device, self._size[ref])
            self._left[self._root[ref]] += self._readers.get(ref, 0) + (ref in self._fetched)
        for root in roots:
            self._left[root] -= 1
        for root in roots + outputs:
            self._free(root)

    def _shared(self, node: Node, ref: Ref, roots: List[Ref]) -> Optional[Ref]:
        """The buffer that a result lies in, if it is not a new one."""
        # The gradient of a broadcast sums over axes that are found at run time: mostly none, and then it is its input.
        if roots and (node.op in op_table.ALIASES or node.op == "Sum" and not self._is_known(ref)):
            return self._root.get(node.inputs[min(ref[1], len(node.inputs) - 1)])
        if node.op in _FORWARDING and ref[1] == 0:
            size = self._bytes(node, ref)
            for root in roots:
                # The last reader of a buffer on its own device may write over it.
                if self._left[root] == 1 and self._size.get(root) == size and self._program.nodes[root[0]].device == node.device:
                    return root
        return None

    def _free(self, root: Ref) -> None:
        if root in self._size and self._left[root] == 0:
            self._change(self._program.nodes[root[0]].device, -self._size.pop(root))

    def _change(self, device: str, size: float) -> None:
        self._now[device] = self._now.get(device, 0.0) + size
        self._most[device] = max(self._most.get(device, 0.0), self._now[device])

    def _bytes(self, node: Node, ref: Ref) -> float:
        if node.op in _NO_BUFFER or op_table.is_handle(node, ref[1], self._program):
            return 0.0
        dtype = op_table.dtype_of(self._program, *ref)
        if not dtype or dtype in op_table.OPAQUE:
            return 0.0
        if not self._is_known(ref):
            # What a pass has added is as large as what it is given: sums, copies, what is exchanged.
            return max((self._size.get(self._root.get(source, source), 0.0) for source in node.inputs), default=0.0)
        shape = self._shape_of(ref) or ()
        return float(tf.as_dtype(dtype).size) * float(np.prod([self._rows if d is None else d for d in shape], dtype=np.float64))

    def _is_known(self, ref: Ref) -> bool:
        """Whether a shape is known but for the length of a batch."""
        shape = self._shape_of(ref)
        return shape is not None and sum(d is None for d in shape) <= 1


def _read(node: Node) -> Sequence[Ref]:
    """The inputs that must be there until a node has run."""
    return () if node.op in _SHAPES else node.inputs


def variable_bytes(node: Node) -> float:
    """The size of a variable; 0 where its shape is not known."""
    shape, dtype = node.attr("shape"), node.attr("dtype")
    if shape is None or dtype is None:
        return 0.0
    dims = tf.TensorShape(shape.shape)
    return float(dims.num_elements() * tf.as_dtype(dtype.type).size) if dims.is_fully_defined() else 0.0
