"""Rebatch: datasets whose batches are cut anew, where replicas take unequal shares of a step (`Plan.batch_shares`).

A dataset that makes batches of b samples stands for b samples of each replica. A process
whose replicas take other shares draws as many batches, of other sizes, from the same row of
samples. Its iterator is given the dataset through a `RebatchDatasetV2` with these sizes, in
the order in which the replicas draw.
"""

from typing import Dict, Optional

from tensorflow.core.framework import function_pb2

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.build import Builder
from epl.ir.program import FORWARD, Node, Program, Ref, fill_node_def
from epl.passes.base import Pass
from epl.planner.plan import Plan, Task

DT_INT64 = 9
_MARK = "rebatch"
_SIZE_INPUT = {
    "BatchDataset": 1, "BatchDatasetV2": 1, "ParallelBatchDataset": 1, "PaddedBatchDataset": 1, "PaddedBatchDatasetV2": 1,
    "MapAndBatchDataset": -3, "ExperimentalMapAndBatchDataset": -3,
}  # fmt: skip
"""Op that makes batches -> which input says how large; a negative number counts from the end."""


def with_marked_iterators(whole: Program, plan: Plan) -> Program:
    """The user's graph, in which the iterators that training draws from are marked for the pass.

    Raises:
      ProgramError: training draws from something whose batches can't be cut anew.
    """
    if not plan.batch_shares or not whole.raw_gradients:
        return whole
    needed = whole.ancestors([name for name, _ in whole.raw_gradients])
    nodes = dict(whole.nodes)
    for node in whole.nodes.values():
        if node.name not in needed or node.op not in op_table.DRAWS or not node.inputs:
            continue
        handle = _handle(whole, node.inputs[0][0])
        makers = [c for c, _ in whole.consumers.get(handle.name, ()) if whole.nodes[c].op == "MakeIterator"]
        if not makers and handle.op != "OneShotIterator":
            raise _refused(plan, node.name, "it is drawn from '%s' of type '%s'" % (handle.name, handle.op))
        _refuse_fixed(whole, node, plan)
        if handle.op == "OneShotIterator":
            nodes[handle.name] = nodes[handle.name].replace(info=dict(handle.info, **{_MARK: True}))
            continue
        for maker in makers:
            nodes[maker] = nodes[maker].replace(info=dict(nodes[maker].info, **{_MARK: True}))
    return whole.replace(nodes=nodes)


class Rebatch(Pass):
    """Cut the batches of the marked iterators anew."""

    name = "rebatch"

    def run(self, program: Program, task: Task) -> Program:
        marked = [node for node in program.nodes.values() if _MARK in node.info]
        if not marked or not task.plan.streams_of(task.rank):
            return program
        nodes = dict(program.nodes)
        library = function_pb2.FunctionDefLibrary()
        library.CopyFrom(program.library)
        for node in marked:
            if node.op == "OneShotIterator":
                nodes[node.name] = _one_shot(program, task, node, library)
            else:
                nodes[node.name] = _initializable(program, task, node, nodes)
        return program.replace(nodes=nodes, library=library)


def _initializable(program: Program, task: Task, maker: Node, nodes: Dict[str, Node]) -> Node:
    """A MakeIterator that is given the dataset cut anew."""
    dataset, handle = maker.inputs
    size = _batch_size(program.nodes, dataset[0])
    if size is None:
        raise _refused(task.plan, maker.name, "no batching of its dataset was found in the graph")
    iterator = program.nodes[handle[0]]
    added: Dict[str, Node] = {}
    cut = _cut(Builder(added, maker.device, FORWARD), maker.name, task, dataset, size, iterator)
    for node in added.values():
        nodes[node.name] = node.replace(taskgraph=maker.taskgraph)
    return maker.replace(inputs=(cut, handle))


