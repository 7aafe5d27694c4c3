"""Details of continuous control: D23 to D31."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import build, make_args, recorded
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

pytestmark = pytest.mark.scripts("ppo_continuous_action")


def batch_of(script, obs, actions):
    return script.Rollout(obs=obs, actions=actions, valid=torch.ones(len(obs)))


def agent_for(script, name="asymmetric", **changes):
    _, envs, agent, _ = build(script, env_id=f"probe_envs:Act_{name}-v0", **changes)
    envs.close()
    return agent


def test_d23_continuous_actions_via_normal_distributions(script):
    """Log-probability and entropy against the closed form, from torch's own Normal."""
    agent = agent_for(script)
    obs, actions = torch.randn(6, 1), torch.randn(6, 2)
    with torch.no_grad():
        agent.log_std.copy_(torch.tensor([0.3, -1.2]))
    logprobs, entropy, _ = agent.evaluate_actions(batch_of(script, obs, actions))
    normal = torch.distributions.Normal(agent.actor(obs), agent.log_std.exp())
    assert torch.allclose(logprobs, normal.log_prob(actions).sum(-1), atol=1e-5)
    assert torch.allclose(entropy, normal.entropy().sum(-1), atol=1e-5)


def test_d23_samples_have_the_stated_mean_and_spread(script):
    agent = agent_for(script)
    with torch.no_grad():
        agent.log_std.copy_(torch.tensor([0.3, -1.2]))
        agent.actor[-1].bias.copy_(torch.tensor([2.0, -1.0]))
    torch.manual_seed(0)
    obs = torch.ones(50_000, 1)
    actions = agent.act(obs)
    mean = agent.act(obs[:1], deterministic=True)[0]
    assert torch.allclose(actions.mean(0), mean, atol=0.02)
    assert torch.allclose(actions.std(0), agent.log_std.exp(), rtol=0.02)


def test_d24_state_independent_log_standard_deviation(script):
    """One parameter per component, 0 at the start; entropies are the same in all states."""
    agent = agent_for(script)
    assert agent.log_std.shape == (2,)
    assert agent.log_std.tolist() == [0, 0]
    assert any(p is agent.log_std for p in agent.parameters())
    _, entropy, _ = agent.evaluate_actions(batch_of(script, torch.randn(9, 1), torch.randn(9, 2)))
    assert entropy.unique().numel() == 1


@pytest.mark.parametrize("log_std", [-1e6, 1e6])
def test_d24_extreme_log_std_stays_finite(script, log_std):
    agent = agent_for(script)
    with torch.no_grad():
        agent.log_std.fill_(log_std)
    obs = torch.ones(4, 1)
    actions = agent.act(obs)
    outputs = agent.evaluate_actions(batch_of(script, obs, actions + 1))
    assert all(torch.isfinite(x).all() for x in (actions, *outputs))


def test_d25_independent_action_components(script):
    """Joint log-probability and entropy are the sums of those of one component alone."""
    agent = agent_for(script)
    obs, actions = torch.randn(5, 1), torch.randn(5, 2)
    joint, entropy, _ = agent.evaluate_actions(batch_of(script, obs, actions))
    means = agent.actor(obs)
    parts = -0.5 * (actions - means) ** 2 - 0.5 * math.log(2 * math.pi)
    assert torch.allclose(joint, parts[:, 0] + parts[:, 1], atol=1e-6)
    assert entropy[0].item() == pytest.approx(2 * 0.5 * math.log(2 * math.pi * math.e))


def test_d26_separate_mlp_networks_for_continuous_control(script):
    """The value's loss leaves the actor alone."""
    agent = agent_for(script)
    agent.get_value(torch.randn(3, 1)).sum().backward()
    assert not any(p.grad is not None and p.grad.any() for p in agent.actor.parameters())
    assert all(p.grad.any() for p in agent.critic.parameters())


