"""Each detail of the algorithm by its behavior; test names start with the tag, as the comments in the scripts do."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import (
    MULTI,
    VECTOR,
    act,
    brute_force_gae,
    build,
    continuous,
    frames,
    images,
    loss_of,
    make_args,
    make_batch,
    multi,
    only_run,
    recorded,
    rollout,
    scalars,
    value_of_next,
    vectors,
)
from stable_baselines3.common.buffers import RolloutBuffer
from torch import nn

GAMMA, LAMBDA = 0.9, 0.95
ROW_BY_ROW = [*VECTOR, *MULTI, "ppo_atari"]  # those whose minibatches are of single rows


# ---- rollout ----
def test_d01_vectorized_architecture(script):
    """A second rollout starts where the first stopped, in episodes longer than T."""
    args, envs, agent, _ = build(script, "Clock", num_steps=4, num_minibatches=1)
    first = rollout(script, agent, envs, args)
    second = rollout(script, agent, envs, args, first)
    assert first.obs.shape == (4, 4, *agent.obs_shape)
    clock = vectors(script, torch.cat([first.obs, second.obs]), 6).argmax(-1)[:, 0].tolist()
    assert clock == [0, 1, 2, 3, 4, 5, 0, 1]
    assert torch.equal(first.next_obs, second.obs[0])


def test_d01_rows_say_what_happened(script):
    """Row t holds obs[t], the reward of its action, and whether it ended the episode; the row after that is a filler."""
    args, envs, agent, _ = build(script, "Clock", num_steps=8, num_minibatches=1)
    batch = rollout(script, agent, envs, args)
    assert vectors(script, batch.obs, 6).argmax(-1)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert batch.rewards[:, 0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert batch.terminations[:, 0].tolist() == batch.dones[:, 0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert batch.valid[:, 0].tolist() == [1, 1, 1, 1, 1, 0, 1, 1]


def test_d01_filler_at_the_start_of_a_rollout(script):
    """valid[0] continues from the rollout before."""
    args, envs, agent, _ = build(script, "Clock", num_steps=5, num_minibatches=1)
    first = rollout(script, agent, envs, args)
    second = rollout(script, agent, envs, args, first)
    assert first.valid.min() == 1
    assert second.valid[:, 0].tolist() == [0, 1, 1, 1, 1]


def test_d01_time_limits_are_no_terminations(script):
    args, envs, agent, _ = build(script, "Const", num_steps=9, num_minibatches=1)
    batch = rollout(script, agent, envs, args)
    assert batch.terminations.sum() == 0
    assert batch.dones[:, 0].tolist() == [0] * 7 + [1, 0]


def test_d01_environments_start_differently(script):
    args, envs, agent, _ = build(script, "Noise", num_envs=6, num_minibatches=1)
    first = vectors(script, rollout(script, agent, envs, args).obs[0], 1).flatten().tolist()
    assert len(set(first)) == 6


# ---- networks and optimizer ----
@pytest.mark.scripts(*VECTOR, *MULTI)
def test_d02_orthogonal_initialization_and_constant_biases(script):
    _, _, agent, _ = build(script, "Clock")
    gains = []
    for layer in (m for m in agent.modules() if isinstance(m, nn.Linear)):
        weight = layer.weight if layer.out_features <= layer.in_features else layer.weight.T
        gram = weight @ weight.T
        gain = gram.diagonal().mean().sqrt().item()
        assert torch.allclose(gram, gain**2 * torch.eye(len(gram)), atol=1e-5)
        assert layer.bias.abs().max() == 0
        expected = 1.0 if layer.out_features == 1 and gain > 0.5 else 0.01 if gain < 0.5 else math.sqrt(2)
        assert gain == pytest.approx(expected, rel=1e-4)
        gains.append(round(gain, 2))
    hidden = 2 if script.__name__ == "ppo_shared" else 4
    assert sorted(gains) == [0.01, 1.0] + [1.41] * hidden


def test_d03_adam_epsilon(script):
    _, _, agent, optimizer = build(script)
    assert optimizer.defaults["eps"] == 1e-5
    assert sum(p.numel() for p in optimizer.param_groups[0]["params"]) == sum(
        p.numel() for p in agent.parameters()
    )


def test_d04_adam_learning_rate_annealing(script):
    script.train(make_args(script, total_timesteps=48 * 5, learning_rate=1e-3))
    rates = [value for _, value in scalars(only_run())["charts/learning_rate"]]
    assert rates == pytest.approx([1e-3, 8e-4, 6e-4, 4e-4, 2e-4])


def test_d04_the_optimizer_takes_the_annealed_rate(script, monkeypatch):
    rates, update = [], script.update

    def spy(agent, optimizer, *rest):
        rates.append(optimizer.param_groups[0]["lr"])
        return update(agent, optimizer, *rest)

    monkeypatch.setattr(script, "update", spy)
    script.train(make_args(script, total_timesteps=48 * 4))
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    rates.clear()
    script.train(make_args(script, total_timesteps=48 * 2, anneal_lr=False))
    assert rates == [1e-3, 1e-3]


def test_a1_clip_range_annealing(script, monkeypatch):
    ranges, update = [], script.update

    def spy(agent, optimizer, batch, args, clip_coef, gradient_fn):
        ranges.append(clip_coef)
        return update(agent, optimizer, batch, args, clip_coef, gradient_fn)

    monkeypatch.setattr(script, "update", spy)
    script.train(make_args(script, total_timesteps=48 * 4, anneal_clip=True))
    assert ranges == pytest.approx([0.2, 0.15, 0.1, 0.05])
    ranges.clear()
    script.train(make_args(script, total_timesteps=48 * 2))
    assert ranges == [0.2, 0.2]


# ---- advantages ----
def random_rollout(seed, T=40, N=7):
    """rewards, values, terminations, dones with ends of both kinds, as float64 arrays."""
    rng = np.random.default_rng(seed)
    terminations = rng.random((T, N)) < 0.1
    dones = terminations | (rng.random((T, N)) < 0.1)
    return rng.normal(size=(T, N)), rng.normal(size=(T + 1, N)), terminations * 1.0, dones * 1.0


def gae(script, rewards, values, terminations, dones, gamma=GAMMA, lam=LAMBDA):
    arrays = (torch.tensor(np.asarray(x, dtype=np.float64)) for x in (rewards, values, terminations, dones))
    return [x.numpy() for x in script.gae(*arrays, gamma, lam)]


def column(*numbers):
    return np.array(numbers, dtype=float)[:, None]


def test_d05_by_hand(script):
    """Three steps, the second one ends the episode; gamma 0.5, lambda 0.5."""
    rewards, values, none, end = column(1, 2, 3), column(10, 20, 30, 40), column(0, 0, 0), column(0, 1, 0)
    terminated, returns = gae(script, rewards, values, end, end, 0.5, 0.5)
    # deltas: 1 + 10 - 10 = 1; 2 + 0 - 20 = -18; 3 + 20 - 30 = -7
    assert terminated[:, 0] == pytest.approx([1 - 0.25 * 18, -18, -7])
    assert returns[:, 0] == pytest.approx([6.5, 2, 23])
    truncated, _ = gae(script, rewards, values, none, end, 0.5, 0.5)
    # the second delta keeps the value of what was cut off: 2 + 15 - 20 = -3
    assert truncated[:, 0] == pytest.approx([1 - 0.25 * 3, -3, -7])


def test_d05_by_brute_force(script):
    for seed in range(5):
        rollout = random_rollout(seed)
        advantages, returns = gae(script, *rollout)
        assert advantages == pytest.approx(brute_force_gae(*rollout, GAMMA, LAMBDA))
        assert returns == pytest.approx(advantages + rollout[1][:-1])


def test_d05_against_stable_baselines3(script):
    """Its buffer knows dones alone; a termination leaves nothing of the value that follows."""
    from gymnasium import spaces

    rewards, values, _, dones = random_rollout(0)
    T, N = rewards.shape
    buffer = RolloutBuffer(T, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), "cpu", LAMBDA, GAMMA, n_envs=N)
    starts = np.concatenate([np.zeros((1, N)), dones[:-1]])
    for t in range(T):
        log_prob = torch.zeros(N)
        buffer.add(
            np.zeros((N, 1)), np.zeros((N, 1)), rewards[t], starts[t], torch.tensor(values[t]), log_prob
        )
    buffer.compute_returns_and_advantage(torch.tensor(values[-1]), dones[-1])
    advantages, returns = gae(script, rewards, values, dones, dones)
    assert advantages == pytest.approx(buffer.advantages, abs=1e-5)
    assert returns == pytest.approx(buffer.returns, abs=1e-5)


def test_d05_lambda_1_is_monte_carlo(script):
    """Without ends inside, returns are the discounted rewards plus the bootstrap."""
    rewards, values, none, _ = random_rollout(1)
    none = np.zeros_like(none)
    _, returns = gae(script, rewards, values, none, none, GAMMA, 1.0)
    T = len(rewards)
    expected = sum(GAMMA**k * rewards[k] for k in range(T)) + GAMMA**T * values[T]
    assert returns[0] == pytest.approx(expected)


def test_d05_truncation_bootstraps_with_the_last_observation(script):
    """In a rollout, the delta of a truncated step uses the value of the filler's observation, its true successor."""
    args, _, _, batch = recorded(script, "Const", num_steps=12)
    assert batch.dones[7].min() == 1
    assert batch.terminations.max() == batch.valid[8].max() == 0
    delta = batch.rewards[7] + args.gamma * batch.values[8] - batch.values[7]
    assert torch.allclose(batch.advantages[7], delta, atol=1e-6)


