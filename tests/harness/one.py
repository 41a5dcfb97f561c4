"""Runs one case plainly and under EPL, and prints what each rank returned.

    python -m tests.harness.one MODULE:FUNCTION LAYOUT [key=value ...]

MODULE may leave out `tests.equivalence.`, or be `matrix` for a case of the matrix:

    python -m tests.harness.one test_cases_semantics:two_optimizers 2x1
    python -m tests.harness.one matrix 1x2-m2 model=linear optimizer=bert
"""

import ast
import sys

from tests.harness.layouts import Layout
from tests.harness.pool import CaseFailed, Pool, Request
from tests.harness.runner import Case, check, run_case

MATRIX = "%s:%s" % (run_case.__module__, run_case.__name__)


def value_of(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main(name, layout, *options):
    kwargs = {key: value_of(value) for key, value in (option.split("=", 1) for option in options)}
    function = MATRIX if name == "matrix" else name if name.startswith("tests.") else "tests.equivalence." + name
    case = Request(function, Layout.parse(layout), tuple(sorted(kwargs.items())))
    pool = Pool()
    try:
        found = []
        for one in (case.reference, case):
            print(one.id)
            found.append(pool.outcome(one).ranks)
            for rank, result in enumerate(found[-1]):
                print("  rank %d: %r" % (rank, result if name != "matrix" else result["losses"][:, 0].tolist()))
        if name == "matrix":
            check(Case(layout=case.layout, **kwargs), found[0][0], found[1])
    except CaseFailed as error:
        sys.exit(str(error))
    finally:
        pool.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
