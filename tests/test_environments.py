"""Which spaces and ids are served, how environments are built, and how they are refused."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import (
    IMAGE,
    MULTI,
    VECTOR,
    build,
    continuous,
    images,
    make_args,
    multi,
    rollout,
    run,
    small_flags,
)
from probe_envs import OBSERVATIONS

REFUSED = {"frames", "gray", "image", "sequence", "graph"}
GRIDS = {"frames", "image"}  # for scripts with convolutions; gray frames are matrices there


@pytest.mark.scripts(*VECTOR)
@pytest.mark.parametrize("kind", [kind for kind in OBSERVATIONS if kind not in REFUSED])
def test_observations_that_flatten_to_vectors(script, kind):
    args, envs, agent, _ = build(script, f"Observe_{kind}", num_envs=3, num_minibatches=1)
    batch = rollout(script, agent, envs, args)
    size = gym.spaces.flatdim(OBSERVATIONS[kind])
    assert batch.obs.shape == (12, 3, size)
    assert batch.obs.dtype == torch.float32
    assert torch.isfinite(batch.obs).all()


@pytest.mark.scripts(*VECTOR)
@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_observations_that_are_refused(script, kind):
    args = make_args(script, f"Observe_{kind}")
    with pytest.raises(script.BadInput, match=rf"--env-id {args.env_id}: observations .*") as error:
        script.train(args)
    if kind in ("frames", "gray") and not continuous(script):
        assert "ppo_atari.py" in str(error.value)


@pytest.mark.scripts(*MULTI)
@pytest.mark.parametrize("kind", [kind for kind in OBSERVATIONS if kind not in {"sequence", "graph"}])
def test_observations_of_vectors_and_grids(script, kind):
    args, envs, agent, _ = build(script, f"Observe_{kind}", num_envs=3, num_minibatches=1)
    batch = rollout(script, agent, envs, args)
    flat = (gym.spaces.flatdim(OBSERVATIONS[kind]),)
    assert batch.obs.shape == (12, 3, *(OBSERVATIONS[kind].shape if kind in GRIDS else flat))
    assert script.evaluate_rollout(agent, batch, args).values.shape == (12, 3)


@pytest.mark.scripts(*MULTI)
@pytest.mark.parametrize("kind", ["sequence", "graph"])
def test_observations_that_are_neither(script, kind):
    with pytest.raises(script.BadInput, match="observations "):
        script.train(make_args(script, f"Observe_{kind}"))


@pytest.mark.scripts(*VECTOR, *MULTI)
def test_one_hot_of_discrete_observations(script):
    args, envs, agent, _ = build(script, "Observe_discrete", num_minibatches=1)
    obs = rollout(script, agent, envs, args).obs
    assert obs.shape[-1] == 5
    assert torch.equal(obs.sum(-1), torch.ones(obs.shape[:2]))


@pytest.mark.scripts("ppo", "ppo_shared", *IMAGE)
def test_discrete_with_a_start(script):
    """The space counts from -1: legal actions are sent, those counted from 0 are stored. The probe checks legality."""
    env_id = "probe_envs:ConstImage-v0" if images(script) else "probe_envs:Act_start-v0"
    args, envs, agent, _ = build(script, env_id=env_id, env_kwargs='{"actions": "start"}')
    batch = rollout(script, agent, envs, args)
    assert set(batch.actions.unique().tolist()) == {0, 1, 2}


@pytest.mark.scripts("ppo", "ppo_shared")
@pytest.mark.parametrize("kind", ["box", "multi", "integers"])
def test_actions_that_are_not_discrete(script, kind):
    with pytest.raises(script.BadInput, match="actions must be Discrete"):
        script.train(make_args(script, env_id=f"probe_envs:Act_{kind}-v0"))


@pytest.mark.scripts("ppo_continuous_action")
@pytest.mark.parametrize("kind", ["two", "multi", "integers"])
def test_actions_that_are_not_real_numbers(script, kind):
    with pytest.raises(script.BadInput, match="actions must be a Box of floating-point numbers"):
        script.train(make_args(script, env_id=f"probe_envs:Act_{kind}-v0"))


@pytest.mark.scripts("ppo_continuous_action")
@pytest.mark.parametrize("kind", ["asymmetric", "float64", "unbounded", "half", "matrix", "scalar"])
def test_any_box_of_actions(script, kind):
    """The probe insists on legal actions, so two iterations without an error say that they were."""
    args = make_args(script, env_id=f"probe_envs:Act_{kind}-v0", total_timesteps=96)
    assert script.train(args)["episodic_return"] == 8


@pytest.mark.parametrize("env_id", ["NoSuchEnv-v0", "no_such_module:Env-v0", "CartPole-v99", "not an id"])
def test_unknown_ids(script, env_id):
    with pytest.raises(script.BadInput, match=f"--env-id {env_id}"):
        script.train(make_args(script, env_id=env_id))


@pytest.mark.parametrize("kwargs", ["[1]", "{", "5", '"a"', "{'a': 1}"])
def test_env_kwargs_must_be_a_json_object(script, kwargs):
    with pytest.raises(script.BadInput, match="--env-kwargs must be a JSON object"):
        script.train(make_args(script, env_kwargs=kwargs))


def test_env_kwargs_reach_the_environment(script):
    other = "asymmetric" if continuous(script) else "start_multi" if multi(script) else "start"
    _, envs, _, _ = build(script, env_kwargs=f'{{"actions": "{other}"}}')
    assert envs.single_action_space != gym.make(make_args(script).env_id).action_space


def test_env_kwargs_that_the_environment_does_not_take(script):
    with pytest.raises(script.BadInput, match=r"--env-kwargs .* unexpected keyword argument"):
        script.train(make_args(script, env_kwargs='{"no_such": 1}'))


class SameStep(gym.vector.SyncVectorEnv):
    def __init__(self, num_envs, **kwargs):
        make = lambda: gym.make("probe_envs:Const-v0")  # noqa: E731
        super().__init__([make] * num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


@pytest.mark.scripts("ppo", "ppo_shared")
def test_other_autoreset_modes_are_refused(script):
    if "SameStep-v0" not in gym.registry:
        gym.register("SameStep-v0", vector_entry_point=SameStep)
    with pytest.raises(script.BadInput, match="NEXT_STEP"):
        script.train(make_args(script, env_id="SameStep-v0"))


def test_scores_are_raw_and_whole(script):
    """Every logged return is 1000 and every length 10, whatever rewards the agent learns from."""
    flags = {"norm_reward": True} if continuous(script) else {}
    args, envs, agent, _ = build(script, "Score", num_envs=3, num_steps=40, num_minibatches=1, **flags)
    last = None
    for _ in range(3):
        last = rollout(script, agent, envs, args, last)
    episodes = envs.pop_episodes()
    assert len(episodes) == 3 * 11  # the last of them ends with step 120, each but the first after a filler
    assert set(episodes[:, 0]) == {1000.0}
    assert set(episodes[:, 1]) == {10.0}
    assert len(envs.pop_episodes()) == 0


def test_seeds_of_neighbors_share_no_environment(script):
    """Environment i takes seed + i: plain seeds 1 and 2 would share all environments but one."""
    raw = {"clip_rewards": False} if images(script) else {}
    args, envs, agent, _ = build(script, "Noise", seed=1, **raw)
    first = rollout(script, agent, envs, args).rewards.flatten().tolist()
    args, envs, agent, _ = build(script, "Noise", seed=2, **raw)
    second = rollout(script, agent, envs, args).rewards.flatten().tolist()
    assert set(first) & set(second) <= {0}  # of fillers


def test_async_environments_return_the_same_rows(script):
    rows = []
    for async_envs in (False, True):
        args, envs, agent, _ = build(script, "Noise", num_envs=2, num_minibatches=1, async_envs=async_envs)
        assert isinstance(envs.unwrapped, gym.vector.AsyncVectorEnv) == async_envs
        rows.append(rollout(script, agent, envs, args))
        envs.close()
    assert torch.equal(rows[0].obs, rows[1].obs)
    assert torch.equal(rows[0].rewards, rows[1].rewards)


@pytest.mark.scripts("ppo", "ppo_shared")
def test_cartpole_uses_the_vector_environment_of_gymnasium(script):
    _, envs, _, _ = build(script, env_id="CartPole-v1")
    assert type(envs.unwrapped).__name__ == "CartPoleVectorEnv"


@pytest.mark.scripts("ppo_continuous_action")
def test_backends(script):
    """auto takes envpool from 8 environments on, if it knows the id and gets no arguments."""
    cases = [
        ({"num_envs": 8}, True),
        ({"num_envs": 7}, False),
        ({"num_envs": 8, "backend": "gymnasium"}, False),
        ({"num_envs": 1, "backend": "envpool"}, True),
        ({"num_envs": 8, "async_envs": True}, False),
        ({"num_envs": 8, "env_kwargs": '{"g": 9.0}'}, False),
        ({"num_envs": 1, "env_id": "CheetahRun-v1"}, True),
        ({"num_envs": 8, "env_id": "probe_envs:ConstBox-v0"}, False),
    ]
    for flags, expected in cases:
        assert script.uses_envpool(script.Args(**({"env_id": "Pendulum-v1"} | flags))) == expected, flags


@pytest.mark.scripts("ppo_continuous_action")
def test_backends_that_cannot(script):
    for flags, words in (
        ({"env_id": "probe_envs:ConstBox-v0"}, "does not know --env-id"),
        ({"env_id": "Pendulum-v1", "async_envs": True}, "--async-envs"),
        ({"env_id": "CheetahRun-v1", "capture_video": True}, "--capture-video"),
    ):
        with pytest.raises(script.BadInput, match=words):
            script.train(script.Args(backend="envpool", num_envs=8, **flags))


@pytest.mark.scripts("ppo_continuous_action")
@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Pendulum-v1"])
def test_backends_agree(script, env_id):
    """Spaces, lengths of episodes and fillers are the same."""
    seen = []
    for backend in ("gymnasium", "envpool"):
        args = script.Args(env_id=env_id, num_envs=2, backend=backend, num_steps=16, num_minibatches=1)
        envs = script.make_envs(args, 2, 3)
        actions = envs.single_action_space
        spaces = envs.single_observation_space.shape, actions.low.tolist(), actions.high.tolist()
        lengths, fillers = [], 0
        for _ in range(2 * (1000 if "Cheetah" in env_id else 200) + 3):
            envs.step(np.zeros((2, *envs.single_action_space.shape), envs.single_action_space.dtype))
            fillers += int(envs.fillers.sum())
            lengths += envs.pop_episodes()[:, 1].tolist()
        seen.append((str(spaces), lengths, fillers))
        envs.close()
    assert seen[0] == seen[1]


@pytest.mark.scripts("ppo_continuous_action")
def test_envpool_environments_are_seeded(script):
    args = script.Args(env_id="HalfCheetah-v5", num_envs=8)
    seeds = [script.derive_seed(seed, 0, 0) for seed in (3, 3, 4)]
    first, again, other = (script.make_envs(args, 8, seed).obs for seed in seeds)
    assert np.array_equal(first, again)
    assert len(np.unique(np.concatenate([first, other])[:, 0])) == 16


@pytest.mark.scripts("ppo_continuous_action")
def test_dm_control_observations_are_flattened(script):
    args = script.Args(env_id="CheetahRun-v1", num_envs=8, num_steps=8, num_minibatches=1)
    envs = script.make_envs(args, 8, 1)
    agent = script.Agent(envs, args)
    assert rollout(script, agent, envs, args).obs.shape == (8, 8, 17)


@pytest.mark.scripts("ppo_continuous_action")
def test_mujoco_stays_quiet_and_leaves_no_file(script, tmp_path):
    """MuJoCo 4 warns of gymnasium's models; neither the console nor the folder shows it."""
    done = run(script.__file__, "--num-steps", 64, "--total-timesteps", 64, "--num-minibatches", 2)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_bad_spaces_exit_with_status_2(script):
    """On the command line, too: one sentence on stderr, no traceback, no folder."""
    env_id = "probe_envs:Observe_sequence-v0"
    done = run(script.__file__, *small_flags(script), "--env-id", env_id)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"--env-id {env_id}" in done.stderr
