"""Runs each test on each script that it applies to, in a folder of its own."""

import importlib

import pytest
from helpers import SCRIPTS


def pytest_generate_tests(metafunc):
    """A test that takes `script` runs once for each script; `@pytest.mark.scripts("ppo")` narrows that down."""
    if "script" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("scripts")
        names = marker.args if marker else SCRIPTS
        metafunc.parametrize("script", [importlib.import_module(name) for name in names], ids=names)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Scripts write runs/ where they are started."""
    monkeypatch.chdir(tmp_path)
