"""EPL's tests."""
