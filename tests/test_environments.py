"""Which spaces and ids are served, how environments are built, and how they are refused."""

import json
from types import SimpleNamespace

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
    other_actions,
    probe,
    rollout,
    run,
    run_here,
    small_flags,
)
from probe_envs import OBSERVATIONS

REFUSED = {"frames", "gray", "image", "sequence", "graph"}
GRIDS = {"image"}  # for scripts with convolutions; gray frames are matrices there


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
@pytest.mark.parametrize(
    "kind", [kind for kind in OBSERVATIONS if kind not in {"sequence", "graph", "frames"}]
)
def test_observations_of_vectors_and_grids(script, kind):
    args, envs, agent, _ = build(script, f"Observe_{kind}", num_envs=3, num_minibatches=1)
    batch = rollout(script, agent, envs, args)
    flat = (gym.spaces.flatdim(OBSERVATIONS[kind]),)
    assert batch.obs.shape == (12, 3, *(OBSERVATIONS[kind].shape if kind in GRIDS else flat))
    assert script.evaluate_rollout(agent, batch, args).values.shape == (12, 3)


@pytest.mark.scripts(*MULTI)
@pytest.mark.parametrize("kind", ["sequence", "graph", "frames"])
def test_observations_that_are_neither(script, kind):
    with pytest.raises(script.BadInput, match="observations "):
        script.train(make_args(script, f"Observe_{kind}"))


@pytest.mark.scripts(*VECTOR, *MULTI)
@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(0, 1, (0,)),
        gym.spaces.OneOf((gym.spaces.Text(1), gym.spaces.Box(0, 1, (0,)))),
        gym.spaces.Sequence(gym.spaces.MultiDiscrete(np.full((3, 3), 2))),
    ],
    ids=["empty", "empty part", "several lines"],
)
def test_observations_that_do_not_flatten(script, space):
    actions = gym.spaces.Box(-1, 1) if continuous(script) else gym.spaces.Discrete(2)
    envs = SimpleNamespace(single_observation_space=space, single_action_space=actions)
    with pytest.raises(script.BadInput, match="do not flatten to vectors") as error:
        script.check_spaces("Some-v0", envs)
    assert "\n" not in str(error.value)


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


@pytest.mark.scripts("ppo_continuous_action")
@pytest.mark.filterwarnings(
    "ignore:.*out of date:DeprecationWarning", "ignore:.*(swig|Swig):DeprecationWarning"
)
def test_environments_that_gymnasium_only_names(script):
    """Hopper-v3 is registered to say what it needs; envpool does not flatten images past the check of spaces."""
    with pytest.raises(script.BadInput, match="--env-id Hopper-v3"):
        script.train(script.Args(env_id="Hopper-v3"))
    for num_envs in (1, 8):
        with pytest.raises(script.BadInput, match="must be vectors, not images"):
            script.train(script.Args(env_id="CarRacing-v3", num_envs=num_envs))


@pytest.mark.scripts("ppo_continuous_action")
@pytest.mark.parametrize(
    "kwargs", ['{"xml_file": "nope.xml"}', '{"frame_skip": 0}', '{"reset_noise_scale": "x"}']
)
def test_env_kwargs_that_the_environment_cannot_use(script, kwargs):
    with pytest.raises(script.BadInput, match="--env-kwargs"):
        script.train(script.Args(env_kwargs=kwargs))


@pytest.mark.parametrize(
    "env_id", ["NoSuchEnv-v0", "no_such_module:Env-v0", "CartPole-v99", "not an id", ":"]
)
def test_unknown_ids(script, env_id):
    with pytest.raises(script.BadInput, match=f"--env-id {env_id}"):
        script.train(make_args(script, env_id=env_id))


@pytest.mark.parametrize("kwargs", ["[1]", "{", "5", '"a"', "{'a': 1}"])
def test_env_kwargs_must_be_a_json_object(script, kwargs):
    with pytest.raises(script.BadInput, match="--env-kwargs must be a JSON object"):
        script.train(make_args(script, env_kwargs=kwargs))


