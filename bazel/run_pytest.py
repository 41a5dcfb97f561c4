"""Run one file of tests with pytest: the main program of the py_test targets."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-c", "pyproject.toml", "-p", "no:cacheprovider", "-v"] + sys.argv[1:]))
