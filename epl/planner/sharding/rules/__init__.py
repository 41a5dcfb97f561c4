"""What is known about TensorFlow's ops, by kind."""

from epl.planner.sharding.rules import elementwise, indexing, initial, products, reductions, shapes, state

__all__ = ["elementwise", "indexing", "initial", "products", "reductions", "shapes", "state"]
