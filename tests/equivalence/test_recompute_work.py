"""What recomputation adds to a step: at most the forward part once more, and nothing that processes exchange."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.test_recompute_memory import LAYER, WIDTH
from tests.harness.pool import request

LAYERS, ROWS = 12, 256
COPY = "EPL_GRADIENT_CHECKPOINTS/"


def counted(run, kind):
    """Of a training step of this rank: its exchanges by op, and the FLOPs of copies and of what they repeat."""
    import epl.runtime.session as sessions
    from epl.planner.op_costs import TensorSpec, op_flops, plain_attrs

    compiled = []
    compile_program = sessions.compile_program
    sessions.compile_program = lambda *args, **kwargs: compiled.append(compile_program(*args, **kwargs)) or compiled[-1]
    try:
        with run.program({"gradient_checkpoint.type": kind}):
            x = h = tf.placeholder(tf.float32, [ROWS, WIDTH])
            for stage in range(run.layout.stages):
                with run.stage(stage):
                    for number in range(LAYERS // run.layout.stages):
                        h = LAYER["residual"](h, LAYERS * stage + number)
                        if number % 3 == 2:
                            tf.add_to_collection("checkpoints", h)
                    if stage == run.layout.stages - 1:
                        loss = tf.reduce_mean(tf.square(h))
            train = tf.train.GradientDescentOptimizer(0.001).minimize(loss)
            feeds = {x: np.ones([ROWS * run.layout.batches, WIDTH], np.float32)}
            with run.session() as session:
                run.step(session, train, feeds)
    finally:
        sessions.compile_program = compile_program
    program = next(one.program for one in reversed(compiled) if one.program.facts.gradients)

    def flops(node):
        def spec(ref):
            origin = program.nodes[ref[0]].origin
            name = origin[len(COPY) :] if origin.startswith(COPY) else origin
            return TensorSpec(program.shape_of((name, ref[1])))

        attrs = plain_attrs(node.proto.attr) if node.proto is not None else {}
        return op_flops(node.op, attrs, [spec(ref) for ref in node.inputs], [spec((node.name, 0))]) or 0

    copies = [node for node in program.nodes.values() if node.origin.startswith(COPY)]
    repeated = {(node.origin[len(COPY) :], node.replica, node.micro_batch) for node in copies}
    forward = [node for node in program.nodes.values() if (node.origin, node.replica, node.micro_batch) in repeated]
    return {
        "exchanges": sorted(collections.Counter(node.op for node in program.nodes.values() if node.op.startswith("Horovod")).items()),
        "copies": len(copies),
        "products": sum(node.op == "MatMul" for node in copies),
        "again": sum(map(flops, copies)),
        "forward": sum(map(flops, forward)),
    }


def kinds(layout):
    return {kind or "plain": request(counted, layout, kind=kind) for kind in ("", "auto", "collection")}


LAYOUTS = ("1x1", "2x1", "2x1-m4run", "2x1-s2-m4", "2x2-s2-m2")


OFTEN = ("2x1", "2x1-s2-m4")


def each():
    return [pytest.param(kinds(layout), id=layout, marks=[] if layout in OFTEN else [pytest.mark.slow]) for layout in LAYOUTS]


@pytest.mark.parametrize("outcomes", each(), indirect=True)
def test_each_forward_op_at_most_once_more_and_no_exchange(outcomes):
    for rank, plain in enumerate(outcomes["plain"].ranks):
        assert plain["copies"] == 0
        for kind in ("auto", "collection"):
            found = outcomes[kind].ranks[rank]
            assert found["exchanges"] == plain["exchanges"]
            assert found["copies"] > 0 and found["products"] > 0
            assert 0 < found["again"] <= 1.05 * found["forward"]