def test_d05_no_bootstrap_truncation(script):
    _, _, _, batch = recorded(script, "Const", num_steps=12, bootstrap_truncation=False)
    assert torch.allclose(batch.advantages[7], batch.rewards[7] - batch.values[7], atol=1e-6)


def test_d05_termination_wins_over_truncation(script):
    _, _, _, batch = recorded(script, "Both", num_steps=12)
    assert batch.terminations[7].min() == 1
    assert torch.allclose(batch.advantages[7], batch.rewards[7] - batch.values[7], atol=1e-6)


def test_d05_bootstrap_at_the_end_of_the_rollout(script):
    args, agent, _, batch = recorded(script, "Const", num_steps=5, num_minibatches=1)
    delta = batch.rewards[-1] + args.gamma * value_of_next(script, agent, batch) - batch.values[-1]
    assert torch.allclose(batch.advantages[-1], delta, atol=1e-6)


# ---- the loss ----
def test_d07_normalization_of_advantages(script):
    """Over real rows: mean 0, standard deviation 1 as numpy computes it. The gradient by logprobs shows them."""
    advantages, valid = np.array([3.0, -1.0, 4.0, 1.0, 1e6]), [1.0, 1, 1, 1, 0]
    loss, _, agent = loss_of(script, new=[0.0] * 5, advantages=advantages, valid=valid, norm_adv=True)
    loss.backward()
    normalized = -agent.outputs[0].grad.numpy() * 4
    real = advantages[:4]
    assert normalized[:4] == pytest.approx((real - real.mean()) / (real.std() + 1e-8))
    assert normalized[4] == 0


