from epl.ir.scope_text import scope_lines

NAMES = ["a/x", "b", "a/y/u", "a/y/v"]


def test_all_levels():
    assert scope_lines(NAMES) == ["  a", "    a/x", "    a/y", "      a/y/u", "      a/y/v", "  b"]


def test_some_levels():
    assert scope_lines(NAMES, 1) == ["  a", "  b"]
    assert scope_lines(NAMES, 2) == ["  a", "    a/x", "    a/y", "  b"]
    assert scope_lines([], 2) == []
