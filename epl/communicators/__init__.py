"""Import points of the original EPL; the code is elsewhere."""