def test_d07_per_minibatch(script):
    """Each minibatch of an update is normalized by its own rows, whatever the batch looks like."""
    args, agent, optimizer, batch = recorded(script, "Noise")
    batch = batch._replace(advantages=torch.linspace(5, 9, batch.valid.numel()).view_as(batch.valid))
    seen = []

    def spy(agent, parameters, minibatch, clip_coef, args):
        leaf = torch.zeros_like(minibatch.logprobs, requires_grad=True)
        shifted = minibatch._replace(logprobs=minibatch.logprobs + leaf)
        script.ppo_loss(agent, shifted, clip_coef, args)[0].backward()
        real = minibatch.valid > 0
        adv = minibatch.advantages[real]
        expected = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
        seen.append((leaf.grad[real] * real.sum(), expected))
        return script.ppo_gradient(agent, parameters, minibatch, clip_coef, args)

    script.update(agent, optimizer, batch, args, 1e9, spy)
    for gradient, expected in seen[:1]:  # before the first step all ratios are 1
        assert torch.allclose(gradient, expected, atol=1e-3)
    assert len(seen) == args.update_epochs * args.num_minibatches


def test_d08_clipped_surrogate_objective(script):
    """Ratio 1.5 or 0.5, clip range 0.2: no gradient where moving on would pay, full gradient on the way back."""
    new, advantages = [math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)], [1.0, -1.0, 1.0, -1.0]
    loss, _, agent = loss_of(script, new=new, advantages=advantages)
    assert loss.item() == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8) / 4)
    loss.backward()
    assert agent.outputs[0].grad.tolist() == pytest.approx([0, 1.5 / 4, -0.5 / 4, 0])


