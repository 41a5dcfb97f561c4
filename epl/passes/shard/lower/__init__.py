"""Replacing a divided op by what computes its part, where that is not simply the op itself."""

from epl.passes.shard.lower import classes, combined, files, initial, rows, shapes
from epl.passes.shard.lower.part import lower

__all__ = ["classes", "combined", "files", "initial", "lower", "rows", "shapes"]
