"""Programs written as text.

One node a line, in the form in which `EPL_DUMP_PASSES` prints it:

    x = Placeholder() {shape: [?, 2]}
    y = MatMul(x, w/read, ^init) {transpose_b: true} @/device:CPU:1  # taskgraph=1 seed=1
    fetches: y:0
    targets: train
    feeds: x (divide)
    checkpoints: y:0

Types and lengths that follow from the inputs are left out; a dtype that does not follow
is float. `# raw=1/w` tags output 0 as the raw gradient of w by gradient call 1,
`# raw=1/w/values` as a part of a sparse one, `# raw:1=...` another output.
"""

import ast
import re
import textwrap

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import attr_value_pb2, graph_pb2, versions_pb2

from epl import compat
from epl.ir import attrs as A
from epl.ir import op_table
from epl.ir.inputs import ragged_components
from epl.ir.program import SAME, Feed, Program, node_from_def, parse_ref, program_from_graph_def, ref_text
from epl.ir.tags import GradientTag, outer_tags

_NODE = re.compile(r"(?:(?P<name>[^\s=#]+) = )?(?P<op>\w+)\((?P<inputs>[^)]*)\)(?: \{(?P<attrs>.*)\})?(?: @(?P<device>\S+))?(?:\s+# (?P<marks>.*))?$")
_LISTS = re.compile(r"(fetches|targets|feeds|checkpoints):(.*)$")
_TAGS = {"raw": A.RAW_GRADIENT, "apply": A.APPLY_GRADIENT}
_INTS = {"backward": A.BACKWARD, "seed": A.SEED, "taskgraph": A.TASKGRAPH}


def parse(text):
    """The program that a text describes, as the graph index would make it from the user's graph."""
    graph = graph_pb2.GraphDef(versions=versions_pb2.VersionDef(producer=tf.version.GRAPH_DEF_VERSION))
    made, lists, collections = {}, {"fetches": [], "targets": [], "feeds": [], "checkpoints": []}, {}
    for line in textwrap.dedent(text).splitlines():
        line = line.strip()
        listed = _LISTS.match(line)
        if listed:
            lists[listed[1]] += [part.strip() for part in listed[2].split(",") if part.strip()]
        elif line and not line.startswith("#"):
            _add(graph, made, line, collections)
    feeds = []
    for item in lists["feeds"]:
        name, _, mode = item.partition(" ")
        feeds.append(Feed(parse_ref(name), parse_ref(name)[0], mode.strip("()") or SAME))
    program = program_from_graph_def(graph, lists["fetches"], lists["targets"]).replace(feeds=feeds, collections=collections)
    program = program.replace(shape_of=Shapes(graph), checkpoints=[parse_ref(name) for name in lists["checkpoints"]])
    return program.replace(
        raw_gradients=outer_tags(program),
        apply_gradients=outer_tags(program, A.APPLY_GRADIENT),
        ragged=ragged_components(program),
    )


class Shapes:
    """Static shapes as TensorFlow infers them; computed when first asked for."""

    def __init__(self, graph_def):
        self._graph_def = graph_pb2.GraphDef.FromString(graph_def.SerializeToString())  # the import changes what it is given
        self._graph = None

    def __call__(self, ref):
        if self._graph is None:
            self._graph = tf.Graph()
            with self._graph.as_default():
                tf.import_graph_def(self._graph_def, name="")
        try:
            shape = self._graph.get_tensor_by_name("%s:%d" % ref).shape
        except (KeyError, ValueError):
            return None
        return None if shape.ndims is None else tuple(shape.as_list())


def _add(graph, made, line, collections):
    found = _NODE.match(line)
    if not found:
        raise ValueError("This line describes no node: %r" % line)
    node = graph.node.add(op=found["op"], name=found["name"] or found["op"], device=found["device"] or "")
    node.input.extend(part.strip() for part in found["inputs"].split(",") if part.strip())
    given = dict(part.split(":", 1) for part in _top_level(found["attrs"] or ""))
    definition = compat.op_def(node.op)
    if definition is not None:
        kinds = {a.name: a for a in definition.attr}
        for key, value in given.items():
            key, value = key.strip(), value.strip()
            kind = kinds[key].type if key in kinds else None
            if kind == "tensor" and "dtype" not in given:
                node.attr["dtype"].type = _dtype_of(_literal(value))
            node.attr[key].CopyFrom(_attr(kind, value, node))
        _infer(node, definition, made)
    for mark in (found["marks"] or "").split():
        key, _, value = mark.partition("=")
        key, _, index = key.partition(":")
        if key in _TAGS:
            record, variable, component = re.match(r"(\d+)/(.*?)(?:/(values|indices|shape))?$", value).groups()
            text = GradientTag(int(record), variable, component or "dense").text(int(index or 0))
            node.attr[_TAGS[key]].list.s.append(text.encode())
        elif key == "collection":
            collections[node.name, int(index or 0)] = value
        elif key in _INTS:
            node.attr[_INTS[key]].i = int(value)
    made[node.name] = node_from_def(node)


def _top_level(text):
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text + ","):
        depth += (char in "[(") - (char in ")]")
        if char == "," and not depth:
            if text[start:position].strip():
                parts.append(text[start:position])
            start = position + 1
    return parts


def _literal(text):
    return ast.literal_eval(re.sub(r"\b(true|false)\b", lambda found: found[0].capitalize(), text))


