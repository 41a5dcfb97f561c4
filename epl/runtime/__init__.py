"""What runs the compiled programs: ranks, sessions, functions, checkpoints and the launcher."""
