"""Fixtures of several unit tests."""

import os

import pytest


@pytest.fixture
def clean_environment(monkeypatch):
    """No test depends on the EPL_ variables of the shell that runs it."""
    for name in os.environ:
        if name.upper().startswith("EPL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def config_file(monkeypatch, tmp_path):
    """A function that writes a configuration file and makes EPL_CONFIG name it."""

    def write(content):
        path = tmp_path / "config.yaml"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content, encoding="utf-8")
        monkeypatch.setenv("EPL_CONFIG", str(path))
        return str(path)

    return write