def test_d27_action_clipping_and_storage(script):
    """The rollout holds samples outside the limits, with their own log-probability; the environment gets legal ones."""
    args, envs, agent, _ = build(script, env_id="probe_envs:Act_asymmetric-v0", num_envs=8, num_steps=64)
    sent = []
    step = envs.env.step
    envs.env.step = lambda actions: sent.append(actions) or step(actions)
    batch = script.rollout(agent, envs, args)
    sent = np.stack(sent)
    low, high = np.array([0, -5], np.float32), np.array([3, 10], np.float32)
    assert ((batch.actions.numpy() < low) | (batch.actions.numpy() > high)).any()
    assert (sent >= low).all()
    assert (sent <= high).all()
    assert np.array_equal(sent, np.clip(batch.actions.numpy(), low, high))


@pytest.mark.parametrize("name", ["float64", "unbounded", "half", "matrix", "scalar"])
def test_d27_shape_and_dtype_of_the_space(script, name):
    agent = agent_for(script, name)
    space = gym.make(f"probe_envs:Act_{name}-v0").action_space
    actions = agent.env_actions(torch.randn(7, *agent.action_shape) * 100)
    assert all(space.contains(np.asarray(action)) for action in actions)


def moments(agent):
    return agent.obs_moments.mean.numpy(), (agent.obs_moments.m2 / agent.obs_moments.count).numpy()


def test_d28_normalization_of_observation(script):
    """Mean and variance of all real rows over all environments, fillers left out."""
    _args, envs, agent, _ = build(script, "Noise", num_envs=8, num_steps=200, norm_obs=True)
    rows = []
    for _ in range(200):
        rows.append(envs.obs[~envs.fillers])
        valid = (~envs.fillers).astype(np.float32)
        agent.observe(envs.obs, valid)
        envs.step(np.zeros((8, 1), np.float32))
    rows = np.concatenate(rows)
    mean, variance = moments(agent)
    assert agent.obs_moments.count.item() == pytest.approx(len(rows), abs=0.01)
    assert mean == pytest.approx(rows.mean(0), abs=1e-5)
    assert variance == pytest.approx(rows.var(0), rel=1e-5)


def test_d28_rollout_sees_each_real_row_once(script):
    args, envs, agent, _ = build(script, "Clock", num_envs=2, num_steps=12, norm_obs=True)
    valid = sum(script.rollout(agent, envs, args).valid.sum().item() for _ in range(3))
    assert agent.obs_moments.count.item() == pytest.approx(valid, abs=0.01)


def test_d28_numbers_far_from_zero(script):
    """Differences of 1 around a billion survive: no sums of squares of raw numbers."""
    moments = script.RunningMoments((1,), None)
    rng = np.random.default_rng(0)
    rows = 1e9 + rng.normal(size=(1000, 1))
    for chunk in np.split(rows, 100):
        moments.update(chunk, np.ones(10))
    assert moments.std[0] == pytest.approx(rows.std(), rel=1e-3)


def test_d28_normalize_never_updates(script):
    agent = agent_for(script, norm_obs=True)
    before = agent.state_dict()["obs_moments.mean"].clone()
    agent.normalize(np.full((5, 1), 7.0))
    assert torch.equal(agent.obs_moments.mean, before)


def test_d28_freeze_after_normalizer_samples(script):
    _, _envs, agent, _ = build(
        script, "Noise", num_envs=5, norm_obs=True, norm_reward=True, normalizer_samples=20
    )
    valid = np.ones(5)
    for i in range(10):
        agent.observe(np.full((5, 1), float(i)), valid)
        agent.scale_rewards(np.full(5, float(i)), np.zeros(5), valid)
    assert agent.obs_moments.count.item() == agent.return_moments.count.item() == pytest.approx(20, abs=0.01)
    assert agent.obs_moments.mean.item() == pytest.approx(1.5, abs=0.01)


def test_d28_off(script):
    agent = agent_for(script, norm_obs=False)
    raw = np.array([[123.0], [-5.0]])
    assert agent.observe(raw, np.ones(2)).numpy() == pytest.approx(raw)


