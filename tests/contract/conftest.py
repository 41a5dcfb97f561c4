"""The contract's cases run in graph mode, which can't be left again: in a process of their own.

The pytest that was started collects them, starts a second pytest with those that were
selected, and passes its reports on as they come.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

CHILD = "EPL_CONTRACT_REPORTS"
"""In the second process: the file descriptor to which it writes its reports."""

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


class Child:
    """The second pytest."""

    def __init__(self, ids):
        read, write = os.pipe()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow", "--rootdir", str(ROOT)]
        environment = dict(os.environ, **{CHILD: str(write)})
        self._log = open(os.devnull, "w")
        self._process = subprocess.Popen(command + ids, cwd=str(ROOT), env=environment, pass_fds=[write], stdout=self._log, stderr=self._log)
        os.close(write)
        self._lines = os.fdopen(read)

    def reports_of(self, item):
        """The reports of one test, which the second process runs next."""
        reports = []
        for line in self._lines:
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=json.loads(line))
            reports.append(report)
            if report.when == "teardown":
                return reports
        raise pytest.fail.Exception("the process that runs the contract's cases ended with status %s" % self._process.wait(), pytrace=False)

    def close(self):
        self._lines.close()
        self._process.kill()
        self._process.wait()
        self._log.close()


if CHILD in os.environ:
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    _out = os.fdopen(int(os.environ[CHILD]), "w")

    class Reporter:
        """Writes every report to the first process."""

        def __init__(self, config):
            self.config = config

        def pytest_runtest_logreport(self, report):
            data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
            _out.write(json.dumps(data) + "\n")
            _out.flush()

    def pytest_configure(config):
        config.pluginmanager.register(Reporter(config))

    @pytest.fixture(autouse=True)
    def fresh(monkeypatch):
        """Each test starts in a fresh default graph, and leaves TensorFlow as it was."""
        import epl

        for name in list(os.environ):
            if name.startswith("EPL_") and name != CHILD:
                monkeypatch.delenv(name)
        monkeypatch.delenv("TF_CONFIG", raising=False)
        tf.reset_default_graph()
        yield
        epl.shutdown()

    @pytest.fixture
    def gpus(monkeypatch):
        """Pretend a number of GPUs."""
        import epl

        def pretend(count):
            devices = ["/job:worker/replica:0/task:0/device:GPU:%d" % k for k in range(count)]
            monkeypatch.setattr(epl.Cluster, "available_gpus", lambda self, *args, **kwargs: devices)

        return pretend

else:

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(item, nextitem):
        if HERE not in pathlib.Path(str(item.fspath)).parents:
            return None
        child = getattr(item.session, "epl_contract", None)
        if child is None:
            ids = [one.nodeid for one in item.session.items if HERE in pathlib.Path(str(one.fspath)).parents]
            child = item.session.epl_contract = Child(ids)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            reports = child.reports_of(item)
        except pytest.fail.Exception as error:
            reports = [pytest.TestReport(item.nodeid, item.location, {}, "failed", str(error), "call")]
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(session):
        child = getattr(session, "epl_contract", None)
        if child is not None:
            child.close()
