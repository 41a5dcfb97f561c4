"""What EPL knows about TensorFlow's op types: state, randomness, data sources, dtypes."""

import functools
from typing import Any, Container, Dict, List, NamedTuple, Optional, Set, Tuple

from tensorflow.core.framework import node_def_pb2, types_pb2

from epl import compat
from epl.errors import ProgramError
from epl.ir.program import Node, Program

REF_VARIABLES = frozenset(("VariableV2", "Variable"))
VARIABLES = REF_VARIABLES | {"VarHandleOp"}

RANDOM = frozenset(
    "RandomUniform RandomUniformInt RandomStandardNormal ParameterizedTruncatedNormal TruncatedNormal RandomShuffle RandomCrop "
    "Multinomial RandomGamma RandomPoisson RandomPoissonV2 SampleDistortedBoundingBox SampleDistortedBoundingBoxV2 AllCandidateSampler "
    "FixedUnigramCandidateSampler LearnedUnigramCandidateSampler LogUniformCandidateSampler ThreadUnsafeUnigramCandidateSampler "
    "UniformCandidateSampler".split()
)
"""Ops that draw from a generator kept in the kernel, seeded by `seed` and `seed2`."""

GENERATORS = frozenset(
    "RngSkip RngReadAndSkip StatefulRandomBinomial StatefulStandardNormal StatefulStandardNormalV2 StatefulTruncatedNormal "
    "StatefulUniform StatefulUniformFullInt StatefulUniformInt".split()
)
"""Ops that draw from a generator whose state is in a variable, and move it on."""

DRAWS = frozenset(
    "IteratorGetNext IteratorGetNextSync IteratorGetNextAsOptional QueueDequeue QueueDequeueV2 QueueDequeueMany QueueDequeueManyV2 "
    "QueueDequeueUpTo QueueDequeueUpToV2 ReaderRead ReaderReadV2 ReaderReadUpTo ReaderReadUpToV2 BarrierTakeMany Unstage MapUnstage "
    "OrderedMapUnstage MapUnstageNoKey OrderedMapUnstageNoKey".split()
)
"""Ops that take the next element of an input; each (replica, micro-batch) draws its own."""

STEP_STATE = frozenset(
    "StackV2 Stack TensorArrayV3 TensorArrayV2 TensorArray TensorArrayGradV3 TensorArrayGradWithShape TemporaryVariable".split()
)
"""Resources that live within one run; each instance of their users needs its own."""

PYTHON = frozenset(("PyFunc", "EagerPyFunc"))
"""Python callbacks with possible side effects: a data source like an input."""

SHARED_HANDLES = frozenset(
    "Iterator IteratorV2 OneShotIterator AnonymousIterator AnonymousIteratorV2 AnonymousIteratorV3 MultiDeviceIterator "
    "HashTable HashTableV2 MutableHashTable MutableHashTableV2 MutableHashTableOfTensors MutableHashTableOfTensorsV2 "
    "MutableDenseHashTable MutableDenseHashTableV2 AnonymousHashTable AnonymousMutableHashTable AnonymousMutableDenseHashTable "
    "FIFOQueue FIFOQueueV2 PaddingFIFOQueue PaddingFIFOQueueV2 RandomShuffleQueue RandomShuffleQueueV2 PriorityQueue PriorityQueueV2 "
    "TextLineReader TextLineReaderV2 TFRecordReader TFRecordReaderV2 WholeFileReader WholeFileReaderV2 IdentityReader IdentityReaderV2 "
    "FixedLengthRecordReader FixedLengthRecordReaderV2 LMDBReader Barrier ConditionalAccumulator ResourceConditionalAccumulator "
    "SparseConditionalAccumulator SummaryWriter MutexV2 BoostedTreesEnsembleResourceHandleOp DecodeProtoV2".split()
) - {"DecodeProtoV2"}
"""Host resources that exist once per process whatever the number of replicas."""

UNNAMED_HANDLES = frozenset(
    "OneShotIterator AnonymousIterator AnonymousIteratorV2 AnonymousIteratorV3 AnonymousHashTable AnonymousMutableHashTable "
    "AnonymousMutableDenseHashTable".split()
)
"""Handles that take no name of their own: their kernel keeps the resource."""

SHARED_WRITES = frozenset(
    "MakeIterator InitializeTable InitializeTableV2 InitializeTableFromTextFile InitializeTableFromTextFileV2 "
    "InitializeTableFromDataset LookupTableImport LookupTableImportV2 QueueClose QueueCloseV2".split()
)
"""Ops that set up a host resource; they run once per process."""

