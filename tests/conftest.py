"""Runs each test on each script that it applies to, in a folder of its own."""

import importlib
import os

import pytest
import torch
from helpers import SCRIPTS


def pytest_configure(config):
    """Each worker of pytest-xdist has a core of its own: threads on shared ones would wait for each other."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
        torch.set_num_threads(1)


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
