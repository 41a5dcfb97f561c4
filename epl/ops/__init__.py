"""Building blocks for models and programs: initializers, layers and operations."""
