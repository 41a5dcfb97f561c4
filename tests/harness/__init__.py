"""Runs one training script plainly and under EPL, in many layouts, and compares the two."""
