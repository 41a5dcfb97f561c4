"""A picture of a program: its taskgraphs and phases as boxes, what flows between them as arrows."""

from collections import Counter, defaultdict
from html import escape
from typing import Dict, List, Tuple

from epl.ir.program import APPLY, BACKWARD, FORWARD, Node, Program

Box = Tuple[str, str]
"""(column, row): where a node is drawn."""

_ROWS = ("INPUT", FORWARD, BACKWARD, "COMMUNICATION", APPLY)
_COLOURS = {"INPUT": "#eef2f7", FORWARD: "#d7ecd9", BACKWARD: "#fbe3c8", "COMMUNICATION": "#e3dcf5", APPLY: "#d4e6f7"}
_WIDTH, _HEIGHT, _GAP, _MARGIN = 230, 64, 56, 24


def _box(node: Node) -> Box:
    column = "taskgraph %s, replica %d" % ("-" if node.taskgraph is None else node.taskgraph, node.replica)
    if node.op.startswith(("Horovod", "Epl")):
        return column, "COMMUNICATION"
    if node.op == "Placeholder":
        return column, "INPUT"
    return column, node.phase


def taskgraph_picture(program: Program) -> str:
    """An SVG: one column per taskgraph and replica, one row per phase, node counts and tensors between them."""
    counts: Counter = Counter(_box(n) for n in program.nodes.values())
    ops: Dict[Box, Counter] = defaultdict(Counter)
    flows: Dict[Tuple[Box, Box], int] = defaultdict(int)
    for node in program.nodes.values():
        here = _box(node)
        ops[here][node.op] += 1
        for source, _ in node.inputs:
            there = _box(program.nodes[source])
            if there != here:
                flows[there, here] += 1
    columns = sorted({c for c, _ in counts})
    rows = [r for r in _ROWS if any(row == r for _, row in counts)]
    width = _MARGIN * 2 + len(columns) * (_WIDTH + _GAP)
    height = _MARGIN * 2 + 24 + len(rows) * (_HEIGHT + _GAP)
    parts = [_head(width, height)]
    for x, column in enumerate(columns):
        parts.append(_text(_left(x) + _WIDTH / 2, _MARGIN + 8, column, 14, "bold"))
    for (start, end), count in sorted(flows.items()):
        parts.append(_arrow(start, end, count, columns, rows))
    for (column, row), amount in sorted(counts.items()):
        x, y = _left(columns.index(column)), _top(rows.index(row))
        common = ", ".join("%s %d" % item for item in ops[column, row].most_common(3))
        parts.append('<rect x="%d" y="%d" width="%d" height="%d" rx="8" fill="%s" stroke="#888"/>' % (x, y, _WIDTH, _HEIGHT, _COLOURS[row]))
        parts.append(_text(x + _WIDTH / 2, y + 26, "%s: %d nodes" % (row.lower(), amount), 14, "normal"))
        parts.append(_text(x + _WIDTH / 2, y + 46, common, 10, "normal"))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _left(column: int) -> int:
    return _MARGIN + column * (_WIDTH + _GAP)


def _top(row: int) -> int:
    return _MARGIN + 24 + row * (_HEIGHT + _GAP)


def _head(width: int, height: int) -> str:
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif">'
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#666"/></marker></defs>'
        '<rect width="100%%" height="100%%" fill="white"/>'
    ) % (width, height)


def _text(x: float, y: float, text: str, size: int, weight: str) -> str:
    return '<text x="%d" y="%d" font-size="%d" font-weight="%s" text-anchor="middle">%s</text>' % (x, y, size, weight, escape(text))


def _arrow(source: Box, target: Box, count: int, columns: List[str], rows: List[str]) -> str:
    x1, y1 = _left(columns.index(source[0])) + _WIDTH / 2, _top(rows.index(source[1])) + _HEIGHT / 2
    x2, y2 = _left(columns.index(target[0])) + _WIDTH / 2, _top(rows.index(target[1])) + _HEIGHT / 2
    down = 1 if y2 > y1 else -1 if y2 < y1 else 0
    across = 1 if x2 > x1 else -1 if x2 < x1 else 0
    # Arrows up and down run beside each other, so that both labels can be read.
    shift = 30 * down
    x1, x2 = x1 + shift, x2 + shift
    y1, y2 = y1 + down * _HEIGHT / 2, y2 - down * _HEIGHT / 2
    if not down:
        x1, x2 = x1 + across * _WIDTH / 2, x2 - across * _WIDTH / 2
    line = '<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="#666" marker-end="url(#tip)"/>' % (x1, y1, x2, y2)
    return line + _text((x1 + x2) / 2 + 14, (y1 + y2) / 2, str(count), 11, "normal")
