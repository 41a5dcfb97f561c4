"""Parts: each process writes its own variables into a part of a checkpoint, and the chief merges the parts.

A merged checkpoint is a plain one: names, shapes and dtypes are those of the user's
variables. Its index is written last, so a checkpoint is there as a whole or not at all.
"""

from typing import Dict, List, Optional

import tensorflow.compat.v1 as tf

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir.build import DT_FLOAT, Builder
from epl.ir.program import FORWARD, Node, Program, Ref
from epl.passes.base import Pass
from epl.planner.plan import Task

DT_STRING = 7
_FOLDER = "_temp_epl/part-%05d-of-%05d"


class Parts(Pass):
    """Divide what saves by taskgraph, when stages lie in several processes.

    Each `SaveV2` becomes one for each taskgraph that has some of its tensors. A
    `MergeV2Checkpoints`, the user's or a new one, waits for all of them.
    """

    name = "parts"

    def run(self, program: Program, task: Task) -> Program:
        saves = [n for n in program.nodes.values() if n.op == "SaveV2"]
        if not task.spread or not saves:
            return program
        nodes = dict(program.nodes)
        merge = next((n for n in program.nodes.values() if n.op == "MergeV2Checkpoints"), None)
        for group in [saves] if merge is not None else [[save] for save in saves]:
            _divide(program, nodes, group, merge)
        shape_of = program.shape_of
        return program.replace(nodes=nodes, shape_of=lambda ref: () if ref[0] not in program.nodes else shape_of(ref))


def _divide(program: Program, nodes: Dict[str, Node], saves: List[Node], merge: Optional[Node]) -> None:
    """Replace the saves of one checkpoint."""
    parts = [(save, taskgraph, positions) for save in saves for taskgraph, positions in _by_taskgraph(program, save).items()]
    destination = merge.inputs[1] if merge is not None else saves[0].inputs[0]
    prefixes: List[Ref] = []
    done: List[Ref] = []
    waits: List[str] = []
    for number, (save, taskgraph, positions) in enumerate(parts):
        base = "%s/epl_part_%d" % (save.name, number)
        build = _Stage(nodes, taskgraph)
        folder = build.const(base + "/folder", _FOLDER % (number, len(parts)), DT_STRING)
        prefix = build.op("StringJoin", base + "/prefix", [destination, folder], N=A.of_int(2), separator=A.of_str(""))
        names = build.const(base + "/names", _chosen(program, save, 1, positions), DT_STRING)
        slices = build.const(base + "/slices", _chosen(program, save, 2, positions), DT_STRING)
        tensors = [save.inputs[3 + p] for p in positions]
        dtypes = [save.attr("dtypes").list.type[p] for p in positions]  # type: ignore[union-attr]
        build.op("SaveV2", base, [prefix, names, slices] + tensors, save.controls, dtypes=A.of_types(dtypes))
        if taskgraph is None:
            waits.append(base)
        else:
            # Control edges mean nothing to other processes; a value that they are given does.
            build.op("Const", base + "/done", (), [base], dtype=A.of_type(DT_FLOAT), value=A.of_tensor(1.0, DT_FLOAT))
            done.append((base + "/done", 0))
        everywhere = _Stage(nodes, None)
        path = everywhere.const(base + "/merged_folder", _FOLDER % (number, len(parts)), DT_STRING)
        prefixes.append(everywhere.op("StringJoin", base + "/merged_prefix", [destination, path], N=A.of_int(2), separator=A.of_str("")))
    name = saves[0].name + "/epl_merge" if merge is None else merge.name
    build = _Stage(nodes, None)
    if done:
        waits.append(build.add_n(saves[0].name + "/epl_done", done, DT_FLOAT)[0])
    every = build.op("Pack", saves[0].name + "/epl_prefixes", prefixes, N=A.of_int(len(prefixes)), T=A.of_type(DT_STRING), axis=A.of_int(0))
    if merge is None:
        build.op("MergeV2Checkpoints", name, [every, destination], waits, delete_old_dirs=A.of_bool(True))
    else:
        controls = tuple(dict.fromkeys(list(merge.controls) + waits))
        nodes[name] = merge.replace(inputs=[every, destination], controls=[c for c in controls if c not in {s.name for s in saves}])
    for save in saves:
        nodes[save.name] = Node(save.name, "NoOp", (), [name] if merge is None else save.controls, origin=save.name)


