"""The runner of plans: several runs, resumed, skipped, failing; on this machine and through submitit."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from torch.utils.tensorboard import SummaryWriter

from benchmark import plot, run, speed

PLAN = """
[[runs]]
script = "ppo"
env_ids = ["probe_envs:Score-v0"]
seeds = [1, 2]
flags = {total_timesteps = 240, num_envs = 2, num_steps = 12, num_minibatches = 2}

[[runs]]
script = "ppo_continuous_action"
env_ids = ["probe_envs:ScoreBox-v0"]
seeds = [1]
name = "short and still"
flags = {total_timesteps = 240, num_envs = 2, num_steps = 12, num_minibatches = 2}
replace = {"        optimizer.step()" = "        pass"}
"""
BAD = """
[[runs]]
script = "ppo"
env_ids = ["probe_envs:BrokenReward-v0", "probe_envs:Score-v0"]
seeds = [1]
flags = {total_timesteps = 960, num_envs = 2, num_steps = 12, num_minibatches = 2}
"""
LONG = """
[[runs]]
script = "ppo"
env_ids = ["CartPole-v1"]
seeds = [1]
flags = {total_timesteps = 30720, checkpoint_interval = 1}
"""


def command(text, *flags):
    Path("plan.toml").write_text(text)
    folders = ["--runs", "work", "--results", "results"]
    return [sys.executable, ROOT / "benchmark/run.py", "plan.toml", *folders, *map(str, flags)]


def run_plan(text, *flags):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    return subprocess.run(
        command(text, *flags), capture_output=True, text=True, check=False, env=environment, timeout=300
    )


def rows():
    with open("results/plan.csv") as file:
        return list(csv.DictReader(file))


def learned(run) -> bool:
    """Whether Adam took a step."""
    (path,) = Path("work").glob(f"plan/{run}/runs/*/checkpoint.pt")
    return bool(torch.load(path)["optimizer"]["state"])


@pytest.mark.slow
def test_a_plan_through_submitit():
    """All runs leave their returns; once finished, nothing is run again."""
    done = run_plan(PLAN, "--cluster", "local")
    assert done.returncode == 0, done.stderr
    assert "3 of 3 runs are finished" in done.stdout
    assert {(r["script"], r["name"], r["seed"]) for r in rows()} == {
        ("ppo", "", "1"),
        ("ppo", "", "2"),
        ("ppo_continuous_action", "short and still", "1"),
    }
    assert learned("ppo__*__1")
    assert not learned("ppo_continuous_action__*__short-and-still__1")
    assert {float(row["return"]) for row in rows()} == {1000.0}
    assert max(int(row["step"]) for row in rows()) > 200
    notes = json.loads(Path("results/plan.json").read_text())
    assert notes["command"].startswith("python benchmark/run.py plan.toml --runs work")
    assert len(notes["runs"]) == 3
    assert all({"versions", "machine", "finished", "flags"} <= set(note) for note in notes["runs"].values())
    before = sorted(Path("work").rglob("events*"))
    again = run_plan(PLAN, "--cluster", "local")
    assert "3 runs, 3 of them finished before" in again.stdout
    assert sorted(Path("work").rglob("events*")) == before


@pytest.mark.slow
def test_results_that_are_kept():
    """Without their folders, and beside new ones; --keep does not run them again, unless flags have changed."""
    one = PLAN.split('[[runs]]\nscript = "ppo_continuous_action"')[0].replace("[1, 2]", "[1]")
    assert run_plan(one).returncode == 0
    before = rows()
    shutil.rmtree("work")
    more = run_plan(one.replace("[1]", "[1, 2]"), "--keep")
    assert "2 runs, 1 of them finished before" in more.stdout
    changed = run_plan(one.replace("[1]", "[2]").replace("240", "480"), "--keep")
    assert "1 runs, 0 of them finished before" in changed.stdout
    assert len(list(Path("work").rglob("checkpoint.pt"))) == 1  # the first attempt is no part of it
    assert [row for row in rows() if row["seed"] == "1"] == before
    assert max(int(row["step"]) for row in rows() if row["seed"] == "2") > 400
    assert len(json.loads(Path("results/plan.json").read_text())["runs"]) == 2
    with pytest.raises(ValueError, match="different flags"):
        plot.load("plan", Path("results"))


def test_what_counts_as_finished():
    """Notes of the same flags and the same replaced texts, none of which may be missing from the plan."""
    made = run.Run(Path(), "ppo", "CartPole-v1", 1, "x", {"num_envs": 2})
    flags = {"env_id": "CartPole-v1", "seed": 1, "num_envs": 2}
    assert made.is_made_by({"flags": flags, "seconds": 3})
    assert not made.is_made_by({})
    assert not made.is_made_by({"flags": flags | {"num_steps": 3}})
    assert not made.is_made_by({"flags": flags, "replace": {"optimizer.step()": "pass"}})


def test_names_of_runs():
    """Each has its own folder, whatever is in its name; two alike are refused."""
    Path("plan.toml").write_text(PLAN.replace("short and still", "1/2: rate"))
    names = {each.folder.name for each in run.read_plan(Path("plan.toml"), Path())}
    assert "ppo_continuous_action__probe_envs-ScoreBox-v0__1-2--rate__1" in names
    assert len(names) == 3
    Path("plan.toml").write_text(PLAN + PLAN.replace("num_envs = 2", "num_envs = 4"))
    with pytest.raises(ValueError, match="two runs ppo__probe_envs-Score-v0__1: give one of them a name"):
        run.read_plan(Path("plan.toml"), Path())


def test_lost_iterations_count_once():
    """Those after the last checkpoint, which were done again with other numbers of rows."""
    for number, steps, saved in [(1, [500, 1000, 1505], 1000), (2, [1507, 2010], 2010)]:
        folder = Path(f"runs/x__1__{number}")
        with SummaryWriter(folder) as writer:
            for step in steps:
                writer.add_scalar("charts/SPS", 100, step)
                writer.add_scalar("charts/episodic_return", number, step)
        torch.save({"progress": {"global_step": saved}}, folder / "checkpoint.pt")
    iterations, scalars = run.timeline(SimpleNamespace(folder=Path()))
    assert [step for step, _ in iterations] == [500, 1000, 1507, 2010]
    assert scalars["charts/episodic_return"] == {500: 1, 1000: 1, 1507: 2, 2010: 2}


def test_results_without_new_ones_stay():
    """A plan of which nothing is finished writes nothing."""
    Path("plan.csv").write_text("something made by hand\n")
    run.collect("plan", "command", Path(), [run.Run(Path("nowhere"), "ppo", "CartPole-v1", 1, "", {})], None)
    assert Path("plan.csv").read_text() == "something made by hand\n"
    assert not Path("plan.json").exists()


@pytest.mark.slow
def test_a_text_that_is_not_there():
    """A plan that replaces it fails: an ablation of nothing would look like a detail without effect."""
    last = PLAN[PLAN.rindex("[[runs]]") :]
    done = run_plan(last.replace("optimizer.step()", "optimizer.leap()"))
    assert done.returncode == 1
    assert "ppo_continuous_action.py has 0 times" in done.stdout


@pytest.mark.slow
def test_a_run_that_fails_is_reported():
    """With the place of its log; the others are finished all the same."""
    done = run_plan(BAD, "--workers", 2)
    assert done.returncode == 1
    assert "BrokenReward-v0__1 failed: FloatingPointError" in done.stdout
    assert "1 of 2 runs are finished" in done.stdout
    (log,) = Path("work").rglob("*BrokenReward*/log.txt")
    assert "FloatingPointError" in log.read_text()
    assert {row["env"] for row in rows()} == {"probe_envs:Score-v0"}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_goes_on(how):
    """Ctrl-C saves, a kill loses what came after the last checkpoint; either way the curve has each step once.

    SIGTERM goes to the runner alone, which hands it on.
    """
    process = subprocess.Popen(command(LONG), start_new_session=True, stderr=subprocess.PIPE, text=True)
    while not list(Path("work").rglob("checkpoint.pt")):
        time.sleep(0.1)
        assert process.poll() is None, process.stderr.read()
    if how == signal.SIGTERM:
        process.terminate()
    else:
        os.killpg(process.pid, how)
    process.communicate(timeout=60)  # until the runs, too, have closed stderr
    if how == signal.SIGTERM:
        (log,) = Path("work").rglob("log.txt")
        assert "Traceback" not in log.read_text()
    assert not list(Path("work").rglob("done.json"))
    done = run_plan(LONG)
    assert done.returncode == 0, done.stderr
    assert len(list(Path("work").rglob("checkpoint.pt"))) == 2
    steps, seconds = ([float(row[name]) for row in rows()] for name in ("step", "seconds"))
    assert steps == sorted(set(steps))
    assert seconds == sorted(seconds)
    assert 0 < seconds[-1] < 120
    assert steps[-1] > 28_000


@pytest.mark.slow
@pytest.mark.parametrize("who", ["script", "products", "environments"])
def test_measurements_of_speed(who):
    """One of each kind, in a process as speed.py starts it."""
    result = speed.measure("cartpole", who, 1, 2)
    assert 100 < result["sps"] < 1e8
    assert 0.1 < result["memory"] < 2
