"""Calls of functions that do all but write variables."""

from typing import Dict

from tensorflow.core.framework import function_pb2, node_def_pb2

from epl.ir import op_table
from epl.ir.program import Node, Program

SUFFIX = "_epl_effectless"


class Effectless:
    """Makes calls whose functions change no variable; `library` has the functions then."""

    def __init__(self, program: Program):
        self._program = program
        self._made: Dict[str, function_pb2.FunctionDef] = {}

    def call(self, node: Node) -> Node:
        """The same call of changed functions."""
        proto = node_def_pb2.NodeDef()
        if node.proto is not None:
            proto.CopyFrom(node.proto)
        self._redirect(proto)
        return node.replace(op=proto.op, proto=proto)

    @property
    def library(self) -> function_pb2.FunctionDefLibrary:
        """The program's functions with the new ones."""
        library = function_pb2.FunctionDefLibrary()
        library.CopyFrom(self._program.library)
        library.function.extend(self._made.values())
        return library

    def _redirect(self, proto: node_def_pb2.NodeDef) -> None:
        for value in proto.attr.values():
            for called in ([value.func] if value.HasField("func") else []) + list(value.list.func):
                called.name = self._function(called.name)
        if self._program.function(proto.op) is not None:
            proto.op = self._function(proto.op)

    def _function(self, name: str) -> str:
        original = self._program.function(name)
        if original is None:
            return name
        changed = name + SUFFIX
        if changed not in self._made:
            function = self._made[changed] = function_pb2.FunctionDef()
            function.CopyFrom(original)
            function.signature.name = changed
            for node in function.node_def:
                # Inside functions variables are resources, and what writes them returns nothing.
                if op_table.writes_state(node.op) and node.op not in op_table.GENERATORS:
                    waits = [text for text in node.input if text.startswith("^")]
                    node.CopyFrom(node_def_pb2.NodeDef(name=node.name, op="NoOp", input=waits))
                else:
                    self._redirect(node)
        return changed
