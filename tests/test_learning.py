"""Trained from start to end: probes with known values, and CartPole."""

import numpy as np
import pytest
import torch
from helpers import IMAGE, MULTI, VECTOR, continuous, frames, images, make_args, recurrent, value

GAMMA, LAMBDA = 0.9, 0.95
LSTM = "ppo_atari_lstm"
# Where rows go through convolutions: fewer of them (whole episodes of 9), and a discount that needs fewer.
# The value of an LSTM learns more slowly, and at the rate that it needs, that of others swings by more than 2 %.
SMALL = {"gamma": 0.8, "num_envs": 4, "num_steps": 36, "anneal_lr": True, "torch_threads": 1}
SMALL |= {"total_timesteps": 4 * 36 * 16}


def value_of(script, env, obs, **changes):
    """The value of observations `obs` (n, D), each at the start of an episode, after learning."""
    flags = {"num_envs": 16, "num_steps": 64, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 3e-3}
    flags |= {"gamma": GAMMA, "gae_lambda": LAMBDA, "clip_vloss": False, "anneal_lr": False}
    flags["total_timesteps"] = 60_000
    result = script.train(make_args(script, env, **(flags | changes)))
    agent = script.load_agent(result["checkpoint"])
    with torch.no_grad():
        return value(script, agent, agent.normalize(frames(script, obs))).numpy(), result


ONE = np.ones((1, 1))


@pytest.mark.scripts(*VECTOR, *MULTI)
def test_time_limits_bootstrap(script):
    """1 / (1 - 0.9): time limits do not exist for the value function. 9.67, 3.87 and 3.71 are known mistakes."""
    values, _ = value_of(script, "Const", ONE)
    assert values[0] == pytest.approx(10.0, rel=0.02)


@pytest.mark.scripts("ppo_continuous_action", "ppo_multidiscrete_mask")  # gae() is the same in all
def test_terminations_end_the_value(script):
    """All states look the same, so the value is the mean over an episode's 8 lambda-returns: 3.71."""
    values, _ = value_of(script, "Both", ONE)
    assert values[0] == pytest.approx(3.71, rel=0.02)


@pytest.mark.scripts("ppo")  # evaluate_rollout() is the same in all that have the flag
def test_time_limits_as_death(script):
    """--no-bootstrap-truncation: as baselines, a time limit is a termination."""
    values, _ = value_of(script, "Const", ONE, bootstrap_truncation=False)
    assert values[0] == pytest.approx(3.71, rel=0.02)


@pytest.mark.scripts("ppo_atari")
def test_time_limits_bootstrap_with_images(script):
    """1 / (1 - 0.8)."""
    values, _ = value_of(script, "Const", ONE, learning_rate=3e-4, **SMALL)
    assert values[0] == pytest.approx(5.0, rel=0.02)


@pytest.mark.scripts(*IMAGE)
def test_terminations_end_the_value_of_images(script):
    """An LSTM knows the 8 steps apart, and this is the value of the first; others have one value for all of them."""
    values, _ = value_of(script, "Both", ONE, learning_rate=1e-3 if recurrent(script) else 3e-4, **SMALL)
    memoryless = 2.967  # where the mean of the 8 lambda-returns is the value itself
    assert values[0] == pytest.approx((1 - 0.8**8) / 0.2 if recurrent(script) else memoryless, rel=0.03)


@pytest.mark.scripts(LSTM)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "iterations", "low", "high"), [("Recall", 40, 0.9, 1.0), ("Leak", 18, 0.3, 0.7)]
)
def test_memory(script, env, iterations, low, high):
    """It holds what an episode showed 3 steps ago (0.5 without), and nothing of the episode before (1.0 with that)."""
    flags = {"num_envs": 16, "num_steps": 20, "num_minibatches": 4, "update_epochs": 4, "gamma": GAMMA}
    flags |= {"learning_rate": 7e-4, "ent_coef": 0.0, "torch_threads": 1, "total_timesteps": 320 * iterations}
    assert low <= script.train(make_args(script, env, **flags))["episodic_return"] <= high


@pytest.mark.scripts(*VECTOR, *MULTI)
def test_values_along_an_episode(script):
    """A clock with reward 1 at its end, after 5 steps: 0.9^4, 0.9^3, ... 1."""
    values, _ = value_of(script, "Clock", np.eye(6)[:5], anneal_lr=True)
    assert values == pytest.approx(GAMMA ** np.arange(4, -1, -1), rel=0.03)


@pytest.mark.scripts(*VECTOR, *MULTI)
def test_fillers_teach_nothing(script):
    """Only fillers show the clock's last observation: the weights of that input never move."""
    args = make_args(script, "Clock", total_timesteps=20_000, learning_rate=3e-3)
    _, fresh, _ = script.build(args, 0, torch.device("cpu"), None, 0)
    trained = script.load_agent(script.train(args)["checkpoint"])
    for (name, before), after in zip(fresh.named_parameters(), trained.parameters(), strict=True):
        if before.ndim == 2 and before.shape[1] == 6:
            assert torch.equal(before[:, 5], after[:, 5]), name
            assert not torch.equal(before[:, :5], after[:, :5]), name


def test_actions_follow_observations(script):
    """One step per episode; the action that agrees with the sign of the observation pays 1."""
    flags = {"num_envs": 8, "num_steps": 64, "learning_rate": 3e-3, "total_timesteps": 40_000}
    if images(script):
        flags |= {"learning_rate": 1e-3, "total_timesteps": 512 * 12}
    result = script.train(make_args(script, "Contextual", eval_episodes=50, **flags))
    assert np.mean(result["eval_returns"]) == 1.0


@pytest.mark.scripts("ppo_continuous_action")
def test_values_with_normalizers(script):
    """The value in units of the reward's scale: 10 / std."""
    values, result = value_of(script, "Const", ONE, norm_obs=True, norm_reward=True)
    std = script.load_agent(result["checkpoint"]).return_moments.std
    assert values[0] == pytest.approx(10.0 / std, rel=0.05)


@pytest.mark.scripts("ppo")
@pytest.mark.slow
def test_cartpole_is_solved(script):
    """With the defaults: the last 100 episodes of training at least 475 on average."""
    result = script.train(script.Args(total_timesteps=300_000, eval_episodes=5))
    assert result["episodic_return"] >= 475
    assert np.mean(result["eval_returns"]) >= 475


@pytest.mark.scripts("ppo")
@pytest.mark.slow
def test_cartpole_is_solved_by_4096_environments(script):
    result = script.train(script.Args(num_envs=4096, eval_episodes=20))
    assert np.mean(result["eval_returns"]) >= 475


@pytest.mark.scripts("ppo_shared")
@pytest.mark.slow
def test_cartpole_is_learned_by_a_shared_network(script):
    """Slower than with separate networks: the value's errors pull at the trunk of the policy."""
    result = script.train(script.Args(total_timesteps=150_000, eval_episodes=20))
    assert np.mean(result["eval_returns"]) >= 150  # 230, 296 and 348 with seeds 1, 2 and 3; 22 at random


@pytest.mark.scripts("ppo_continuous_action")
@pytest.mark.slow
def test_pendulum_gets_better(script):
    """InvertedPendulum balances for its whole time limit within 100,000 steps."""
    args = script.Args(env_id="InvertedPendulum-v5", num_envs=8, total_timesteps=100_000, eval_episodes=10)
    assert np.mean(script.train(args)["eval_returns"]) >= 900


def test_continuous_is_told_apart(script):
    assert continuous(script) == ("continuous" in script.__name__)
