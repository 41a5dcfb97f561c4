"""Adapter of hooks."""

from epl.runtime.adapters import Patches


def install(patches: Patches) -> None:
    del patches
