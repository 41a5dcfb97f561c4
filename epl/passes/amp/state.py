"""State: a checkpoint has the dynamic loss scale under a name of its own, which plain TensorFlow does not ask for."""

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir.build import DT_FLOAT, Builder
from epl.ir.program import FORWARD, SAME, Feed, Program
from epl.passes.amp.casts import PREFIX
from epl.passes.base import Pass
from epl.passes.parts import DT_STRING, constant
from epl.planner.plan import Task

STATE = PREFIX + "state"
"""The fed vector (scale, good steps), and its name in a checkpoint."""


class SaveScale(Pass):
    """Save the loss scale with the first group of tensors that is saved."""

    name = "save_loss_scale"

    def run(self, program: Program, task: Task) -> Program:
        save = next((node for node in program.nodes.values() if node.op == "SaveV2"), None)
        if save is None or not task.plan.amp or task.plan.loss_scale:
            return program
        nodes = dict(program.nodes)
        build = Builder(nodes, "", FORWARD)
        inputs = [save.inputs[0]]
        for position, label, entry in ((1, "names", STATE.encode()), (2, "slices", b"")):
            known = constant(program, save.inputs[position])
            if known is None:
                raise ProgramError(
                    "Node '%s' saves tensors whose names are no constants; EPL can't add the loss scale to them. Save with tf.train.Saver" % save.name
                )
            inputs.append(build.const("%s/epl_amp_%s" % (save.name, label), known + [entry], DT_STRING))
        state = build.op("Placeholder", STATE, dtype=A.of_type(DT_FLOAT), shape=A.of_shape([2]))
        types = list(save.attr("dtypes").list.type)  # type: ignore[union-attr]
        inputs += list(save.inputs[3:]) + [state]
        nodes[save.name] = save.replace(inputs=inputs, attrs=dict(save.attrs, dtypes=A.of_types(types + [DT_FLOAT])))
        return program.replace(nodes=nodes, feeds=program.feeds + (Feed(state, STATE, SAME),))
