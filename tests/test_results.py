"""What the benchmarks compute from runs: the study of num_envs, tables and figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, recorded

from benchmark import num_envs, plot


def test_results_of_the_readme_are_current():
    """If this fails: python benchmark/plot.py --write."""
    readme = (ROOT / "README.md").read_text()
    assert plot.with_tables(readme) == readme


def test_tables_of_the_study_are_current():
    """If this fails: python benchmark/num_envs.py --only-figure."""
    page = num_envs.PAGE.read_text()
    assert "| a | 4 | 16 |" in page
    assert num_envs.with_tables(page, num_envs.load_numbers(plot.RESULTS)) == page


BELOW = {("ppo_continuous_action", "Humanoid-v4")}  # the README says so


def test_results_are_within_what_is_published():
    """Inside the published mean minus one standard deviation, or above, but for those known to be below."""
    known = plot.published()
    curves = [c for plan in ("classic", "mujoco") for c in plot.load(plan)]
    compared = 0
    for script, env in {(c.script, c.env) for c in curves} & set(known):
        ours = np.mean([c.notes["episodic_return"] for c in curves if (c.script, c.env) == (script, env)])
        for mean, std in known[script, env].values():
            assert (ours >= mean - std) != ((script, env) in BELOW), f"{script}.py on {env}"
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize("n", num_envs.NUMBERS)
def test_regimes(n):
    """What each of them keeps while N grows."""
    from ppo_continuous_action import Args

    made = {regime: Args(**num_envs.flags_of(regime, n)) for regime in num_envs.REGIMES}
    assert (made["a"].num_steps, made["a"].minibatch_size) == (32, 4 * n)
    assert (made["b"].batch_size, made["b"].minibatch_size) == (4096, 64)
    assert (made["c"].num_steps, made["c"].minibatch_size) == (64, 64)
    assert made["d"].learning_rate == made["e"].learning_rate == Args(num_envs=n).learning_rate
    assert all(made[regime].learning_rate == 3e-4 for regime in "abc")


@pytest.mark.scripts("ppo_continuous_action")
def test_gradient_statistics(script):
    """Against the formulas, from the gradients of the same parts by autograd."""
    args, agent, _, batch = recorded(script, "Noise", num_envs=8, num_steps=4, num_minibatches=8)
    found = num_envs.gradient_statistics(script, agent, batch, args, seed=5)

    def gradient(rows):
        columns = {name: getattr(batch, name).flatten(0, 1)[rows] for name in script.Rollout._fields[:3]}
        for name in ("logprobs", "values", "advantages", "returns"):
            columns[name] = getattr(batch, name).flatten(0, 1)[rows]
        loss, _ = script.ppo_loss(agent, script.Rollout(**columns), torch.tensor(0.2), args)
        grads = torch.autograd.grad(loss, list(agent.parameters()))
        names = [name for name, _ in agent.named_parameters()]
        chosen = [g for name, g in zip(names, grads, strict=True) if not name.startswith("critic")]
        return torch.cat([g.flatten() for g in chosen]).double()

    generator = torch.Generator().manual_seed(5)
    g = torch.stack([gradient(rows) for rows in torch.randperm(32, generator=generator).split(4)])
    covariance = torch.cov(g.T)
    assert found["policy_trace"] == pytest.approx(4 * covariance.trace().item(), rel=1e-4)
    square = g.mean(0).square().sum().item() - covariance.trace().item() / 8
    assert found["policy_square"] == pytest.approx(square, rel=1e-3)
    order, rows = torch.randperm(8, generator=generator), torch.arange(32).view(4, 8)
    u, v = (gradient(rows[:, half].flatten()) for half in order.split(4))
    assert found["policy_halves_dot"] == pytest.approx((u @ v).item(), rel=1e-3)
    assert found["policy_halves_trace"] == pytest.approx(32 * ((u - v).norm() / 2).square().item(), rel=1e-3)
    assert found["policy_cosine"] == pytest.approx(torch.cosine_similarity(u, v, dim=0).item(), rel=1e-3)


def study_curve(**notes) -> plot.Curve:
    """A run of 25 points with noise of 50, of which the episodes played make 30."""
    rng = np.random.default_rng(2)
    gradients = [
        {
            "value_trace": 1.0,
            "value_halves_trace": 2.0,
            "policy_trace": 10.0,
            "policy_halves_dot": 2.0,
            "policy_cosine": 0.5,
            "measured": 1,
        },
        {
            "value_trace": 5.0,
            "value_halves_trace": 6.0,
            "policy_trace": 40.0,
            "policy_halves_dot": -1.0,
            "policy_cosine": 0.1,
            "measured": 3,
        },
    ]
    known = {
        "regime": "a",
        "num_envs": 4,
        "minibatch_size": 16,
        "update_epochs": 5,
        "steps_per_second": 10,
        "steps": 1,
        "seconds": 1,
    }
    known |= {"share_of_environments": 0.5, "peak_gib": 0.4, "std_of_episodes": [120.0] * 1000}
    n = 1000
    steps, seconds, returns = (
        np.arange(1.0, n + 1),
        np.arange(1.0, n + 1) / 2,
        rng.normal(0, 50, n) + np.arange(n),
    )
    return plot.Curve(
        "", "", "a-4", 1, steps, seconds, returns, returns, known | {"gradients": gradients} | notes
    )


def test_numbers_of_a_run():
    """Means of the gradients' statistics are over measurements; what playing adds to the noise is taken off."""
    numbers = num_envs.numbers_of(study_curve())
    assert numbers["cosine"] == pytest.approx(0.2)
    assert numbers["updates"] == 5 / 16
    assert numbers["value_ratio"] == pytest.approx(5 / 4)
    assert (numbers["trace"], numbers["dot"]) == pytest.approx((32.5, -0.25))
    assert numbers["curve_noise"] == pytest.approx(40, rel=0.1)
    assert np.isnan(numbers["at_samples"])
    assert numbers["at_seconds"] == numbers["last"]
    assert numbers["dot_error"] == pytest.approx(1.5)
    assert num_envs.noise_scale_of([numbers, numbers | {"dot": 10.25}]) == "6"
    assert num_envs.noise_scale_of([numbers, numbers | {"dot": 4.25}]) == "> 8"  # 32.5 / (2 + 2 * 1.06)


