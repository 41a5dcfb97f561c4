"""Decorators that tie a test to the cases whose results it judges."""

from typing import Any, Callable

import pytest

from tests.harness.pool import request


def cases(function: Callable, *layouts: str, **options: Any) -> Any:
    """Run the test once per layout; its argument `outcome` has the results of the ranks.

    options: those of `request`.
    """
    params = [pytest.param(request(function, layout, **options), id=layout) for layout in layouts]
    return pytest.mark.parametrize("outcome", params, indirect=True)


def together(**requests: Any) -> Any:
    """Run the test once with the results of several cases in its argument `outcomes`, a dict by name."""
    return pytest.mark.parametrize("outcomes", [pytest.param(requests, id="together")], indirect=True)