def _dtype_of(value):
    while isinstance(value, list):
        value = value[0] if value else 0.0
    return {bool: tf.bool, int: tf.int32, float: tf.float32, str: tf.string}[type(value)].as_datatype_enum


def _attr(kind, text, node):
    if kind == "type":
        return A.of_type(tf.as_dtype(text).as_datatype_enum)
    if kind == "list(type)":
        return attr_value_pb2.AttrValue(list=dict(type=[tf.as_dtype(t.strip()).as_datatype_enum for t in text.strip("[]").split(",")]))
    if kind == "shape":
        return A.of_shape(None if text == "?" else ast.literal_eval(text.replace("?", "None")))
    if kind == "list(shape)":
        shapes = ast.literal_eval(text.replace("?", "None"))
        return attr_value_pb2.AttrValue(list=dict(shape=[tf.TensorShape(shape).as_proto() for shape in shapes]))
    if kind == "func":
        return attr_value_pb2.AttrValue(func=dict(name=text))
    value = text if kind == "string" else _literal(text)
    if kind == "tensor":
        return A.of_tensor(value, node.attr["dtype"].type)
    if kind == "list(int)":
        return attr_value_pb2.AttrValue(list=dict(i=value))
    return {"bool": A.of_bool, "int": A.of_int, "float": A.of_float}.get(kind, A.of_str)(value)


def _infer(node, definition, made):
    """Fill in the types and lengths that the inputs imply."""
    data = [parse_ref(text) for text in node.input if not text.startswith("^")]
    position = 0
    for arg in definition.input_arg:
        count = 1
        if arg.number_attr:
            if arg.number_attr not in node.attr:
                node.attr[arg.number_attr].i = len(data) - (len(definition.input_arg) - 1)
            count = node.attr[arg.number_attr].i
        elif arg.type_list_attr:
            count = len(data) - (len(definition.input_arg) - 1)
        refs = data[position : position + count]
        position += count
        types = [op_table.output_types(made[name])[index] if name in made else tf.float32.as_datatype_enum for name, index in refs]
        if arg.type_attr and arg.type_attr not in node.attr and types:
            node.attr[arg.type_attr].type = types[0]
        if arg.type_list_attr and arg.type_list_attr not in node.attr:
            node.attr[arg.type_list_attr].list.type.extend(types)
    for attr in definition.attr:
        if attr.name in node.attr or attr.HasField("default_value"):
            continue
        if attr.type == "type":
            node.attr[attr.name].type = tf.float32.as_datatype_enum
        elif attr.type == "string":
            node.attr[attr.name].s = b""


def show(program, *attrs, phases=False, devices=False, only=None):
    """The text of a program, with the named attributes (of nodes, or facts of pseudo-ops) where they are set.

    phases adds the phases of the user's nodes, devices the devices; `only` is a test of the names to print.
    """
    lines = []
    for node in program.nodes.values():
        if only is not None and not only(node.name):
            continue
        edges = [ref_text(r) for r in node.inputs] + ["^" + c for c in node.controls]
        line = "%s = %s(%s)" % (node.name, node.op, ", ".join(edges))
        shown = ["%s: %s" % (a, value_text(node, a)) for a in attrs if node.attr(a) is not None or a in node.info]
        line += " {%s}" % ", ".join(shown) if shown else ""
        line += " @" + node.device if devices and node.device else ""
        line += "  # " + node.phase if phases else ""
        lines.append(line)
    for label, items in (
        ("fetches", ["%s:%d" % r for r in program.fetches]),
        ("targets", program.targets),
        ("feeds", ["%s:%d -> %s (%s)" % (f.ref + (f.node, f.mode)) for f in program.feeds]),
    ):
        if items and only is None:
            lines.append("%s: %s" % (label, ", ".join(items)))
    return "\n".join(lines)


def value_text(node, name):
    """One attribute of a node, or one fact of a pseudo-op, as in the text form."""
    value = node.attr(name)
    if value is None:
        return str(node.info[name])
    kind = value.WhichOneof("value")
    if kind == "type":
        return tf.as_dtype(value.type).name
    if kind == "tensor":
        return str(tf.make_ndarray(value.tensor).tolist())
    if kind == "shape":
        return str(tf.TensorShape(value.shape))
    if kind == "s":
        return value.s.decode()
    return str(getattr(value, kind))


def expect(program, text, *attrs, **options):
    """Compare with a text, line by line."""
    expected = textwrap.dedent(text).strip().splitlines()
    actual = show(program, *attrs, **options).splitlines()
    assert actual == expected, "\n".join(["The program is:"] + actual)


def fingerprint(program):
    """All that a program is, for comparing before and after."""
    parts = [program.to_graph_def().SerializeToString(deterministic=True)]
    for node in program.nodes.values():
        fields = [getattr(node, slot) for slot in node.__slots__ if slot not in ("proto", "attrs")]
        attrs = sorted((key, str(value)) for key, value in node.attrs.items())
        parts.append((fields, attrs, None if node.proto is None else node.proto.SerializeToString(deterministic=True)))
    parts.append((program.fetches, program.targets, program.feeds, program.ragged, program.facts, program.agreement))
    return repr(parts)


def subset(program, names) -> Program:
    """The nodes of a program with these names, for comparing a part of it."""
    return program.replace(nodes={name: program.nodes[name] for name in names}, fetches=(), targets=(), feeds=())
