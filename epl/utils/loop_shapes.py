"""Shapes in v1 while loops and of function calls, which TensorFlow's own inference leaves unknown.

A loop's values come in through `Enter` and `NextIteration`, its gradient's through
stacks and tensor arrays. A `Link` says which tensors a value can come from: whatever
all of them agree on holds for the value. For the value that goes round a loop this
is an induction: assume that it keeps the shape with which it entered, infer the body
with it, and check that the body hands back the same shape.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import tensorflow.compat.v1 as tf

from epl.utils.dataset_shapes import function_output_shapes
from epl.utils.static_shapes import Dims, agree

ShapeOf = Callable[[str], Dims]
"""Tensor name -> the shape inferred for it."""


class Source(NamedTuple):
    """A tensor that may become the value. `drop_first`: its rows do, not the whole."""

    tensor: str
    drop_first: bool = False


class Link(NamedTuple):
    """`target`, a tensor's name, holds the value of one of `sources`; with `stacked`, several of them stacked."""

    target: str
    sources: Tuple[Source, ...]
    first_guess: Tuple[Source, ...]
    """The sources that are looked at before the loop's body was inferred."""
    stacked: bool = False

    def guess(self, shape_of: ShapeOf) -> Dims:
        """What the target's shape is if the body changes nothing."""
        return self._shape(self.first_guess, shape_of)

    def proven(self, shape_of: ShapeOf) -> Dims:
        """What all sources agree on."""
        return self._shape(self.sources, shape_of)

    def copied(self) -> Optional[str]:
        """The one tensor whose value the target always holds, or None if there are several."""
        return self.sources[0].tensor if len(self.sources) == 1 and not self.stacked and not self.sources[0].drop_first else None

    def _shape(self, sources: Tuple[Source, ...], shape_of: ShapeOf) -> Dims:
        shapes = [shape_of(s.tensor) for s in sources]
        element = agree([d[1:] if s.drop_first and d else d for s, d in zip(sources, shapes)])
        return (None,) + element if self.stacked and element is not None else element


class CallLink:
    """One output of an op that calls functions: `PartitionedCall`, `If`, `Case` or `While`.

    A branch sees the call's inputs. The body of a `While` sees the loop's own outputs,
    of which it makes the next ones; the inputs are the first.
    """

    def __init__(self, op: tf.Operation, index: int, functions: List[str], cache: Dict[Any, Any]):
        self.target = op.outputs[index].name
        self._op = op
        self._index = index
        self._functions = functions
        self._cache = cache
        self._is_loop = is_loop(op)

    def guess(self, shape_of: ShapeOf) -> Dims:
        """The shape if a loop's body keeps it; for a branch, what `proven` says."""
        return shape_of(self._op.inputs[self._index].name) if self._is_loop else self.proven(shape_of)

    def proven(self, shape_of: ShapeOf) -> Dims:
        """What all branches return, or a loop's input and its body agree on."""
        tensors = self._op.outputs if self._is_loop else call_arguments(self._op)
        shapes = tuple(shape_of(t.name) for t in tensors)
        results = [self._returned(name, shapes) for name in self._functions]
        if any(r is None for r in results):
            return None
        found = [r[self._index] for r in results if r is not None]
        return agree(found + [shape_of(self._op.inputs[self._index].name)] if self._is_loop else found)

    def copied(self) -> Optional[str]:
        """None: a function's result is computed."""
        return None

    def _returned(self, name: str, shapes: Tuple[Dims, ...]) -> Optional[List[Dims]]:
        key = (name, shapes)
        if key not in self._cache:
            self._cache[key] = function_output_shapes(self._op.graph, name, shapes)
        return self._cache[key]


_CALLS = {
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
    "While": ("body",),
    "StatelessWhile": ("body",),
}
"""Op type -> attributes that name the functions whose results become the op's."""
_LOOPS = frozenset(("While", "StatelessWhile"))
_SELECTED = frozenset(("If", "StatelessIf", "Case", "StatelessCase"))


def called_functions(op: tf.Operation) -> List[str]:
    """The functions that compute an op's results, for a call, a branch or a loop; else an empty list."""
    attrs = op.node_def.attr
    names = []
    for key in _CALLS.get(op.type, ()):
        value = attrs[key]
        names.extend([f.name for f in value.list.func] if value.WhichOneof("value") == "list" else [value.func.name])
    return names