SUMMARIES = frozenset(
    "ScalarSummary HistogramSummary ImageSummary AudioSummary AudioSummaryV2 TensorSummary TensorSummaryV2 MergeSummary "
    "WriteSummary WriteScalarSummary WriteHistogramSummary WriteImageSummary WriteAudioSummary WriteRawProtoSummary".split()
)
"""Ops that make or write summaries: they exist once per process, whatever the number of replicas."""

OWN_NAMES = {"Enter": "frame_name", "RefEnter": "frame_name", "TemporaryVariable": "var_name", "DestroyTemporaryVariable": "var_name"}
"""Attributes by which nodes of one run find each other; clones need names of their own."""

ENTERS = frozenset(("Enter", "RefEnter"))
EXITS = frozenset(("Exit", "RefExit"))
PASS_THROUGH = frozenset(("Identity", "RefIdentity", "Enter", "RefEnter", "Switch", "RefSwitch", "Snapshot"))
"""Ops through which a handle or reference keeps naming the same state."""

ALIASES = PASS_THROUGH | frozenset(
    "Merge RefMerge IdentityN Reshape Squeeze ExpandDims StopGradient PreventGradient CheckNumerics EnsureShape Bitcast "
    "Slice StridedSlice Split SplitV Unpack Print DebugIdentity DebugIdentityV2 PlaceholderWithDefault".split()
)
"""Ops whose outputs may be the very buffer of their inputs."""

STATE_WRITES = frozenset(
    "Assign AssignAdd AssignSub AssignVariableOp AssignAddVariableOp AssignSubVariableOp "
    "ScatterUpdate ScatterAdd ScatterSub ScatterMul ScatterDiv ScatterMin ScatterMax ScatterNdUpdate ScatterNdAdd ScatterNdSub ScatterNdMin "
    "ResourceScatterUpdate ResourceScatterAdd ResourceScatterSub ResourceScatterMul ResourceScatterDiv ResourceScatterMin "
    "ResourceScatterMax ResourceScatterNdUpdate ResourceScatterNdAdd ResourceScatterNdSub ResourceScatterNdMin ResourceScatterNdMax "
    "ResourceStridedSliceAssign ScatterNdMax StridedSliceAssign CountUpTo ResourceCountUpTo DestroyResourceOp".split()
)

LINEAR_IN_ROWS = frozenset(
    "UnsortedSegmentSum ScatterAdd ScatterSub ResourceScatterAdd ResourceScatterSub ScatterNdAdd ScatterNdSub "
    "ResourceScatterNdAdd ResourceScatterNdSub".split()
)
"""Consumers of sparse rows for which rows of the same index may be summed before."""


def is_apply(op: str) -> bool:
    """True for an optimizer's update op (`ApplyAdam`, `ResourceSparseApplyMomentum`, ...)."""
    for prefix in ("ResourceSparseApply", "ResourceApply", "SparseApply", "Apply"):
        if op.startswith(prefix) and len(op) > len(prefix):
            return True
    return False


class _ApplyOps:
    def __contains__(self, op: object) -> bool:
        return isinstance(op, str) and is_apply(op)


APPLY_OPS = _ApplyOps()
"""The op types of `is_apply` as a container."""


def writes_state(op: str) -> bool:
    """True for an op that changes the variable its first input names."""
    return op in STATE_WRITES or op in GENERATORS or is_apply(op)


def variable_of(program: Program, name: str, index: int = 0) -> Optional[str]:
    """The variable node behind a handle or reference, or None.

    Follows the ops through which a handle keeps naming the same variable, and the
    reference outputs of assignments.
    """
    for _ in range(64):
        node = program.nodes.get(name)
        if node is None:
            return None
        if node.op in VARIABLES:
            return name
        forwards = node.op in PASS_THROUGH or (writes_state(node.op) and not node.op.startswith("Resource") and "VariableOp" not in node.op)
        if not forwards or not node.inputs:
            return None
        name, index = node.inputs[0]
    return None


def writes(program: Program, node: Node) -> bool:
    """True for an op, or a call of a function, that may change a variable it is given."""
    return bool(written_inputs(program, node))


def written_inputs(program: Program, node: Node) -> Tuple[int, ...]:
    """Positions of the data inputs that name variables which a node, or a function it calls, may change."""
    if is_apply(node.op):
        return _state_inputs(node.op)
    if writes_state(node.op):
        return (0,)
    found: Set[int] = set()
    for name in called_functions(program, node):
        found.update(_given_to(node.op, _written_arguments(program, name, set()), len(node.inputs)))
    return tuple(sorted(found))


