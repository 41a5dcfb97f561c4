import pytest

from epl.planner.auto_stage import layer_cuts


@pytest.mark.parametrize(
    "types, stages, cuts",
    [
        ("xwywywywyz", 2, [5]),
        ("wywywywy", 4, [2, 4, 6]),
        ("iiwyrwyrwyrwyro", 4, [5, 8, 11]),
        ("xwywywyz", 2, None),  # three layers
        ("xwywyabcdefgh", 2, None),  # they are less than half of the model
        ("abcdef", 2, None),
        ("", 2, None),
        ("a", 1, None),
        ("wwww", 2, [2]),
    ],
)
def test_layer_cuts(types, stages, cuts):
    assert layer_cuts(types, stages) == cuts


def test_long_layers():
    layer = "".join(chr(97 + (k * k + k // 7) % 26) for k in range(97))
    assert layer_cuts("0123" + layer * 12 + "456", 3) == [4 + 4 * 97, 4 + 8 * 97]
