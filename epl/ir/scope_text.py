"""Names with scopes as an indented text."""

from typing import Dict, List, Optional, Sequence, Tuple

_Tree = Dict[str, "_Tree"]


def scope_lines(names: Sequence[str], max_depth: Optional[int] = None) -> List[str]:
    """One line with the whole path for each scope and name, in the order in which each first occurs, two blanks for each level.

    >>> scope_lines(["a/x", "b", "a/y"])
    ['  a', '    a/x', '    a/y', '  b']
    """
    tree: _Tree = {}
    for name in names:
        level = tree
        for part in name.split("/")[:max_depth]:
            level = level.setdefault(part, {})
    return list(_lines(tree, ()))


def _lines(tree: _Tree, above: Tuple[str, ...]) -> List[str]:
    found: List[str] = []
    for part, below in tree.items():
        path = above + (part,)
        found.append("  " * len(path) + "/".join(path))
        found.extend(_lines(below, path))
    return found
