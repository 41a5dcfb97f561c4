"""Helpers that hold no state: names, constants, shapes."""
