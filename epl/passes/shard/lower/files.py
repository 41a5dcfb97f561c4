"""Restoring: each lane reads its part of a tensor."""

from typing import List

from epl.errors import ProgramError
from epl.ir.program import Ref
from epl.passes.parts import constant
from epl.passes.shard.lower.part import Part, lowering
from epl.planner.sharding.prescribed import assigned_variables
from epl.planner.sharding.slices import lane_slices

DT_STRING = 7


@lowering("restore")
def _restore(part: Part) -> List[Ref]:
    program = part.build.program
    slices = constant(program, program.nodes[part.node.name].inputs[2])
    if slices is None:
        raise ProgramError("Node '%s' restores divided variables, but which slices it reads is no constant. Use tf.train.Saver" % part.node.name)
    texts = [[value.decode() for value in slices] for _ in range(part.build.group.size)]
    for index, form in enumerate(part.way.outputs):
        if form.is_sharded:
            variable = assigned_variables(program, (part.node.name, index))[0]
            for lane, text in enumerate(lane_slices(program, variable, form, slices[index].decode(), part.build.group)):
                texts[lane][index] = text
    own = part.build.lanes("slices", [[text.encode() for text in row] for row in texts], DT_STRING)
    return part.replace([part.node.inputs[0], part.node.inputs[1], own])