@functools.lru_cache(maxsize=None)
def _state_inputs(op: str) -> Tuple[int, ...]:
    """The inputs of an update that are references or handles: the variable and its slots."""
    definition = compat.op_def(op)
    if definition is None:
        return (0,)
    return tuple(i for i, arg in enumerate(definition.input_arg) if arg.is_ref or arg.type == types_pb2.DT_RESOURCE)


_CHOICES = frozenset(("If", "StatelessIf", "Case", "StatelessCase"))
_CALLS = _CHOICES | {"While", "StatelessWhile", "PartitionedCall", "StatefulPartitionedCall"}


def is_call(program: Program, node: Node) -> bool:
    """True for a call of functions, v2 control flow included, whose inputs are the functions' arguments."""
    return node.op in _CALLS or (_may_call(node.op) and compat.op_def(node.op) is None and program.function(node.op) is not None)


def _given_to(op: str, arguments: Set[int], inputs: int) -> Set[int]:
    """The inputs of a calling op that become these arguments of the function."""
    if op in _CHOICES:
        return {a + 1 for a in arguments}
    if op in _CALLS or compat.op_def(op) is None:
        return arguments
    return set(range(inputs)) if arguments else set()


def _written_arguments(program: Program, name: str, entered: Set[str]) -> Set[int]:
    function = program.function(name)
    if function is None or name in entered:
        return set()
    entered = entered | {name}
    arguments = {arg.name: position for position, arg in enumerate(function.signature.input_arg)}
    inner = {node.name: node for node in function.node_def}
    found: Set[int] = set()
    for node in function.node_def:
        given = [text for text in node.input if not text.startswith("^")]
        written = {0} if writes_state(node.op) else set()
        for called in _called(node, program):
            written |= _given_to(node.op, _written_arguments(program, called, entered), len(given))
        for position in written:
            text = given[position]
            while text not in arguments:
                source = inner.get(text.partition(":")[0])
                if source is None or source.op not in PASS_THROUGH:
                    break
                text = source.input[0]
            if text in arguments:
                found.add(arguments[text])
    return found


def function_contains(program: Program, name: str, ops: Container[str], _seen: Optional[Set[str]] = None) -> bool:
    """True when a function, or one it calls, has an op of the given types."""
    seen = set() if _seen is None else _seen
    if name in seen:
        return False
    seen.add(name)
    function = program.function(name)
    if function is None:
        return False
    for inner in function.node_def:
        if inner.op in ops:
            return True
        for called in _called(inner, program):
            if function_contains(program, called, ops, seen):
                return True
    return False


def _called(proto: node_def_pb2.NodeDef, program: Program) -> List[str]:
    names = [v.func.name for v in proto.attr.values() if v.HasField("func")]
    for value in proto.attr.values():
        names.extend(f.name for f in value.list.func)
    if compat.op_def(proto.op) is None and program.function(proto.op) is not None:
        names.append(proto.op)
    return names


def called_functions(program: Program, node: Node) -> List[str]:
    """Names of the functions a node calls."""
    return _called(node.proto, program) if node.proto is not None and _may_call(node.op) else []


@functools.lru_cache(maxsize=None)
def _may_call(op: str) -> bool:
    """False for an op type that has no functions as attributes."""
    definition = compat.op_def(op)
    return definition is None or any(a.type in ("func", "list(func)") for a in definition.attr)


def is_source(program: Program, node: Node) -> bool:
    """True when every (replica, micro-batch) needs an instance of its own whatever its inputs are."""
    if node.op in RANDOM or node.op in GENERATORS or node.op in DRAWS or node.op in STEP_STATE or node.op in PYTHON:
        return True
    if node.op.endswith("Dataset") or node.op.endswith("DatasetV2") or node.op.endswith("DatasetV3") or node.op in SHARED_HANDLES:
        return False
    return any(function_contains(program, f, RANDOM | GENERATORS | DRAWS | PYTHON) for f in called_functions(program, node))


def draws(program: Program, node: Node) -> bool:
    """True for an op, or a call of a function, that takes the next element of an input."""
    if node.op in DRAWS:
        return True
    return is_source(program, node) and any(function_contains(program, f, DRAWS) for f in called_functions(program, node))


def _signature(node: Node, program: Optional[Program]) -> Any:
    definition = compat.op_def(node.op)
    if definition is None and program is not None:
        function = program.function(node.op)
        definition = function.signature if function is not None else None
    if definition is None:
        text = "Node '%s' has the op type '%s', which this TensorFlow does not know; load the library that defines it"
        raise ProgramError(text % (node.name, node.op))
    return definition