def test_env_kwargs_reach_the_environment(script):
    _, envs, _, _ = build(script, env_kwargs=other_actions(script))
    assert envs.single_action_space != gym.make(make_args(script).env_id).action_space


def test_env_kwargs_that_the_environment_does_not_take(script):
    with pytest.raises(script.BadInput, match=r"--env-kwargs .* unexpected keyword argument"):
        script.train(make_args(script, env_kwargs='{"no_such": 1}'))


class SameStep(gym.vector.SyncVectorEnv):
    def __init__(self, num_envs, **kwargs):
        make = lambda: gym.make("probe_envs:Const-v0")  # noqa: E731
        super().__init__([make] * num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


class Odd(gym.vector.SyncVectorEnv):
    """Rewards resets, and says 1 for True."""

    def __init__(self, num_envs, env_id):
        super().__init__([lambda: gym.make(env_id)] * num_envs)

    def step(self, actions):
        resets = self._autoreset_envs.copy()
        obs, rewards, terminations, truncations, infos = super().step(actions)
        return obs, rewards + 7 * resets, terminations.astype(int), truncations.astype(int), infos


@pytest.mark.scripts(*VECTOR, *MULTI)
def test_rewards_of_resets_count_for_nothing(script):
    """Some tasks of envpool have them."""
    env_id = probe(script, "Score")
    gym.register("Odd-v0", vector_entry_point=Odd, kwargs={"env_id": env_id})
    try:
        args, envs, agent, _ = build(script, env_id="Odd-v0", num_envs=3, num_steps=40, num_minibatches=1)
        batch = rollout(script, agent, envs, args)
    finally:
        del gym.registry["Odd-v0"]
    assert set(batch.valid.unique().tolist()) == {0, 1}
    assert not batch.rewards[batch.valid == 0].any()
    assert set(envs.pop_episodes()[:, 0]) == {1000.0}


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
@pytest.mark.parametrize("env_id", ["FrankaKitchen-v1", "SearchAndRescue-v0"])
def test_parts_that_envpool_does_not_flatten(script, env_id):
    with pytest.raises(script.BadInput, match="--backend envpool: observations have parts other than Box"):
        script.make_envs(script.Args(env_id=env_id, backend="envpool"), 1, 1)


@pytest.mark.scripts("ppo_continuous_action")
def test_backends(script):
    """auto: mujoco where it can; else envpool from 8 environments on, if it knows the id and gets no arguments."""
    cases = [
        ({"num_envs": 8}, "envpool"),
        ({"num_envs": 7}, "gymnasium"),
        ({"num_envs": 8, "backend": "gymnasium"}, "gymnasium"),
        ({"num_envs": 1, "backend": "envpool"}, "envpool"),
        ({"num_envs": 8, "async_envs": True}, "gymnasium"),
        ({"num_envs": 8, "env_kwargs": '{"g": 9.0}'}, "gymnasium"),
        ({"num_envs": 1, "env_id": "CheetahRun-v1"}, "envpool"),
        ({"num_envs": 8, "env_id": "probe_envs:ConstBox-v0"}, "gymnasium"),
        ({"num_envs": 1, "env_id": "HalfCheetah-v5"}, "mujoco"),
        ({"num_envs": 64, "env_id": "Hopper-v5", "env_kwargs": '{"healthy_reward": 2.0}'}, "mujoco"),
        ({"num_envs": 8, "env_id": "Swimmer-v5", "backend": "envpool"}, "envpool"),
        ({"num_envs": 8, "env_id": "Walker2d-v5", "async_envs": True}, "gymnasium"),
        ({"num_envs": 8, "env_id": "HalfCheetah-v4"}, "envpool"),
    ]
    for flags, expected in cases:
        assert script.choose_backend(script.Args(**({"env_id": "Pendulum-v1"} | flags))) == expected, flags


PLANAR = ["HalfCheetah-v5", "Hopper-v5", "Swimmer-v5", "Walker2d-v5"]
KWARGS = {
    "HalfCheetah-v5": {},
    "Hopper-v5": {"healthy_reward": 2.5, "exclude_current_positions_from_observation": False},
    "Swimmer-v5": {"ctrl_cost_weight": 0.3, "frame_skip": 2},
    "Walker2d-v5": {
        "healthy_z_range": [1.1, 1.3],
        "forward_reward_weight": 0.5,
        "terminate_when_unhealthy": 1,
    },
}


@pytest.mark.scripts("ppo_continuous_action")
@pytest.mark.parametrize("env_id", PLANAR)
@pytest.mark.parametrize("changed", [False, True], ids=["defaults", "env-kwargs"])
def test_planar_tasks_are_those_of_gymnasium(script, env_id, changed, monkeypatch):
    """Observation, reward and end after each step, from the same state, are gymnasium's; so are the spaces."""
    monkeypatch.setattr(script, "num_cores", lambda: 2)  # so that threads share the work
    kwargs, N = KWARGS[env_id] if changed else {}, 40
    args = script.Args(env_id=env_id, num_envs=N, env_kwargs=json.dumps(kwargs))
    envs = script.make_envs(args, N, 3)
    planar = envs.unwrapped
    assert type(planar).__name__ == "PlanarMujoco"
    with script.quiet_mujoco():
        theirs = gym.make(env_id, **kwargs)
    theirs.reset(seed=0)
    model, data = theirs.unwrapped.model, theirs.unwrapped.data
    assert planar.single_observation_space == theirs.observation_space
    assert planar.single_action_space == theirs.action_space
    rng, ended = np.random.default_rng(0), 0
    for t in range(120):
        states, fillers = planar.states.copy(), envs.fillers
        actions = rng.uniform(-1, 1, (N, model.nu)).astype(np.float32)
        obs, rewards, terminations, truncations, _ = envs.step(actions)
        assert not truncations.any()
        assert not (rewards[fillers].any() or terminations[fillers].any())
        for i in np.flatnonzero(~fillers)[t % 5 :: 5]:
            theirs.unwrapped.set_state(states[i, 1 : 1 + model.nq], states[i, 1 + model.nq :])
            data.qacc_warmstart[:] = 0  # mujoco.rollout has none
            expected, reward, terminated, _, _ = theirs.unwrapped.step(actions[i])
            np.testing.assert_allclose(obs[i], expected, rtol=0, atol=1e-12)
            assert rewards[i] == pytest.approx(reward, abs=1e-12)
            assert terminations[i] == terminated
            ended += terminated
    assert (ended > 0) == (env_id in ("Hopper-v5", "Walker2d-v5"))


@pytest.mark.scripts("ppo_continuous_action")
@pytest.mark.parametrize("env_id", PLANAR)
def test_first_states_of_planar_tasks(script, env_id):
    """Mean, spread and extremes as gymnasium draws them; each environment and each seed has its own."""
    args = script.Args(env_id=env_id, num_envs=2000)
    ours, other = (script.make_envs(args, 2000, seed).obs for seed in (1, 2))
    with script.quiet_mujoco():
        one = gym.make(env_id)
    theirs = np.stack([one.reset(seed=seed)[0] for seed in range(2000)])
    scale = one.unwrapped._reset_noise_scale
    for statistic, tolerance in ((np.mean, 0.1), (np.std, 0.1), (np.max, 1.5)):
        assert statistic(ours, 0) == pytest.approx(statistic(theirs, 0), abs=tolerance * scale)
    assert len(np.unique(np.concatenate([ours, other])[:, 0])) == 4000
    assert np.array_equal(ours, script.make_envs(args, 2000, 1).obs)


@pytest.mark.scripts("ppo_continuous_action")
def test_time_limit_of_planar_tasks(script):
    """The step at the limit truncates, the next one is a filler, then the new episode counts from 0."""
    args = script.Args(env_id="HalfCheetah-v5", num_envs=3, env_kwargs='{"max_episode_steps": 5}')
    envs = script.make_envs(args, 3, 1)
    seen = [envs.step(np.ones((3, 6), np.float32))[3].all() for _ in range(13)]
    assert np.flatnonzero(seen).tolist() == [4, 10]
    assert envs.pop_episodes()[:, 1].tolist() == [5] * 6


@pytest.mark.scripts("ppo_continuous_action")
def test_backends_that_cannot(script):
    for flags, words in (
        ({"env_id": "probe_envs:ConstBox-v0"}, "--backend envpool does not know --env-id"),
        ({"env_id": "Pendulum-v1", "backend": "mujoco"}, "--backend mujoco does not know --env-id"),
        ({"env_id": "Hopper-v5", "backend": "Mujoco"}, "--backend Mujoco does not know --env-id"),
        (
            {"env_id": "Hopper-v5", "backend": "mujoco", "env_kwargs": '{"xml_file": "hopper.xml"}'},
            "Hopper-v5 with another xml_file",
        ),
        ({"env_id": "Hopper-v5", "backend": "mujoco", "async_envs": True}, "mujoco has threads of its own"),
        ({"env_id": "Pendulum-v1", "async_envs": True}, "--async-envs"),
        ({"env_id": "CheetahRun-v1", "capture_video": True}, "--capture-video"),
    ):
        with pytest.raises(script.BadInput, match=words):
            script.train(script.Args(**{"backend": "envpool", "num_envs": 8} | flags))


@pytest.mark.scripts("ppo_continuous_action")
@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Pendulum-v1"])
def test_backends_agree(script, env_id):
    """Spaces, lengths of episodes and fillers are the same."""
    seen = []
    for backend in ("gymnasium", "envpool", *(["mujoco"] if "Cheetah" in env_id else [])):
        args = script.Args(env_id=env_id, num_envs=2, backend=backend, num_steps=16, num_minibatches=1)
        envs = script.make_envs(args, 2, 3)
        actions = envs.single_action_space
        spaces = (
            envs.single_observation_space.shape,
            repr(actions),
            actions.low.tolist(),
            actions.high.tolist(),
        )
        lengths, fillers = [], 0
        for _ in range(2 * (1000 if "Cheetah" in env_id else 200) + 3):
            envs.step(np.zeros((2, *envs.single_action_space.shape), envs.single_action_space.dtype))
            fillers += int(envs.fillers.sum())
            lengths += envs.pop_episodes()[:, 1].tolist()
        seen.append((str(spaces), lengths, fillers))
        envs.close()
    assert all(each == seen[0] for each in seen)


@pytest.mark.scripts("ppo_continuous_action")
def test_a_run_may_go_on_with_another_backend(script):
    """As auto takes another one where only --num-envs is changed."""
    flags = {"env_id": "InvertedPendulum-v5", "num_steps": 16, "num_minibatches": 2, "total_timesteps": 64}
    checkpoint = script.train(script.Args(num_envs=2, **flags))["checkpoint"]
    more = script.Args(resume=checkpoint, num_envs=8, total_timesteps=512)
    assert (script.choose_backend(script.Args(num_envs=2, **flags)), script.choose_backend(more)) == (
        "gymnasium",
        "envpool",
    )
    assert script.train(more)["global_step"] > 400


@pytest.mark.scripts("ppo_continuous_action")
def test_envpool_environments_are_seeded(script):
    args = script.Args(env_id="HalfCheetah-v5", num_envs=8, backend="envpool")
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
    done = run_here(script, *small_flags(script), "--env-id", env_id)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"--env-id {env_id}" in done.stderr
