"""Several processes under torchrun: A2, and what a run of two leaves behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, TRAINS, continuous, environment, only_run, run, scalars, small_flags
from worker import global_batch, moment_rows

pytestmark = pytest.mark.scripts("ppo_continuous_action")  # of whose code the others have copies
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run_worker(name, folder):
    """What the two processes of worker.py saved. They take a script of that name in `folder` rather than ours."""
    command = (ROOT / "tests/worker.py", name, folder)
    done = run(*command, launcher=TORCHRUN, PYTHONPATH=f"{folder}:{ROOT}:{ROOT}/tests")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):  # one that lives longer than Python can abort the process: a failure once in ten runs
        assert "gloo" not in (folder / f"{rank}.threads").read_text()
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.fixture
def ranks(script, tmp_path):
    return run_worker(script.__name__, tmp_path)


@pytest.mark.scripts("ppo", "ppo_continuous_action", "ppo_atari_lstm")
def test_a2_parallelized_gradient_update(script, ranks):
    """Two processes of n environments take the same step as one of 2n: one minibatch, one epoch, no normalization.

    One environment has no real row at all, so that the processes weigh differently.
    """
    args, agent, optimizer, batch = global_batch(script, seed=0)
    args.num_envs = 8
    debug = script.update(agent, optimizer, batch, args, 0.2)
    for saved in ranks:
        for ours, theirs in zip(agent.parameters(), saved["weights"], strict=True):
            assert torch.allclose(ours, theirs, atol=2e-5)
        for name in ("losses/policy_loss", "losses/value_loss", "losses/approx_kl", "losses/grad_norm"):
            assert saved["debug"][name] == pytest.approx(debug[name], rel=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(*(saved["weights"] for saved in ranks), strict=True))


def test_a2_normalizers_are_merged(script, ranks):
    """After each merge, mean and variance are those of the rows of both processes, each row once."""
    rows = torch.as_tensor(np.concatenate([moment_rows(), moment_rows() + 4]))
    for saved in ranks:
        count, mean, std = saved["moments"]
        assert count.item() == len(rows)
        assert torch.allclose(mean, rows.mean(0), rtol=1e-12)
        assert torch.allclose(std, rows.std(0, correction=0), rtol=1e-6)


@pytest.mark.scripts(*TRAINS)
def test_a2_a_run_of_two_processes(script):
    """Rows of both are counted, one folder is left, processes differ in their environments, the plan says it all."""
    flags = small_flags(script, "Score", iterations=8)
    done = run(script.__file__, *flags, "--eval-episodes", 1, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert "in each of 2 processes\n4 iterations" in done.stdout
    log = scalars(only_run())
    steps = [step for step, _ in log["charts/SPS"]]
    assert len(steps) == 4
    assert steps[0] == 2 * 4 * 9
    assert {value for _, value in log["charts/episodic_return"]} == {1000}
    assert torch.load(only_run() / "checkpoint.pt")["progress"]["rows"] == 288
    assert "1 of 1 deterministic episodes" in done.stdout
    again = run(
        script.__file__, "--resume", only_run() / "checkpoint.pt", "--total-timesteps", 432, launcher=TORCHRUN
    )
    assert again.returncode == 0, again.stderr
    assert len(list(Path("runs").iterdir())) == 2


def test_a2_environments_differ_between_processes(script):
    """The score of both processes is logged, and their episodes are not the same ones."""
    done = run(script.__file__, *small_flags(script, "Noise", iterations=8), launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    returns = torch.load(only_run() / "checkpoint.pt")["progress"]["recent_returns"]
    assert len(returns) == len(set(returns)) >= 40


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_all_processes(script, number):
    """torchrun hands the signal on; the processes agree, save and end."""
    command = [
        *TORCHRUN,
        script.__file__,
        *small_flags(script, iterations=10**6),
        "--checkpoint-interval",
        "5",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    while not list(Path("runs").glob("*/checkpoint.pt")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    before = time.time()
    process.send_signal(number)
    output = process.communicate(timeout=40)
    assert process.returncode != 0, output
    assert time.time() - before < 20
    checkpoint = torch.load(only_run() / "checkpoint.pt")
    flags = {
        "resume": str(only_run() / "checkpoint.pt"),
        "total_timesteps": checkpoint["progress"]["rows"] + 36,
    }
    assert script.train(script.Args(**flags))["global_step"] > checkpoint["progress"]["global_step"]


def test_bad_flags_under_torchrun(script):
    """All processes refuse in the same way; none waits for another."""
    done = run(script.__file__, *small_flags(script), "--total-timesteps", 71, launcher=TORCHRUN, timeout=60)
    assert done.returncode != 0
    assert "--total-timesteps 71" in done.stderr
    assert "2 process(es)" in done.stderr


def test_not_finite_in_one_process_stops_both(script):
    done = run(
        script.__file__, *small_flags(script, "BrokenReward", iterations=40), launcher=TORCHRUN, timeout=60
    )
    assert done.returncode != 0
    assert "stopped: iteration" in done.stderr
    assert not continuous(script) or "nan" in done.stderr