def _one_shot(program: Program, task: Task, iterator: Node, library: function_pb2.FunctionDefLibrary) -> Node:
    """A one-shot iterator whose function returns the dataset cut anew."""
    factory = A.AttrValue()
    factory.CopyFrom(iterator.attr("dataset_factory") or factory)
    name = factory.func.name
    body = program.function(name)
    if body is None:
        raise _refused(task.plan, iterator.name, "its function '%s' is not in the graph" % name)
    changed = library.function.add()
    changed.CopyFrom(body)
    changed.signature.name = name + "_epl_rebatch"
    result = changed.signature.output_arg[0].name
    inside = {proto.name: Node(proto.name, proto.op, [_inner(text) for text in proto.input if not text.startswith("^")]) for proto in body.node_def}
    dataset = _inner(changed.ret[result])
    size = _batch_size(inside, dataset[0])
    if size is None:
        raise _refused(task.plan, iterator.name, "no batching of its dataset was found in its function '%s'" % name)
    added: Dict[str, Node] = {}
    cut = _cut(Builder(added, "", FORWARD), "epl", task, dataset, size, iterator)
    outputs = {dataset[0]: changed.ret[result], size[0]: _text_of(body, size)}
    for node in added.values():
        proto = changed.node_def.add()
        fill_node_def(proto, node)
        del proto.input[:]
        proto.input.extend([outputs.get(source) or "%s:%s:0" % (source, _OUTPUT[added[source].op]) for source, _ in node.inputs])
    changed.ret[result] = "%s:handle:0" % cut[0]
    factory.func.name = changed.signature.name
    return iterator.replace(attrs=dict(iterator.attrs, dataset_factory=factory))


_OUTPUT = {"Const": "output", "Mul": "z", "FloorDiv": "z", "Sub": "z"}
"""Names of the outputs of ops, as functions refer to them."""


def _cut(build: Builder, prefix: str, task: Task, dataset: Ref, size: Ref, iterator: Node) -> Ref:
    """The dataset in batches of the shares of this process; the shares of all streams add up to `size` samples for each."""
    plan = task.plan
    streams = [stream for stream in plan.streams_of(task.rank) for _ in range(plan.batches_per_run)]
    count = build.const(prefix + "/epl_streams", plan.streams, DT_INT64)
    samples = build.mul(prefix + "/epl_samples", size, count, DT_INT64)
    sizes = build.parts(prefix + "/epl_sizes", samples, plan.batch_shares, DT_INT64, streams)
    keep = build.const(prefix + "/epl_keep_remainder", False, 10)
    types, shapes = iterator.attr("output_types"), iterator.attr("output_shapes")
    return build.op("RebatchDatasetV2", prefix + "/epl_rebatch", [dataset, sizes, keep], output_types=types, output_shapes=shapes)


def _handle(program: Program, name: str) -> Node:
    node = program.nodes[name]
    while node.op == "Identity":
        node = program.nodes[node.inputs[0][0]]
    return node


def _batch_size(nodes: Dict[str, Node], name: str) -> Optional[Ref]:
    """The tensor that says how large the batches of a dataset are: that of the last op that makes some."""
    while True:
        node = nodes.get(name)
        if node is None or not node.inputs:
            return None
        if node.op in _SIZE_INPUT:
            return node.inputs[_SIZE_INPUT[node.op]]
        if "Dataset" not in node.op and node.op != "Identity":
            return None
        name = node.inputs[0][0]


def _inner(text: str) -> Ref:
    """A reference in a function: "node:output:0", or the name of an argument."""
    parts = text.split(":")
    return parts[0], int(parts[2]) if len(parts) == 3 else 0


def _text_of(body: function_pb2.FunctionDef, ref: Ref) -> str:
    """How the nodes of a function refer to a tensor."""
    return next((text for proto in body.node_def for text in proto.input if _inner(text) == ref), ref[0])


def _refuse_fixed(whole: Program, draw: Node, plan: Plan) -> None:
    """Batches of other sizes need components whose dimension 0 is open."""
    for index in range(len(op_table.output_types(draw, whole))):
        shape = whole.shape_of((draw.name, index))
        if shape is not None and (not shape or shape[0] is not None):
            size = "is fixed at %s" % shape[0] if shape else "has no first dimension"
            raise _refused(plan, draw.name, "the batch of its component %d %s; batch the dataset with drop_remainder=False" % (index, size))


def _refused(plan: Plan, name: str, why: str) -> ProgramError:
    return ProgramError(
        "cluster.batch_shares is '%s', but the batches of '%s' can't be cut anew: %s. Leave the shares out, feed the batches, or draw them from a "
        "tf.data.Dataset that makes batches" % (",".join(map(str, plan.batch_shares)), name, why)
    )