def _expand(arg: Any, node: Node, default: Dict[str, Any]) -> List[int]:
    def value(key: str) -> Any:
        found = node.attr(key)
        return found if found is not None else default[key]

    if arg.number_attr:
        count = int(value(arg.number_attr).i)
        return [arg.type if arg.type else value(arg.type_attr).type] * count
    if arg.type_list_attr:
        return list(value(arg.type_list_attr).list.type)
    return [arg.type if arg.type else value(arg.type_attr).type]


def output_types(node: Node, program: Optional[Program] = None) -> List[int]:
    """The dtypes (DataType numbers, never reference types) of a node's outputs."""
    if node.op.startswith(PSEUDO):
        return node.info.get("types") or [node.info["dtype"]] * max(1, len(node.inputs))
    try:
        arguments, default = _known_outputs(node.op)
    except KeyError:
        arguments, default = _arguments(_signature(node, program))
    types: List[int] = []
    for arg in arguments:
        types.extend(_expand(arg, node, default))
    return types


class _Argument(NamedTuple):
    """What an OpDef says about the dtypes of an output; protos are slow to read."""

    type: int
    type_attr: str
    number_attr: str
    type_list_attr: str


def _arguments(definition: Any) -> Tuple[List[_Argument], Dict[str, Any]]:
    """(Outputs, defaults of attributes)."""
    found = [_Argument(arg.type, arg.type_attr, arg.number_attr, arg.type_list_attr) for arg in definition.output_arg]
    return found, {a.name: a.default_value for a in definition.attr}


@functools.lru_cache(maxsize=None)
def _known_outputs(op: str) -> Tuple[List[_Argument], Dict[str, Any]]:
    """Those of a registered op type. Raises KeyError for others: they may be functions, or be loaded later."""
    definition = compat.op_def(op)
    if definition is None:
        raise KeyError(op)
    return _arguments(definition)


def dtype_of(program: Program, name: str, index: int) -> int:
    """The dtype of one tensor of a program."""
    types = output_types(program.nodes[name], program)
    if not 0 <= index < len(types):
        raise ProgramError("Tensor '%s:%d' does not exist: the node has %d outputs" % (name, index, len(types)))
    return types[index]


def has_strings(program: Program, node: Node) -> bool:
    """Whether an op takes or gives strings, for which no device but a CPU has kernels."""
    if is_call(program, node):
        return False
    return types_pb2.DT_STRING in [dtype_of(program, *ref) for ref in node.inputs] + output_types(node, program)


@functools.lru_cache(maxsize=None)
def _never_a_handle(op: str) -> bool:
    """True for an op type none of whose outputs can be a reference or a resource."""
    definition = compat.op_def(op)
    if definition is None:
        return op.startswith(PSEUDO)
    allowed = {a.name: a.allowed_values.list.type for a in definition.attr}
    for arg in definition.output_arg:
        if arg.is_ref or arg.type == types_pb2.DT_RESOURCE or arg.type_list_attr:
            return False
        if arg.type_attr and (not allowed[arg.type_attr] or types_pb2.DT_RESOURCE in allowed[arg.type_attr]):
            return False
    return True


def is_handle(node: Node, index: int, program: Optional[Program] = None) -> bool:
    """True when output `index` of a node is a reference to a variable's buffer or the handle of a resource."""
    if _never_a_handle(node.op):
        return False
    definition = _signature(node, program)
    default = {a.name: a.default_value for a in definition.attr}
    position = 0
    for arg in definition.output_arg:
        types = _expand(arg, node, default)
        if position <= index < position + len(types):
            return bool(arg.is_ref) or types[index - position] == types_pb2.DT_RESOURCE
        position += len(types)
    return False


@functools.lru_cache(maxsize=None)
def takes_references(op: str) -> bool:
    """True for an op with an input that is a reference to a variable."""
    definition = compat.op_def(op)
    return definition is not None and any(arg.is_ref for arg in definition.input_arg)


def is_stateful(node: Node, program: Optional[Program] = None) -> bool:
    """True for an op that TensorFlow must not fold, merge or drop."""
    return bool(_signature(node, program).is_stateful)


PSEUDO = "Epl"
"""Op types that start so are EPL's own and are lowered before a program runs."""

FLOATS = frozenset((types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE))
OPAQUE = frozenset((types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT, types_pb2.DT_STRING))
