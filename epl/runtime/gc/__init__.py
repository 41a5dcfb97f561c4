"""Recomputation of activations ("gradient checkpoints"): import points of the original EPL."""