class Recorded(gym.Env):
    """Replays the rows of one environment, for stable-baselines3."""

    observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (3,)), gym.spaces.Box(-1, 1, (1,))

    def __init__(self, obs, rewards, dones):
        self.rows, self.t = (obs, rewards, dones), 0

    def reset(self, *, seed=None, options=None):
        return self.rows[0][self.t].astype(np.float32), {}

    def step(self, action):
        obs, rewards, dones = self.rows
        self.t += 1
        return obs[self.t].astype(np.float32), rewards[self.t - 1], bool(dones[self.t - 1]), False, {}


def test_d28_to_d31_against_stable_baselines3(script):
    """VecNormalize on the same stream. It resets within a step, so that no row is a filler there."""
    T, N, rng = 300, 3, np.random.default_rng(0)
    obs = rng.normal(3, 20, size=(T + 1, N, 3)).astype(np.float32)
    rewards, dones = rng.normal(1, 5, size=(T, N)), rng.random((T, N)) < 0.05
    envs = DummyVecEnv([lambda i=i: Recorded(obs[:, i], rewards[:, i], dones[:, i]) for i in range(N)])
    reference = VecNormalize(envs, gamma=0.99)
    agent = agent_for(script, norm_obs=True, norm_reward=True, num_envs=N, num_minibatches=1)
    agent.obs_moments = script.RunningMoments((3,), None)
    theirs, valid = reference.reset(), np.ones(N)
    for t in range(T):
        assert agent.observe(obs[t], valid).numpy() == pytest.approx(theirs, abs=1e-3)
        theirs, their_rewards, _, _ = reference.step(np.zeros((N, 1)))
        done = dones[t].astype(np.float32)
        ours = agent.scale_rewards(rewards[t], done, valid)
        assert ours == pytest.approx(their_rewards, abs=1e-3)


def test_d29_observation_clipping(script):
    agent = agent_for(script, norm_obs=True)
    for _ in range(50):
        agent.observe(np.random.default_rng(0).normal(size=(10, 1)), np.ones(10))
    assert agent.normalize(np.array([[1e6], [-1e6]])).tolist() == [[10], [-10]]


def test_d30_reward_scaling(script):
    """By the spread of the discounted return, which an episode's end of either kind resets; no mean is subtracted."""
    args, envs, agent, _ = build(script, "Const", num_envs=4, num_steps=90, norm_reward=True)
    batch = script.rollout(agent, envs, args)
    returns, total = [], 0.0
    for t in range(90):
        if batch.valid[t, 0]:
            total = total * args.gamma + 1.0
            returns += [total] * 4
        total *= 1 - batch.dones[t, 0].item()
    assert max(returns) < 8  # episodes of 8 steps, ended by their time limit
    assert agent.return_moments.std == pytest.approx(np.std(returns), rel=1e-3)
    last = batch.rewards[-1, 0].item()
    assert batch.valid[-1, 0] == 1 or last == 0
    assert batch.rewards[-2, 0].item() == pytest.approx(1 / np.std(returns), rel=0.05)


def test_d30_off(script):
    _, _, _, batch = recorded(script, "Score", norm_reward=False)
    assert batch.rewards.max() == 100


def test_d31_reward_clipping(script):
    agent = agent_for(script, norm_reward=True, num_envs=2, num_minibatches=1)
    for _ in range(1000):
        agent.scale_rewards(np.array([0.1, -0.1]), np.zeros(2), np.ones(2))
    scaled = agent.scale_rewards(np.array([1e9, -1e9]), np.zeros(2), np.zeros(2))
    assert scaled.tolist() == [10, -10]


def test_normalizers_are_saved_with_the_agent(script):
    result = script.train(make_args(script, "Noise", norm_obs=True, norm_reward=True))
    agent = script.load_agent(result["checkpoint"])
    assert agent.obs_moments.count > 100
    assert agent.normalize(np.zeros((1, 1))).item() != 0