def test_d09_value_function_loss_clipping(script):
    """Old values 0, returns 1: a value of 0.9 counts as 0.2, one of -0.9 as itself; half the mean of squares."""
    numbers = dict(new=[0.0, 0.0], values=[0.9, -0.9], old_values=[0.0, 0.0], returns=[1.0, 1.0], vf_coef=1.0)
    loss, debug, agent = loss_of(script, **numbers)
    expected = 0.5 * (0.8**2 + 1.9**2) / 2
    assert loss.item() == pytest.approx(expected)
    assert debug[1].item() == pytest.approx(expected)
    loss.backward()
    assert agent.outputs[2].grad.tolist() == pytest.approx([0, -1.9 / 2])
    loss, _, _ = loss_of(script, clip_vloss=False, **numbers)
    assert loss.item() == pytest.approx(0.5 * (0.1**2 + 1.9**2) / 2)


def test_d10_overall_loss_and_entropy_bonus(script):
    """policy - ent_coef * entropy + vf_coef * value."""
    numbers = dict(new=[0.0, 0.0], advantages=[1.0, 2.0], values=[0.1, 0.1], returns=[0.3, 0.3])
    loss, debug, _ = loss_of(script, ent_coef=0.1, vf_coef=0.5, **numbers)
    policy, value, entropy = debug[:3].tolist()
    assert (policy, value, entropy) == pytest.approx((-1.5, 0.5 * 0.2**2, 0.5))
    assert loss.item() == pytest.approx(policy - 0.1 * entropy + 0.5 * value)


def test_d12_debug_variables_of_one_minibatch(script):
    new, old, valid = np.array([0.1, -0.3, 0.05, 9.0]), np.array([0.0, 0.2, 0.1, 0.0]), [1.0, 1, 1, 0]
    _, debug, _ = loss_of(script, new=new, old=old, valid=valid)
    log_ratio = (new - old)[:3]
    assert debug[3].item() == pytest.approx(-log_ratio.mean())
    assert debug[4].item() == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean())
    assert debug[5].item() == pytest.approx((np.abs(np.exp(log_ratio) - 1) > 0.2).mean())