class _Stage(Builder):
    """Adds nodes as if the user had built them in a taskgraph."""

    def __init__(self, nodes: Dict[str, Node], taskgraph: Optional[int]):
        super().__init__(nodes, "", FORWARD)
        self.taskgraph = taskgraph

    def op(self, op, name, inputs=(), controls=(), info=None, **attrs):
        ref = super().op(op, name, inputs, controls, info, **attrs)
        self.nodes[name] = self.nodes[name].replace(origin=name, taskgraph=self.taskgraph)
        return ref

    def add_n(self, name, parts, dtype):
        if len(parts) == 1:
            return self.identity(name, parts[0], dtype)
        return super().add_n(name, parts, dtype)


def _by_taskgraph(program: Program, save: Node) -> Dict[Optional[int], List[int]]:
    """The positions of the saved tensors by taskgraph; what is everywhere comes under None."""
    found: Dict[Optional[int], List[int]] = {}
    for position, (source, _) in enumerate(save.inputs[3:]):
        found.setdefault(program.taskgraph_of(source), []).append(position)
    return {taskgraph: found[taskgraph] for taskgraph in sorted(found, key=lambda t: -1 if t is None else t)}


def _chosen(program: Program, node: Node, index: int, positions: List[int]) -> List[bytes]:
    """Some elements of a constant input."""
    values = constant(program, node.inputs[index])
    if values is None:
        raise ProgramError(
            "Node '%s' saves tensors whose names are no constants; with stages in several processes EPL can't divide them. Save with tf.train.Saver"
            % node.name
        )
    return [values[p] for p in positions]


def constant(program: Program, ref: Ref) -> Optional[List[bytes]]:
    """The elements of a constant string vector, or None for what is no constant."""
    node = program.nodes[ref[0]]
    while node.op == "Identity" and node.inputs:
        node = program.nodes[node.inputs[0][0]]
    value = node.attr("value") if node.op == "Const" else None
    return None if value is None else list(tf.make_ndarray(value.tensor).reshape(-1))


def trimmed(program: Program) -> Program:
    """Let each `RestoreV2` read only what this process uses of it."""
    nodes = dict(program.nodes)
    moved: Dict[Ref, Ref] = {}
    for node in program.nodes.values():
        if node.op != "RestoreV2":
            continue
        used = sorted({ref[1] for c, _ in program.consumers.get(node.name, ()) for ref in program.nodes[c].inputs if ref[0] == node.name})
        used = sorted(set(used) | {ref[1] for ref in program.fetches if ref[0] == node.name})
        dtypes = node.attr("dtypes").list.type  # type: ignore[union-attr]
        names, slices = constant(program, node.inputs[1]), constant(program, node.inputs[2])
        if len(used) == len(dtypes) or not used or names is None or slices is None:
            continue
        build = Builder(nodes, node.device, node.phase)
        chosen = [
            build.const("%s/epl_%s" % (node.name, label), [values[u] for u in used], DT_STRING)
            for label, values in (("names", names), ("slices", slices))
        ]
        nodes[node.name] = node.replace(inputs=[node.inputs[0]] + chosen, attrs=dict(node.attrs, dtypes=A.of_types([dtypes[u] for u in used])))
        moved.update(((node.name, u), (node.name, i)) for i, u in enumerate(used))
    if not moved:
        return program
    for name, node in list(nodes.items()):
        if any(ref in moved for ref in node.inputs):
            nodes[name] = node.replace(inputs=[moved.get(ref, ref) for ref in node.inputs])
    return program.replace(nodes=nodes, fetches=[moved.get(ref, ref) for ref in program.fetches]).pruned()

