"""The golden rule: under every layout, 20 steps of training equal plain training on the global batch.

The global batch always has 16 rows, so that all layouts share one plain reference per model
and optimizer: a user's batch has 16 / (replicas x micro-batches) rows, down to one. The
default run takes cases in which every two values of the axes of `tests.harness.cover` meet;
`-m slow` takes the full matrix. `tests.harness.stage_cover` has the same for pipeline stages.
"""

import pytest

from tests.harness import stage_cover
from tests.harness.cover import full_matrix, pairwise_cover
from tests.harness.parametrize import matrix_requests
from tests.harness.runner import Case, check


def cases(found) -> list:
    return [pytest.param(case, matrix_requests(case), id=case.name) for case in found]


def judge(case: Case, outcomes: dict) -> None:
    check(case, outcomes["plain"].ranks[0], outcomes["epl"].ranks)


@pytest.mark.parametrize("case,outcomes", cases(pairwise_cover()), indirect=["outcomes"])
def test_equals_plain_training(case, outcomes):
    judge(case, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("case,outcomes", cases(full_matrix()), indirect=["outcomes"])
def test_equals_plain_training_everywhere(case, outcomes):
    judge(case, outcomes)


@pytest.mark.parametrize("case,outcomes", cases(stage_cover.few()), indirect=["outcomes"])
def test_stages_equal_plain_training(case, outcomes):
    judge(case, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("case,outcomes", cases(stage_cover.full_matrix()), indirect=["outcomes"])
def test_stages_equal_plain_training_everywhere(case, outcomes):
    judge(case, outcomes)