def test_d12_means_over_all_minibatches(script):
    args, agent, optimizer, batch = recorded(script)
    logged = []

    def spy(*inputs):
        gradient, debug = script.ppo_gradient(*inputs)
        logged.append(debug)
        return gradient, debug

    debug = script.update(agent, optimizer, batch, args, 0.2, spy)
    assert len(logged) == args.update_epochs * args.num_minibatches
    means = torch.stack(logged).mean(0).tolist()
    names = ["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
    assert [debug[f"losses/{name}"] for name in names] == pytest.approx(means)


def test_d12_explained_variance(script):
    """1 for a perfect value function, 0 for a constant one; fillers do not count."""
    args, agent, optimizer, batch = recorded(script, "Const")
    returns = torch.arange(batch.valid.numel(), dtype=torch.float32).view_as(batch.valid)
    wrong_fillers = returns + 1e3 * (1 - batch.valid)
    for values, expected in ((wrong_fillers, 1.0), (torch.zeros_like(returns), 0.0), (returns / 2, 0.75)):
        filled = batch._replace(returns=returns, values=values)
        debug = script.update(agent, optimizer, filled, args, 0.2)
        assert debug["losses/explained_variance"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.scripts(*VECTOR, *MULTI)
def test_d13_shared_and_separate_networks(script):
    """The policy's loss reaches a shared trunk; it leaves a separate critic alone."""
    _, agent, _, batch = recorded(script, "Clock")
    logprobs, _, _ = agent.evaluate_actions(batch)
    logprobs.sum().backward()
    reached = {
        name.split(".")[0] for name, p in agent.named_parameters() if p.grad is not None and p.grad.any()
    }
    assert "critic" not in reached
    assert ("trunk" in reached) == (script.__name__ == "ppo_shared")
    hidden = [m for m in agent.modules() if isinstance(m, nn.Linear) and m.out_features == 64]
    tanh = [m for m in agent.modules() if isinstance(m, nn.Tanh)]
    assert len(hidden) == len(tanh) == (2 if script.__name__ == "ppo_shared" else 4)


# ---- the update ----
def spied_rows(script, num_minibatches, epochs, num_steps=12):
    """Advantages, used as row numbers, of each minibatch that an update deals; and the number of rows."""
    args, agent, optimizer, batch = recorded(
        script, num_minibatches=num_minibatches, update_epochs=epochs, num_steps=num_steps
    )
    number = torch.arange(batch.valid.numel(), dtype=torch.float32)
    batch = batch._replace(advantages=number.view_as(batch.valid))
    dealt = []

    def spy(agent, parameters, minibatch, clip_coef, args):
        dealt.append(minibatch.advantages.int().tolist())
        return script.ppo_gradient(agent, parameters, minibatch, clip_coef, args)

    script.update(agent, optimizer, batch, args, 0.2, spy)
    return dealt, batch.valid.numel()


@pytest.mark.scripts(*ROW_BY_ROW)
def test_d06_mini_batch_updates(script):
    """Each row once per epoch, shuffled anew, in num_minibatches parts that are equal to within one row."""
    dealt, rows = spied_rows(script, num_minibatches=5, epochs=2)
    assert len(dealt) == 10
    assert {len(part) for part in dealt} == {rows // 5, rows // 5 + 1}
    epochs = [[row for part in dealt[i : i + 5] for row in part] for i in (0, 5)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(rows))
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])


@pytest.mark.scripts(*ROW_BY_ROW)
def test_d06_rows_stay_together(script):
    """All columns of a minibatch come from the same rows."""
    args, agent, optimizer, batch = recorded(script, "Noise", num_minibatches=4)

    def spy(agent, parameters, minibatch, clip_coef, args):
        for row in range(len(minibatch.valid)):
            t, n = divmod(int(minibatch.advantages[row]), batch.valid.shape[1])
            for column in ("obs", "actions", "valid", "logprobs", "values", "returns"):
                assert torch.equal(getattr(minibatch, column)[row], getattr(batch, column)[t, n]), column
        return script.ppo_gradient(agent, parameters, minibatch, clip_coef, args)

    batch = batch._replace(advantages=torch.arange(48.0).view_as(batch.valid))
    script.update(agent, optimizer, batch, args, 0.2, spy)


def test_d06_fillers_carry_no_weight(script):
    """Whatever fillers hold, the update is the same."""
    after = []
    for junk in (0.0, 1e4):
        torch.manual_seed(0)
        args, agent, optimizer, batch = recorded(script, "Clock", num_minibatches=1, update_epochs=1)
        assert batch.valid.min() == 0
        filler = (1 - batch.valid) * junk
        batch = batch._replace(advantages=batch.advantages + filler, returns=batch.returns - filler)
        torch.manual_seed(0)
        script.update(agent, optimizer, batch, args, 0.2)
        after.append(torch.cat([p.detach().flatten() for p in agent.parameters()]))
    assert torch.allclose(*after, atol=1e-7)


def test_d06_only_fillers_is_a_zero_step(script):
    args, agent, optimizer, batch = recorded(script)
    before = [p.clone() for p in agent.parameters()]
    debug = script.update(agent, optimizer, batch._replace(valid=torch.zeros_like(batch.valid)), args, 0.2)
    assert all(torch.equal(p, q) for p, q in zip(agent.parameters(), before, strict=True))
    assert debug["losses/policy_loss"] == debug["losses/grad_norm"] == 0


def test_d11_global_gradient_clipping(script):
    """One L2 norm over all parameters, at most 0.5 after clipping; the log has the norm before it."""
    args, agent, optimizer, batch = recorded(script, num_minibatches=1, update_epochs=1)
    batch = batch._replace(returns=batch.returns + 100)
    debug = script.update(agent, optimizer, batch, args, 0.2)
    norm = optimizer.param_groups[0]["params"][0].grad.norm().item()
    assert norm == pytest.approx(0.5, rel=1e-4)
    assert debug["losses/grad_norm"] > 1


def test_d11_one_vector_of_parameters_equals_separate_ones(script):
    """PyTorch's own clipping and Adam over the separate parameters lead to the same weights."""
    args, agent, optimizer, batch = recorded(script, "Noise", num_minibatches=2, learning_rate=1e-3)
    batch = batch._replace(returns=batch.returns + 100)
    separate = copy.deepcopy(agent)
    oracle = torch.optim.Adam(separate.parameters(), lr=optimizer.param_groups[0]["lr"], eps=1e-5)

    def spy(agent, parameters, minibatch, clip_coef, args):
        oracle.zero_grad()
        script.ppo_loss(separate, minibatch, clip_coef, args)[0].backward()
        nn.utils.clip_grad_norm_(separate.parameters(), args.max_grad_norm)
        oracle.step()
        return script.ppo_gradient(agent, parameters, minibatch, clip_coef, args)

    before = nn.utils.parameters_to_vector(agent.parameters())
    script.update(agent, optimizer, batch, args, 0.2, spy)
    ours, theirs = (nn.utils.parameters_to_vector(each.parameters()) for each in (agent, separate))
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert (ours - before).abs().max() > 5e-4


def test_a3_early_stopping_of_the_policy_optimizations(script):
    """The step of the first minibatch whose KL exceeds the target is not taken, and all epochs end there."""
    args, agent, optimizer, batch = recorded(script, "Noise", target_kl=0.02, update_epochs=50)
    kls, weights = [], []

    def spy(agent, *rest):
        weights.append([p.detach().clone() for p in agent.parameters()])
        gradient, debug = script.ppo_gradient(agent, *rest)
        debug[4] = 0.003 * (len(kls) + 1)  # 0.018 is still fine, 0.021 is not
        kls.append(debug[4].item())
        return gradient, debug

    debug = script.update(agent, optimizer, batch, args, 0.2, spy)
    assert len(kls) == 7
    assert debug["losses/gradient_steps"] == 6
    assert all(torch.equal(p, q) for p, q in zip(agent.parameters(), weights[-1], strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(agent.parameters(), weights[-2], strict=True))


def test_ratio_is_1_on_the_first_minibatch(script):
    """Acting, evaluating and learning agree, with more environments than steps and the other way round."""
    for num_envs, num_steps in ((4, 24), (24, 4)):
        flags = {"norm_obs": True, "norm_reward": True} if continuous(script) else {}
        args, agent, optimizer, batch = recorded(
            script, "Noise", num_envs=num_envs, num_steps=num_steps, **flags
        )
        ratios = []

        def spy(agent, parameters, minibatch, *rest, ratios=ratios):
            with torch.no_grad():
                logprobs, _, values = agent.evaluate_actions(minibatch)
            ratios.append((logprobs - minibatch.logprobs).exp())
            assert ratios[1:] or torch.allclose(values, minibatch.values, atol=1e-5)
            return script.ppo_gradient(agent, parameters, minibatch, *rest)

        script.update(agent, optimizer, batch, args, 0.2, spy)
        assert (ratios[0] - 1).abs().max() < 1e-5
        assert (ratios[-1] - 1).abs().max() > 1e-5


def test_logprobs_are_those_of_the_policy_that_acted(script):
    """Frequencies of sampled actions agree with the probabilities that evaluate_actions() states."""
    _, _, agent, _ = build(script)
    n = 2_000 if images(script) else 20_000
    obs = agent.normalize(frames(script, np.ones((1, 1)))).expand(n, *agent.obs_shape)
    torch.manual_seed(0)
    with torch.no_grad():
        bias = [0.7] if continuous(script) else [0.5, -0.5, 0, 0, 0] if multi(script) else [0.5, -0.5]
        list(agent.actor.parameters())[-1].copy_(torch.tensor(bias))
        actions = act(script, agent, obs)
        batch = make_batch(script, obs=obs[None], actions=actions[None], valid=torch.ones(1, n))
        logprobs, entropy, _ = agent.evaluate_actions(batch)
    assert logprobs.shape == entropy.shape == (1, n)
    tolerance = 3 / n**0.5
    assert -logprobs.mean().item() == pytest.approx(entropy.mean().item(), abs=tolerance)
    if continuous(script):
        assert actions.mean().item() == pytest.approx(agent.actor(obs[0]).item(), abs=tolerance)
    else:
        chosen = (actions == 1).reshape(n, -1).all(1)  # in every component
        assert chosen.float().mean().item() == pytest.approx(
            logprobs[0, chosen][0].exp().item(), abs=tolerance
        )
