"""The golden rule with options that save memory or time, alone and in pairs: they change no result."""

import pytest

from tests.equivalence.test_matrix import cases, judge
from tests.harness.option_cover import few, full_matrix


@pytest.mark.parametrize("case,outcomes", cases(few()), indirect=["outcomes"])
def test_options_change_no_result(case, outcomes):
    judge(case, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("case,outcomes", cases(full_matrix()), indirect=["outcomes"])
def test_options_change_no_result_anywhere(case, outcomes):
    judge(case, outcomes)
