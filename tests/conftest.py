"""Settings of all tests, and the pool of cases that run in their own processes."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest  # noqa: E402

from tests.harness.pool import Outcome, Pool, Request, ranks_are_possible  # noqa: E402

CASE_SECONDS = 5
"""Seconds for each case of the session, for a test that may have to run all jobs of its group; the pool itself ends jobs that stand still."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    missing = ranks_are_possible()
    requested = {item: requests_of(item) for item in items}
    patience = max(1800, CASE_SECONDS * len({one.id for requests in requested.values() for one in requests}))
    for item, requests in requested.items():
        if any(one.processes > 1 for one in requests):
            item.add_marker(pytest.mark.ranks)
        if requests and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(patience))
        if missing and item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.skip(reason=missing))


def requests_of(item):
    """The cases that a test asks for by its parameters."""
    found = []
    for value in getattr(getattr(item, "callspec", None), "params", {}).values():
        if isinstance(value, Request):
            found.append(value)
        elif isinstance(value, dict):
            found += [one for one in value.values() if isinstance(one, Request)]
    return found


@pytest.fixture(scope="session")
def pool(request):
    """The cases of all tests that run in this session; jobs start when a result is first asked for."""
    reporter, capture = (request.config.pluginmanager.getplugin(name) for name in ("terminalreporter", "capturemanager"))

    def log(text):
        if reporter and request.config.option.verbose > 0:
            with capture.global_and_fixture_disabled():
                reporter.write_line("    " + text)

    missing = ranks_are_possible()
    cases = Pool(log=log)
    for item in request.session.items:
        for one in requests_of(item):
            if not (missing and one.processes > 1):
                cases.add(one)
    yield cases
    cases.close()
    wanted = request.config.getoption("durations") or 0
    if reporter and wanted:
        slowest = sorted(cases.seconds.items(), key=lambda item: -item[1])[:wanted]
        with capture.global_and_fixture_disabled():
            reporter.write_line("\nslowest functions of cases, by group:")
            for (function, group), seconds in slowest:
                reporter.write_line("%8.1f s  %s (%s)" % (seconds, function, group))
    assert not cases.problems, "jobs did not end cleanly after all their cases:\n%s" % "\n".join(cases.problems)


@pytest.fixture
def outcome(request, pool) -> Outcome:
    """The results of one case; parametrize it with `cases` of `tests.harness.parametrize`."""
    return pool.outcome(request.param)


@pytest.fixture
def outcomes(request, pool):
    """The results of several cases by name."""
    return {name: pool.outcome(one) for name, one in request.param.items()}
