"""Gradient tags: which tensors are raw gradients, of which variable, in which form."""

import json
from typing import Dict, List, NamedTuple, Sequence, Set

from epl.ir import attrs as A
from epl.ir.program import Program, Ref


class GradientTag(NamedTuple):
    """What one tensor is to the optimizer.

    record: number of the `tf.gradients` (or `apply_gradients`) call within its graph.
    variable: name of the variable's node.
    component: "dense", or "values", "indices", "shape" of an IndexedSlices.
    """

    record: int
    variable: str
    component: str

    def text(self, index: int) -> str:
        """The form stored in a node attribute; `index` is the output of the node."""
        return json.dumps([index, self.record, self.variable, self.component])


def tags_of(program: Program, attribute: str) -> Dict[Ref, List[GradientTag]]:
    """All tags of one kind in a program, by tensor."""
    found: Dict[Ref, List[GradientTag]] = {}
    for node in program.nodes.values():
        for text in node.strs_attr(attribute):
            index, record, variable, component = json.loads(text)
            found.setdefault((node.name, index), []).append(GradientTag(record, variable, component))
    return found


def data_ancestors(program: Program, names: Set[str]) -> Set[str]:
    """The nodes that the given ones depend on by data edges, themselves included."""
    seen = set(names)
    stack = list(names)
    while stack:
        for source, _ in program.nodes[stack.pop()].inputs:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return seen


def inner_records(program: Program, tags: Dict[Ref, List[GradientTag]]) -> Set[int]:
    """Gradient calls whose results are part of a later call's loss.

    A gradient penalty differentiates inside the loss: that inner gradient is forward
    computation and must not be reduced over replicas. Only data edges count; a later
    loss that merely waits for an update is another training step.
    """
    roots: Dict[int, Set[str]] = {}
    for ref, items in tags.items():
        for tag in items:
            roots.setdefault(tag.record, set()).add(ref[0])
    inner: Set[int] = set()
    for later in sorted(roots):
        above = data_ancestors(program, roots[later])
        for earlier in sorted(roots):
            if earlier < later and earlier not in inner and _strictly_feeds(program, roots[earlier], roots[later], above):
                inner.add(earlier)
    return inner


def _strictly_feeds(program: Program, earlier: Set[str], later: Set[str], above: Set[str]) -> bool:
    # A tensor may be a raw gradient of both calls (two optimizers on one gradient);
    # that alone does not make the earlier call part of the later one's loss.
    return bool((earlier & above) - later)


def outer_tags(program: Program, attribute: str = A.RAW_GRADIENT) -> Dict[Ref, GradientTag]:
    """The raw gradients that optimizers are given: tensor -> its first tag."""
    tags = tags_of(program, attribute)
    inner = inner_records(program, tags) if attribute == A.RAW_GRADIENT else set()
    outer: Dict[Ref, GradientTag] = {}
    for ref, items in tags.items():
        kept = [t for t in items if t.record not in inner]
        if kept:
            outer[ref] = kept[0]
    return outer


def partners(tags: Dict[Ref, GradientTag]) -> Dict[Ref, Dict[str, Ref]]:
    """For each `values` tensor of sparse gradients: its components by name."""
    by_slot: Dict[Sequence[object], Dict[str, Ref]] = {}
    for ref, tag in tags.items():
        if tag.component != "dense":
            by_slot.setdefault((tag.record, tag.variable), {})[tag.component] = ref
    return {parts["values"]: parts for parts in by_slot.values() if "values" in parts and "indices" in parts}
