"""What a program costs: floating-point operations, memory, time, and where they go."""

from epl.profiler.timeline import timeline

__all__ = ["timeline"]
