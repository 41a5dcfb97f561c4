"""What a program costs: floating-point operations, memory, and where both go."""
