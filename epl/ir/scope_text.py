"""Names with scopes as an indented text."""

from typing import Dict, List, Optional, Sequence

_Tree = Dict[str, "_Tree"]


def scope_lines(names: Sequence[str], max_depth: Optional[int] = None) -> List[str]:
    """One line per scope and name, in the order in which each first occurs, two blanks deeper per level.

    >>> scope_lines(["a/x", "b", "a/y"])
    ['a', '  x', '  y', 'b']
    """
    tree: _Tree = {}
    for name in names:
        level = tree
        for part in name.split("/")[:max_depth]:
            level = level.setdefault(part, {})
    return list(_lines(tree, ""))


def _lines(tree: _Tree, indent: str) -> List[str]:
    found: List[str] = []
    for part, below in tree.items():
        found.append(indent + part)
        found.extend(_lines(below, indent + "  "))
    return found