def is_loop(op: tf.Operation) -> bool:
    """True for a loop whose body is a function; the body sees the loop's outputs."""
    return op.type in _LOOPS


def call_arguments(op: tf.Operation) -> List[tf.Tensor]:
    """What an op hands to the functions it calls: its inputs without the one that selects a branch."""
    return list(op.inputs)[1:] if op.type in _SELECTED else list(op.inputs)


def shape_links(graph: tf.Graph) -> List[Any]:
    """All links of a graph; an empty list when it has neither loops nor calls."""
    cache: Dict[Any, Any] = {}
    calls = [CallLink(op, i, called_functions(op), cache) for op in graph.get_operations() if op.type in _CALLS for i in range(len(op.outputs))]
    return calls + _loop_links(graph)


def _loop_links(graph: tf.Graph) -> List[Any]:
    links: List[Any] = []
    containers = _Containers()
    for op in graph.get_operations():
        if op.type in ("Enter", "RefEnter"):
            source = Source(op.inputs[0].name)
            links.append(Link(op.outputs[0].name, (source,), (source,)))
        elif op.type in ("Merge", "RefMerge") and any(t.op.type in ("NextIteration", "RefNextIteration") for t in op.inputs):
            sources = tuple(Source(t.name) for t in op.inputs)
            first = tuple(s for s, t in zip(sources, op.inputs) if t.op.type not in ("NextIteration", "RefNextIteration"))
            links.append(Link(op.outputs[0].name, sources, first))
        else:
            containers.add(op)
    return links + containers.links()


class _Containers:
    """Stacks and tensor arrays: what is written to each, and what is read from it."""

    WRITES: Dict[str, Tuple[int, bool]] = {
        "StackPushV2": (1, False),
        "TensorArrayWriteV3": (2, False),
        "TensorArrayScatterV3": (2, True),
    }
    """Op type -> (index of the written tensor, whether its rows are the elements)."""
    READS: Dict[str, bool] = {"StackPopV2": False, "TensorArrayReadV3": False, "TensorArrayGatherV3": True}
    """Op type -> whether the elements come stacked."""
    HARMLESS = frozenset("StackV2 TensorArrayV3 TensorArrayGradV3 TensorArraySizeV3 TensorArrayCloseV3 StackCloseV2".split())
    PASS = frozenset(("Enter", "RefEnter", "Exit", "Switch", "Merge", "Identity", "NextIteration"))
    """Ops through which a handle goes into a loop, a branch or round."""

    def __init__(self) -> None:
        self._sources: Dict[Any, List[Source]] = {}
        self._targets: List[Tuple[Any, str, bool]] = []
        self._opaque: Set[Any] = set()

    def add(self, op: tf.Operation) -> None:
        """Take note of an op that uses a container."""
        if not op.inputs or not (op.type.startswith("TensorArray") or op.type.startswith("Stack")):
            return
        key = _container(op.inputs[0])
        if op.type in self.WRITES and key is not None:
            index, rows = self.WRITES[op.type]
            self._sources.setdefault(key, []).append(Source(op.inputs[index].name, rows))
        elif op.type in self.READS and key is not None:
            self._targets.append((key, op.outputs[0].name, self.READS[op.type]))
        elif op.type not in self.HARMLESS:
            self._opaque.add(key)

    def links(self) -> List[Link]:
        """A link for each read from a container all of whose writes are understood."""
        found = []
        for key, target, stacked in self._targets:
            sources = tuple(self._sources.get(key, ()))
            if sources and key not in self._opaque:
                found.append(Link(target, sources, sources, stacked))
        return found


def _container(handle: tf.Tensor) -> Optional[Tuple[str, str]]:
    """The op that made a stack or tensor array and, for a gradient's array, the gradient's name."""
    for _ in range(64):
        op = handle.op
        if op.type in _Containers.PASS:
            handle = op.inputs[0]
        elif op.type == "TensorArrayGradV3":
            made = _container(op.inputs[0])
            return None if made is None else (made[0], op.get_attr("source").decode())
        elif op.type in ("StackV2", "TensorArrayV3"):
            return op.name, ""
        else:
            return None
    return None
