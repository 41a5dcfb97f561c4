"""Parts: each process writes its own variables into a part of a checkpoint, and the chief merges the parts.

What several lanes hold together each of them writes as slices of the whole. A merged
checkpoint is a plain one: names, shapes and dtypes are those of the user's variables. Its
index is written last, so a checkpoint is there as a whole or not at all.
"""

from typing import Dict, List, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from epl.errors import ProgramError
from epl.ir import attrs as A
from epl.ir.build import DT_FLOAT, Builder
from epl.ir.program import FORWARD, Node, Program, Ref
from epl.passes.base import Pass
from epl.planner.plan import Task
from epl.planner.sharding.prescribed import LANE, TERM, WHOLE, held_form, variable_behind
from epl.planner.sharding.slices import lane_slices

DT_STRING = 7
_FOLDER = "_temp_epl/part-%05d-of-%05d"


class Parts(Pass):
    """Divide what saves by who has it: the stages of several processes, or the lanes of a group.

    Each `SaveV2` becomes one for each taskgraph that has some of its tensors, and one for each
    lane that has parts of some. A `MergeV2Checkpoints`, the user's or a new one, waits for all
    of them.
    """

    name = "parts"

    def run(self, program: Program, task: Task) -> Program:
        saves = [n for n in program.nodes.values() if n.op == "SaveV2"]
        saves = [n for n in saves if task.spread or any(held_form(program, ref, program.held) for ref in n.inputs[3:])]
        if not saves:
            return program
        nodes = dict(program.nodes)
        merge = next((n for n in program.nodes.values() if n.op == "MergeV2Checkpoints"), None)
        if merge is not None:
            saves = [n for n in program.nodes.values() if n.op == "SaveV2"]
        for group in [saves] if merge is not None else [[save] for save in saves]:
            parts = [part for save in group for part in _parts_of(program, save, task)]
            _divide(program, nodes, group, merge, parts)
        shape_of = program.shape_of
        return program.replace(nodes=nodes, shape_of=lambda ref: () if ref[0] not in program.nodes else shape_of(ref))


class _Part(NamedTuple):
    """What one process writes of a checkpoint.

    Attributes:
      save: the user's node. positions: of its tensors. slices: description of each.
      taskgraph, lane: who has them; None for all.
    """

    save: Node
    positions: List[int]
    slices: List[bytes]
    taskgraph: Optional[int] = None
    lane: Optional[int] = None


def _divide(program: Program, nodes: Dict[str, Node], saves: List[Node], merge: Optional[Node], parts: List[_Part]) -> None:
    """Replace the saves of one checkpoint."""
    destination = merge.inputs[1] if merge is not None else saves[0].inputs[0]
    prefixes: List[Ref] = []
    done: List[Ref] = []
    waits: List[str] = []
    of_lanes: Dict[Optional[int], List[str]] = {}
    for number, part in enumerate(parts):
        save, positions = part.save, part.positions
        base = "%s/epl_part_%d" % (save.name, number)
        build = _Stage(nodes, part.taskgraph)
        folder = build.const(base + "/folder", _FOLDER % (number, len(parts)), DT_STRING)
        prefix = build.op("StringJoin", base + "/prefix", [destination, folder], N=A.of_int(2), separator=A.of_str(""))
        names = build.const(base + "/names", _chosen(program, save, 1, positions), DT_STRING)
        slices = build.const(base + "/slices", part.slices, DT_STRING)
        tensors = [save.inputs[3 + p] for p in positions]
        dtypes = [save.attr("dtypes").list.type[p] for p in positions]  # type: ignore[union-attr]
        info = None if part.lane is None else {LANE: part.lane}
        build.op("SaveV2", base, [prefix, names, slices] + tensors, save.controls, info, dtypes=A.of_types(dtypes))
        if part.lane is not None:
            of_lanes.setdefault(part.taskgraph, []).append(base)
        elif part.taskgraph is None:
            waits.append(base)
        else:
            # Control edges mean nothing to other processes; a value that they are given does.
            done.append(_done(build, base + "/done", [base]))
        everywhere = _Stage(nodes, None)
        path = everywhere.const(base + "/merged_folder", _FOLDER % (number, len(parts)), DT_STRING)
        prefixes.append(everywhere.op("StringJoin", base + "/merged_prefix", [destination, path], N=A.of_int(2), separator=A.of_str("")))
    for taskgraph, written in of_lanes.items():
        label = "" if taskgraph is None else "_of_%d" % taskgraph
        done.append(_done(_Stage(nodes, taskgraph), "%s/epl_lanes_done%s" % (saves[0].name, label), written, {TERM: True}))
    build = _Stage(nodes, None)
    if done:
        name = build.add_n(saves[0].name + "/epl_done", done, DT_FLOAT)[0]
        nodes[name] = nodes[name].replace(info={WHOLE: True})
        waits.append(name)
    name = saves[0].name + "/epl_merge" if merge is None else merge.name
    every = build.op("Pack", saves[0].name + "/epl_prefixes", prefixes, N=A.of_int(len(prefixes)), T=A.of_type(DT_STRING), axis=A.of_int(0))
    if merge is None:
        build.op("MergeV2Checkpoints", name, [every, destination], waits, delete_old_dirs=A.of_bool(True))
    else:
        controls = tuple(dict.fromkeys(list(merge.controls) + waits))
        nodes[name] = merge.replace(inputs=[every, destination], controls=[c for c in controls if c not in {s.name for s in saves}])
    for save in saves:
        nodes[save.name] = Node(save.name, "NoOp", (), [name] if merge is None else save.controls, origin=save.name)


def _done(build: Builder, name: str, saves: List[str], info: Optional[Dict[str, bool]] = None) -> Ref:
    return build.op("Const", name, (), saves, info, dtype=A.of_type(DT_FLOAT), value=A.of_tensor(1.0, DT_FLOAT))


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


def _parts_of(program: Program, save: Node, task: Task) -> List[_Part]:
    """The saved tensors by taskgraph, what is everywhere under None; of each what all lanes have as a whole, and the slices of each lane."""
    found: Dict[Optional[int], List[int]] = {}
    for position, (source, _) in enumerate(save.inputs[3:]):
        found.setdefault(program.taskgraph_of(source) if task.spread else None, []).append(position)
    parts: List[_Part] = []
    for taskgraph in sorted(found, key=lambda t: -1 if t is None else t):
        forms = {position: held_form(program, save.inputs[3 + position], program.held) for position in found[taskgraph]}
        whole = [position for position, form in forms.items() if form is None]
        if whole:
            parts.append(_Part(save, whole, _chosen(program, save, 2, whole), taskgraph))
        divided = {position: form for position, form in forms.items() if form is not None}
        texts = []
        for (position, form), given in zip(divided.items(), _chosen(program, save, 2, list(divided))):
            variable = variable_behind(program, save.inputs[3 + position])
            texts.append(lane_slices(program, variable, form, given.decode(), task.plan.group))
        for lane in range(task.plan.lanes if divided else 0):
            parts.append(_Part(save, list(divided), [text[lane].encode() for text in texts], taskgraph, lane))
    return parts


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

