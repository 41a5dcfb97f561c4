"""Runs one case plainly and under EPL, and prints what each rank returned.

    python -m tests.harness.one MODULE:FUNCTION LAYOUT [key=value ...]

MODULE may leave out `tests.equivalence.`, or be `matrix` for a case of the matrix:

    python -m tests.harness.one test_cases_semantics:two_optimizers 2x1
    python -m tests.harness.one matrix 1x2-m2 model=linear optimizer=bert
"""

import ast
import sys

from tests.harness.layouts import Layout
from tests.harness.parametrize import matrix_requests
from tests.harness.pool import CaseFailed, Pool, Request
from tests.harness.runner import Case, check


def value_of(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def requests_of(name, layout, kwargs):
    """(reference, case, what judges their results or None)."""
    if name == "matrix":
        case = Case(layout=layout, **kwargs)
        found = matrix_requests(case)
        return found["plain"], found["epl"], lambda plain, ranks: check(case, plain, ranks)
    function = name if name.startswith("tests.") else "tests.equivalence." + name
    one = Request(function, layout, tuple(sorted(kwargs.items())))
    return one.reference, one, None


def main(name, layout, *options):
    kwargs = {key: value_of(value) for key, value in (option.split("=", 1) for option in options)}
    reference, case, judge = requests_of(name, Layout.parse(layout), kwargs)
    pool = Pool([reference, case])
    try:
        found = []
        for one in (reference, case):
            print(one.id)
            found.append(pool.outcome(one).ranks)
            for rank, result in enumerate(found[-1]):
                print("  rank %d: %r" % (rank, result["losses"][:, 0].tolist() if judge else result))
        if judge:
            judge(found[0][0], found[1])
    except CaseFailed as error:
        sys.exit(str(error))
    finally:
        pool.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