def test_noise_of_a_curve():
    """That of white noise around a trend, whatever the trend."""
    rng = np.random.default_rng(1)
    trend = np.linspace(-300, 4000, 3000)
    assert num_envs.noise_of_curve(trend) == pytest.approx(0, abs=1e-9)
    assert num_envs.noise_of_curve(trend + rng.normal(0, 50, 3000)) == pytest.approx(50, rel=0.05)


STUDY = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from benchmark import num_envs
num_envs.SECONDS, num_envs.POINTS, num_envs.EPISODES = 1.5, 3, 2
flags_of = num_envs.flags_of
num_envs.flags_of = lambda regime, n: flags_of(regime, n) | ({"total_timesteps": 4096} if regime == "e" else {})
args = num_envs.Args(env_ids=("Hopper-v5",), regimes=(sys.argv[2],), numbers=(64,), seeds=(1,), runs=Path("runs"))
for run in num_envs.all_runs(args):
    print(num_envs.work_on(run), num_envs.returns_of(run))
"""


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["a", "e"])
def test_runs_of_the_study(regime):
    """One that is cut, one that ends by itself with first episodes cut; both measured."""
    command = [sys.executable, "-c", STUDY, ROOT, regime]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 1
    (path,) = Path("runs/num_envs").iterdir()
    numbers = json.loads((path / "done.json").read_text())
    curve = json.loads((path / "curve.json").read_text())
    assert [point[0] for point in curve] == sorted({point[0] for point in curve})
    assert numbers["steps"] == curve[-1][0]
    assert 0.05 < numbers["share_of_environments"] < 1 - numbers["share_of_update"]
    assert all(g["policy_trace"] > 0 for g in numbers["gradients"])
    if regime == "a":
        assert numbers["steps"] < numbers["total_timesteps"]
        assert 1.5 <= numbers["seconds"] < 10
    else:
        assert 3500 < numbers["steps"] <= 4096


def curve(returns, lengths, name="", seed=1, env="HalfCheetah-v4") -> plot.Curve:
    """A run of points 10,000 steps and a minute apart."""
    n = len(returns)
    steps, seconds = 10_000.0 * np.arange(1, n + 1), 60.0 * np.arange(1, n + 1)
    notes = {"episodic_return": returns[-1]}
    columns = steps, seconds, np.array(returns, float), np.broadcast_to(lengths, n)
    return plot.Curve("ppo_continuous_action", env, name, seed, *columns, notes)


def test_time_to_score():
    """The mean of the last 100 episodes, of which a point has 10 or 1,000 here."""
    slow = curve([0] * 10 + [2000] * 10, 1000)
    assert plot.first_reached(slow, 1000) == (15, 150_000)
    assert plot.first_reached(slow, 2001) is None
    assert plot.first_reached(curve([2000] * 9, 1000), 1000) is None  # 90 episodes
    quick = curve([0] * 10 + [2000] * 10, 10)
    assert plot.first_reached(quick, 1000) == (11, 110_000)


def test_table_of_times(monkeypatch):
    """Seed 1 of each number of environments; one that does not get there, and one that was not run."""
    runs = [curve([0] * k + [1500] * 30, 1000, "1", seed) for seed, k in ((1, 9), (2, 5))]
    runs += [curve([0] * 2 + [1500] * 30, 100, "8"), curve([0] * 30, 100, "64")]
    monkeypatch.setattr(plot, "load", {"times": runs}.get)
    row = plot.table_of_times().splitlines()[-1]
    assert row == "| HalfCheetah-v4 | 1,442.6 | 19.0 min, 0.19M | 3.0 min, 0.03M |  | not reached |  |"


def test_ablations(monkeypatch, tmp_path):
    """Beside the runs with all details, whose mean is the measure; where seeds are missing, the others count."""
    runs = [curve([500 + k], 1000, "without D07", seed=k) for k in (1, 2, 3)]
    runs += [curve([1000 + k], 1000, "all details", seed=k) for k in (1, 2, 3)]
    both = [*runs, *(curve([30.0], 10, name, env="CartPole-v1") for name in ("all details", "without D07"))]
    monkeypatch.setattr(plot, "load", lambda plan: both)
    assert plot.table_of_ablations().splitlines()[0] == "| | HalfCheetah-v4 | CartPole-v1 |"
    monkeypatch.setattr(plot, "load", lambda plan: runs)
    monkeypatch.setattr(plot, "FIGURES", tmp_path)
    assert plot.table_of_ablations().splitlines()[2:] == [
        "| all details | 1,002 ± 1 |",
        "| without D07 | 502.0 ± 0.8 |",
    ]
    monkeypatch.setattr(plot, "load", lambda plan: both)
    plot.draw_ablations()
    assert (tmp_path / "ablations.png").stat().st_size > 5000


def test_figures_are_drawn(monkeypatch, tmp_path):
    """From the results that are there."""
    monkeypatch.setattr(plot, "FIGURES", tmp_path)
    plot.draw_curves("classic", "title")
    num_envs.draw("HalfCheetah-v5", "num_envs", num_envs.load_numbers(plot.RESULTS)["HalfCheetah-v5"])
    for name in ("classic", "num_envs"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert os.path.getsize(tmp_path / f"{name}.svg") > 10_000
