"""Decorators that tie a test to the cases whose results it judges."""

from typing import Any, Callable, Dict

import pytest

from tests.harness.pool import Request, request
from tests.harness.runner import Case, run_case


def cases(function: Callable, *layouts: str, **options: Any) -> Any:
    """Run the test once per layout; its argument `outcome` has the results of the ranks.

    options: those of `request`.
    """
    params = [pytest.param(request(function, layout, **options), id=layout) for layout in layouts]
    return pytest.mark.parametrize("outcome", params, indirect=True)


def together(**requests: Any) -> Any:
    """Run the test once with the results of several cases in its argument `outcomes`, a dict by name."""
    return pytest.mark.parametrize("outcomes", [pytest.param(requests, id="together")], indirect=True)


def matrix_requests(case: Case) -> Dict[str, Request]:
    """What a case of the matrix needs: itself as "epl", its reference as "plain"."""
    return {"epl": _matrix_request(case), "plain": _matrix_request(case.reference)._replace(plain=not case.is_per_batch)}


def _matrix_request(case: Case) -> Request:
    unusual = {name: value for name, value in case._asdict().items() if name != "layout" and value != Case._field_defaults.get(name)}
    return request(run_case, case.layout, **unusual)
