"""Details of Atari and of the LSTM, on ale-py's emulator."""

import itertools
import platform
import subprocess
import sys

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from ale_py import AtariVectorEnv
from helpers import (
    IMAGE,
    ROOT,
    act,
    build,
    make_args,
    make_batch,
    recorded,
    recurrent,
    rollout,
    value_of_next,
)
from torch import nn

pytestmark = [
    pytest.mark.scripts(*IMAGE),
    pytest.mark.filterwarnings("ignore:.*(swig|Swig):DeprecationWarning"),  # while Box2D is imported
]
NOOP, FIRE = 0, 1
LSTM = "ppo_atari_lstm"
ONE = pytest.mark.scripts("ppo_atari")  # where section 3 has the same lines


def games(script, name, n=4, seed=3, **flags):
    """The environments of the script, for n games."""
    return script.make_envs(script.Args(env_id=name, **flags), n, seed)


def play(envs, steps, seed=0):
    """Random actions; yields what each step returned."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        yield envs.step(rng.integers(envs.single_action_space.n, size=envs.num_envs))


# ---- the emulator ----
@ONE
def test_d14_noop_reset_env(script):
    """A game starts after 0 to 29 frames; MsPacman has no FIRE that would add some."""
    envs = games(script, "MsPacman", n=8)
    frames = {int(n) for seed in range(6) for n in envs.reset(seed=100 * seed)[1]["episode_frame_number"]}
    assert min(frames) >= 0
    assert max(frames) <= 29
    assert len(frames) > 10


@ONE
def test_d15_max_and_skip_env(script):
    """Frames one by one from a second emulator: rewards add up, the picture is the maximum of frames 3 and 4."""
    picture = {"img_height": 210, "img_width": 160, "grayscale": True, "stack_num": 1}
    ours = script.make_games(script.Args(env_id="MsPacman"), "ms_pacman", 2, 210, 160, stack=1)
    single = {"frameskip": 1, "maxpool": False, "noop_max": 30, "reward_clipping": False}
    slow = AtariVectorEnv("ms_pacman", 2, **single, **picture)
    ours.reset(seed=5)
    slow.reset(seed=5)
    rng, scored, flickered = np.random.default_rng(0), 0, False
    for _ in range(150):
        actions = rng.integers(9, size=2)
        obs, rewards, _, _, infos = ours.step(actions)
        frames = [slow.step(actions) for _ in range(4)]
        assert (rewards == sum(frame[1] for frame in frames)).all()
        assert np.array_equal(obs, np.maximum(frames[2][0], frames[3][0]))
        assert np.array_equal(infos["episode_frame_number"], frames[3][4]["episode_frame_number"])
        scored += rewards.sum()
        flickered |= not np.array_equal(frames[2][0], frames[3][0])
    assert scored > 0
    assert flickered


def test_d16_episodic_life_env(script):
    """Without action, Breakout loses life after life; each ends an episode, the fifth also the game."""
    envs = games(script, "Breakout", n=2)
    lives, ends, fillers, starts = [], 0, 0, 0
    while len(envs.ended) < 3:
        restarts = envs.fillers[0] and not envs.forced[0]
        _, _, terminations, truncations, infos = envs.step(np.full(2, NOOP))
        assert not truncations.any()
        ends += terminations[0]
        lives += [infos["lives"][0]] if terminations[0] else []
        fillers += envs.fillers[0]
        starts += restarts
    assert lives[:5] == [4, 3, 2, 1, 0]
    # FIRE after four of five lives, a new game after the last, and FIRE again.
    assert ends + starts == fillers
    assert starts >= 1
    assert all(score == 0 for part in envs.ended for score in part[:, 0])


@ONE
def test_d16_rows_after_a_lost_life_are_real_where_there_is_no_fire(script):
    envs = games(script, "MsPacman", n=8)
    lost = over = 0
    for _, _, terminations, _, infos in play(envs, 1200):
        goes_on = terminations & (infos["lives"] > 0)
        assert not envs.fillers[goes_on].any()
        assert envs.fillers[terminations & (infos["lives"] == 0)].all()
        lost, over = lost + goes_on.sum(), over + envs.fillers.sum()
    assert lost > over > 0


@ONE
@pytest.mark.parametrize("name", ["Breakout", "Adventure", "Qbert"])
def test_d16_fillers_are_new_games_and_forced_fire(script, name):
    """After the fact, a reset shows in a frame number that does not grow."""
    envs = games(script, name, n=8, env_kwargs='{"max_num_frames_per_episode": 1300}')
    _, infos = envs.reset(seed=1)
    frame, resets = infos["episode_frame_number"].copy(), 0
    forced, fillers = envs.forced.copy(), envs.fillers.copy()
    for _, rewards, _, _, infos in play(envs, 700):
        reset = infos["episode_frame_number"] <= frame
        assert np.array_equal(fillers, reset | forced if envs.fire is not None else reset)
        assert not (reset & forced).any()
        assert (rewards[reset] == 0).all()
        resets += reset.sum()
        frame = infos["episode_frame_number"].copy()
        forced, fillers = envs.forced.copy(), envs.fillers.copy()
    assert resets >= 8


def test_d16_a_life_lost_at_the_time_limit(script):
    """Terminated, as a life was lost, and over: the next row is a reset, not FIRE."""
    envs = games(script, "Breakout", n=1)
    steps = 1
    while not envs.step(np.array([NOOP]))[2][0]:
        steps += 1
    envs = games(script, "Breakout", n=1, env_kwargs=f'{{"max_num_frames_per_episode": {4 * steps}}}')
    for _ in range(steps):
        _, _, terminations, truncations, infos = envs.step(np.array([NOOP]))
    assert (terminations[0], truncations[0], infos["lives"][0]) == (True, True, 4)
    assert envs.fillers[0]
    assert not envs.forced[0]
    assert envs.pop_episodes().tolist() == [[0, steps]]
    before = infos["episode_frame_number"][0]
    assert envs.step(np.array([NOOP]))[4]["episode_frame_number"][0] < before
    assert envs.forced[0]
    envs.step(np.array([NOOP]))
    assert not envs.fillers[0]


@ONE
def test_d16_a_new_game_with_fewer_lives_is_no_lost_life(script, monkeypatch):
    """A game with an extra life is cut off; the reset that follows shows one life less."""
    envs = games(script, "Breakout", n=1, env_kwargs='{"max_num_frames_per_episode": 40}')
    step, calls = envs.env.step, itertools.count()

    def with_extra_life(actions):
        *rest, infos = step(actions)
        return *rest, infos | {"lives": infos["lives"] + (next(calls) < 10)}

    monkeypatch.setattr(envs.env, "step", with_extra_life)
    for _ in range(9):
        envs.step(np.array([NOOP]))
    _, _, _, truncations, infos = envs.step(np.array([NOOP]))
    assert truncations[0]
    assert infos["lives"][0] == 6
    _, _, terminations, _, infos = envs.step(np.array([NOOP]))
    assert infos["lives"][0] == 5
    assert not terminations[0]
    envs.step(np.array([NOOP]))  # FIRE of the new game
    assert not envs.forced[0]
    assert not envs.fillers[0]


@ONE
def test_d17_sticky_actions_do_not_swallow_fire(script):
    """All games begin, and lose lives, though the agent does nothing: a life is about 25 steps, a game 125."""
    envs = games(script, "Breakout", n=16, repeat_action_probability=0.25)
    lives = np.array([envs.step(np.full(16, NOOP))[4]["lives"] for _ in range(200)])
    for game in lives[:100], lives[150:]:
        assert (game.min(axis=0) < 5).all()
    assert (lives[130:150].max(axis=0) == 5).all()


def test_d17_fire_reset_env(script, monkeypatch):
    """Whatever is sent, resets and lost lives are followed by FIRE; all else arrives as it was sent."""
    envs = games(script, "Breakout")
    received, step = [], envs.env.step
    assert envs.forced.all()
    assert envs.fillers.all()
    monkeypatch.setattr(envs.env, "step", lambda actions: received.append(actions) or step(actions))
    rng, pressed = np.random.default_rng(0), 0
    for _ in range(300):
        actions, forced = rng.choice([0, 2, 3], size=4), envs.forced.copy()
        envs.step(actions)
        assert np.array_equal(received[-1], np.where(forced, FIRE, actions))
        pressed += forced.sum()
    assert pressed > 10


def test_d17_fire_is_found_by_its_name(script):
    assert games(script, "Breakout").fire == FIRE
    assert games(script, "Backgammon").fire == 0
    assert games(script, "MsPacman").fire is None


@ONE
def test_d18_warp_frame(script):
    """Gray, 84 x 84, as OpenCV shrinks areas."""
    envs = games(script, "Pong", n=1)
    large = script.make_games(script.Args(), "pong", 1, 210, 160, stack=1)
    envs.reset(seed=2)
    frame, _ = large.reset(seed=2)
    assert envs.obs.dtype == np.uint8
    assert envs.obs.shape[2:] == (84, 84)
    small = cv2.resize(frame[0, 0], (84, 84), interpolation=cv2.INTER_AREA)
    assert np.abs(envs.obs[0, -1].astype(int) - small).max() <= 1


def test_d19_clip_reward_env(script):
    """The learner sees signs; what is logged are scores: whole games, multiples of 10."""
    args, envs, agent, _ = build(
        script, env_id="MsPacman", num_envs=8, num_steps=700, total_timesteps=10**4, num_minibatches=1
    )
    batch = rollout(script, agent, envs, args)
    assert set(batch.rewards.unique().tolist()) == {0.0, 1.0}
    episodes = envs.pop_episodes()
    assert len(episodes) >= 2
    assert (episodes[:, 0] % 10 == 0).all()
    assert (episodes[:, 0] >= 50).all()
    assert (episodes[:, 1] > 300).all()  # agent steps of games of three lives
    agent.clip_rewards = False
    assert set(agent.scale_rewards(np.array([-7, 0, 50]), None, None)) == {-7, 0, 50}


def test_scores_and_lengths_are_those_of_whole_games(script):
    """Counted again from raw rewards and resets, forced rows included."""
    envs = games(script, "Breakout", n=4)
    scores, lengths, expected, fillers = np.zeros(4), np.zeros(4, int), [], envs.fillers & ~envs.forced
    for _, rewards, _, _, infos in play(envs, 900):
        scores, lengths = scores + rewards, lengths + ~fillers
        over = infos["lives"] == 0
        expected += np.stack([scores, lengths], axis=1)[over].tolist()
        scores[over], lengths[over] = 0, 0
        fillers = over
    assert len(expected) >= 8
    assert envs.pop_episodes().tolist() == expected
    assert max(score for score, _ in expected) > 0


@pytest.mark.scripts("ppo_atari")
def test_d20_frame_stack(script):
    """The last 4 frames, the oldest first; black before a game's first, carried over a lost life."""
    envs = games(script, "Breakout", n=1)
    assert envs.obs.shape == (1, 4, 84, 84)
    assert envs.obs[0, :3].max() == 0 < envs.obs[0, 3].max()
    for _ in range(60):
        before = envs.obs.copy()
        envs.step(np.array([NOOP]))
        if not envs.fillers[0] or envs.forced[0]:
            assert np.array_equal(envs.obs[:, :3], before[:, 1:])


@pytest.mark.scripts(LSTM)
def test_d20_no_frame_stack_with_an_lstm(script):
    assert games(script, "Breakout").obs.shape == (4, 1, 84, 84)


@ONE
def test_names_of_games(script):
    """ALE/Pong-v5, PongNoFrameskip-v4 and Pong are the same environment; unknown ones are refused."""
    seen = [games(script, name).obs for name in ("ALE/Pong-v5", "PongNoFrameskip-v4", "Pong")]
    assert np.array_equal(seen[0], seen[1])
    assert np.array_equal(seen[0], seen[2])


@ONE
def test_sticky_actions(script):
    """Off by default, also for ids that have them on in gymnasium; 0.25 changes what actions do."""
    seen = []
    for p in (0.0, 0.0, 0.25):
        envs = games(script, "ALE/MsPacman-v5", repeat_action_probability=p)
        seen.append([rewards.tolist() for _, rewards, *_ in play(envs, 300)])
    assert seen[0] == seen[1] != seen[2]
    args = script.Args(repeat_action_probability=0.25)
    assert args.given == {"repeat_action_probability": 0.25}


@ONE
def test_color_for_films(script):
    """The twin shows the same game, in color."""
    envs = script.make_games(script.Args(), "breakout", 1)
    color = script.make_games(script.Args(), "breakout", 1, 210, 160, grayscale=False, stack=1)
    twin = script.ColorTwin(envs, color)
    twin.reset(seed=1)
    for obs, *_ in play(twin, 200):
        (frame,) = twin.render()
        assert frame.shape == (210, 160, 3)
        small = cv2.resize(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY), (84, 84), interpolation=cv2.INTER_AREA)
        assert np.abs(obs[0, -1].astype(int) - small).mean() < 2
    assert not np.array_equal(frame[..., 0], frame[..., 2])


# ---- other environments with frames ----
def test_frames_of_gymnasium(script):
    """Gray, 84 x 84, stacked, without lives and FIRE."""
    flags = {"env_id": "CarRacing-v3", "env_kwargs": '{"continuous": false}', "num_envs": 2}
    args = make_args(script, num_steps=8, num_minibatches=2, total_timesteps=32, **flags)
    assert script.train(args)["global_step"] == 32
    envs = script.make_envs(args, 2, 1)
    assert envs.obs.shape == (2, 1 if recurrent(script) else 4, 84, 84)
    assert envs.obs.std() > 0


class Lives(gym.Wrapper):
    """Tells what may mean anything in an environment that is no game of ale-py's."""

    def step(self, action):
        self.left = getattr(self, "left", 9) - 1
        return *self.env.step(action)[:4], {"lives": self.left}


def test_lives_of_other_environments_end_nothing(script):
    make = lambda: Lives(gym.make("probe_envs:Observe_frames-v0"))  # noqa: E731
    gym.register("Lives-v0", entry_point=make)
    try:
        _, envs, _, _ = build(script, env_id="Lives-v0", num_envs=4)
        ends = np.array([envs.step(np.zeros(4, int))[2:4] for _ in range(9)])  # (9, 2, environments)
    finally:
        del gym.registry["Lives-v0"]
    assert not ends[:, 0].any()
    assert ends[:, 1].any()  # by its time limit


@ONE
def test_bytes_that_are_no_frames(script):
    """Their range is not that of colors."""
    env = gym.wrappers.TransformObservation(
        gym.make("probe_envs:Observe_frames-v0"), lambda x: x, gym.spaces.Box(0, 10, (9, 9, 3), np.uint8)
    )
    with pytest.raises(script.BadInput, match="observations must be uint8 frames"):
        script.adapt(env, make_args(script), None)


@ONE
@pytest.mark.parametrize("kind", ["vector", "gray", "image", "dict", "text", "graph"])
def test_observations_that_are_no_frames(script, kind):
    with pytest.raises(script.BadInput, match="observations must be uint8 frames"):
        script.train(make_args(script, env_id=f"probe_envs:Observe_{kind}-v0"))


def test_frames_are_served(script):
    assert script.train(make_args(script, env_id="probe_envs:Observe_frames-v0"))["episodic_return"] == 8


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"env_id": "CarRacing-v3"}, "actions must be Discrete"),
        ({"env_kwargs": '{"continuous": true}'}, "actions must be Discrete"),
        ({"env_kwargs": '{"frameskip": 2}'}, "--env-kwargs .*frameskip"),
        ({"env_kwargs": '{"batch_size": 4}'}, "--env-kwargs .*batch_size"),
        ({"env_kwargs": '{"autoreset_mode": "SameStep"}'}, "--env-kwargs .*autoreset_mode"),
        ({"env_id": "ALE/Pong"}, "write games as Pong"),
        ({"env_id": "ale_py:ALE/Pong-v5"}, "write games as Pong"),
        ({"env_id": "PongNoFrameskip"}, "write games as Pong"),
        ({"env_kwargs": '{"no_such": 2}'}, "--env-kwargs .*no_such"),
        ({"async_envs": True}, "--async-envs"),
        ({"env_id": "NoSuchGame"}, "--env-id NoSuchGame"),
        ({"repeat_action_probability": 1.5}, "--repeat-action-probability"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*unversioned environment")
def test_what_cannot_be_served(script, flags, words):
    with pytest.raises(script.BadInput, match=words):
        script.train(script.Args(**flags))


# ---- networks and storage ----
def test_d02_orthogonal_layers(script):
    """Gain sqrt(2) in the convolutions and the layer of 512, 0.01 and 1 in the heads; biases 0."""
    _, _, agent, _ = build(script)
    gains = []
    for layer in (m for m in agent.modules() if isinstance(m, nn.Conv2d | nn.Linear)):
        weight = layer.weight.flatten(1)
        weight = weight if len(weight) <= weight.shape[1] else weight.T
        gram = weight @ weight.T
        gain = gram.diagonal().mean().sqrt()
        assert torch.allclose(gram, gain**2 * torch.eye(len(gram)), atol=1e-4)
        assert layer.bias.abs().max() == 0
        gains.append(round(gain.item(), 2))
    assert gains == [1.41, 1.41, 1.41, 1.41, 1.0, 0.01]


def test_d21_shared_nature_cnn(script):
    """32 of 8 x 8 / 4, 64 of 4 x 4 / 2, 64 of 3 x 3 / 1, 512; policy and value both train them."""
    _, agent, _, batch = recorded(script)
    convolutions = [m for m in agent.trunk if isinstance(m, nn.Conv2d)]
    described = [(c.out_channels, c.kernel_size[0], c.stride[0]) for c in convolutions]
    assert described == [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    assert [m.out_features for m in agent.trunk if isinstance(m, nn.Linear)] == [512]
    assert sum(isinstance(m, nn.ReLU) for m in agent.trunk) == 4
    for output in (0, 2):
        agent.zero_grad()
        agent.evaluate_actions(batch)[output].sum().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in agent.trunk.parameters())


def test_d22_scaling_images_to_0_1(script):
    """Bytes in the rollout, their 255th part in the network."""
    _, agent, _, batch = recorded(script, "Noise")
    assert batch.obs.dtype == batch.next_obs.dtype == torch.uint8
    assert batch.obs.max() > 1
    with torch.no_grad():
        expected = agent.trunk(batch.obs.flatten(0, 1).permute(0, 3, 1, 2) / 255)
        assert torch.allclose(agent.features(batch.obs).flatten(0, 1), expected, atol=1e-5)


def test_one_copy_of_the_frames(script):
    """One buffer holds all T + 1 rows, and what the update flattens is a view of it."""
    _, _, _, batch = recorded(script)
    storage = batch.obs.untyped_storage()
    assert storage.data_ptr() == batch.next_obs.untyped_storage().data_ptr()
    assert storage.nbytes() == 13 * 4 * batch.obs[0, 0].numel()
    assert batch.obs.flatten(0, 1).data_ptr() == batch.obs.data_ptr()


def test_pieces_change_nothing(script):
    """Without gradients, frames go through the network 256 at a time."""
    _, _, agent, _ = build(script)
    obs = torch.randint(0, 256, (2, 150, *agent.obs_shape), dtype=torch.uint8)
    with torch.no_grad():
        pieces = agent.features(obs)
    assert pieces.shape == (2, 150, 512)
    assert torch.allclose(pieces, agent.features(obs), atol=1e-5)


# ---- the LSTM ----
@pytest.mark.scripts(LSTM)
def test_d32_layer_initialization_for_lstm(script):
    _, _, agent, _ = build(script)
    for name, parameter in agent.lstm.named_parameters():
        if "bias" in name:
            assert parameter.abs().max() == 0
        else:
            gram = (
                parameter @ parameter.T if len(parameter) <= parameter.shape[1] else parameter.T @ parameter
            )
            assert torch.allclose(gram, torch.eye(len(gram)), atol=1e-4)


@pytest.mark.scripts(LSTM)
def test_d33_initialize_lstm_states_to_zeros(script):
    args, envs, agent, _ = build(script)
    assert torch.equal(agent.initial_state(3), torch.zeros(2, 3, 128))
    batch = rollout(script, agent, envs, args)
    assert batch.state.abs().max() == 0
    assert batch.starts[0].min() == 1
    assert batch.next_state.abs().max() > 0


def row_by_row(agent, hidden, state, starts):
    """The same as Agent.remember(), one row at a time."""
    outputs = []
    for row, start in zip(hidden, starts, strict=True):
        state = state * (1 - start)[:, None]
        output, (h, c) = agent.lstm(row[None], (state[:1], state[1:]))
        state = torch.cat([h, c])
        outputs.append(output[0])
    return torch.stack(outputs), state


@pytest.mark.scripts(LSTM)
def test_d34_stretches_equal_rows(script):
    """Outputs, last states and gradients agree, with random episode ends."""
    _, _, agent, _ = build(script)
    torch.manual_seed(0)
    for probability in (0.0, 0.05, 0.5, 1.0):
        hidden, state = torch.randn(30, 5, 512, requires_grad=True), torch.randn(2, 5, 128)
        starts = (torch.rand(30, 5) < probability).float()
        results = []
        for run in (agent.remember, lambda *inputs: row_by_row(agent, *inputs)):
            outputs, last = run(hidden, state, starts)
            (gradient,) = torch.autograd.grad((outputs * outputs.detach().cos()).sum(), hidden)
            results.append((outputs, last, gradient))
        for ours, theirs in zip(*results, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.scripts(LSTM)
def test_d34_reset_lstm_states_at_episode_end(script):
    """Const: 8 steps and a filler. The filler is valued with the old state, the row after it with none."""
    args, envs, agent, _ = build(script, num_steps=12, num_minibatches=1)
    batch = script.evaluate_rollout(agent, rollout(script, agent, envs, args), args)
    assert batch.valid[:, 0].tolist() == [1] * 8 + [0] + [1] * 3
    assert batch.starts[:, 0].tolist() == [1] + [0] * 8 + [1, 0, 0]
    # One constant observation: values differ by what the state remembers, and repeat with the episode.
    assert torch.allclose(batch.values[9:12], batch.values[0:3], atol=1e-6)
    assert len({round(v, 6) for v in batch.values[:9, 0].tolist()}) == 9
    following = rollout(script, agent, envs, args, batch)
    assert following.starts[:, 0].tolist() == [0] * 6 + [1] + [0] * 5
    assert torch.equal(following.state, batch.next_state)


@pytest.mark.scripts(LSTM)
def test_d34_starts_after_lost_lives(script):
    """Breakout: a lost life, FIRE as a filler, and then the row that starts the next episode."""
    args, envs, agent, _ = build(script, env_id="Breakout", num_envs=4, num_steps=200, total_timesteps=10**4)
    batch = rollout(script, agent, envs, args)
    starts, valid, dones = batch.starts.bool(), batch.valid.bool(), batch.dones.bool()
    assert not (starts & ~valid).any()
    assert torch.equal(starts[1:] | ~valid[1:], dones[:-1] | ~valid[:-1])
    assert starts.sum() > 10


@pytest.mark.scripts(LSTM)
def test_d35_sequential_rollouts_in_mini_batches(script):
    """Whole sequences of some environments; each environment once per epoch, shuffled anew."""
    args, agent, optimizer, batch = recorded(script, "Noise", num_envs=8, num_minibatches=4, update_epochs=2)
    number = torch.arange(8.0).expand(12, 8).contiguous()
    dealt = []

    def spy(agent, parameters, minibatch, *rest):
        chosen = minibatch.advantages[0].long()
        dealt.append(chosen.tolist())
        for name in ("obs", "actions", "valid", "starts", "state", "logprobs", "values", "returns"):
            assert torch.equal(getattr(minibatch, name), getattr(batch, name)[:, chosen]), name
        return script.ppo_gradient(agent, parameters, minibatch, *rest)

    script.update(agent, optimizer, batch._replace(advantages=number), args, 0.2, spy)
    assert [len(part) for part in dealt] == [2] * 8
    epochs = [np.concatenate(dealt[i : i + 4]).tolist() for i in (0, 4)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(8))
    assert epochs[0] != epochs[1]


@pytest.mark.scripts(LSTM)
def test_d36_reconstruct_lstm_states_during_training(script):
    """From the state before the rollout: a second rollout, in the middle of episodes, is reproduced."""
    args, envs, agent, _ = build(script, "Noise", num_steps=7, num_minibatches=1)
    first = rollout(script, agent, envs, args)
    second = rollout(script, agent, envs, args, first)
    assert second.starts[0].max() == 0
    with torch.no_grad():
        outputs, last = agent.remember(agent.features(second.obs), second.state, second.starts)
        assert torch.allclose(last, second.next_state, atol=1e-5)
        zeroed, _ = agent.remember(agent.features(second.obs), torch.zeros_like(second.state), second.starts)
        assert not torch.allclose(outputs[0], zeroed[0], atol=1e-3)
        values = agent.evaluate_actions(second)[2]
    assert torch.allclose(values, agent.critic(outputs).squeeze(-1), atol=1e-6)
    assert value_of_next(script, agent, second).shape == (4,)


def test_deterministic_actions_are_the_most_likely(script):
    _, agent, _, batch = recorded(script, "Noise", num_minibatches=1)
    with torch.no_grad():
        obs = batch.obs[0]
        actions = act(script, agent, obs, deterministic=True)
        logprobs = [
            agent.evaluate_actions(
                make_batch(script, obs=obs[None], actions=torch.full_like(actions, a)[None])
            )[0]
            for a in (0, 1)
        ]
    assert torch.equal(actions, torch.stack(logprobs).argmax(0)[0])


FAULTS = """
import resource, sys, torch
sys.path.insert(0, sys.argv[1])
import {script}
{call}
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(25_000_000)  # 100 MB, freed at once
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc hands memory back like that")
def test_freed_memory_is_kept(script):
    """What was freed can be got again without a page fault; without the call, only with one for each 4 kB."""
    for call, most in [("", None), (f"{script.__name__}.keep_freed_memory()", 500)]:
        program = FAULTS.format(script=script.__name__, call=call)
        command = [sys.executable, "-c", program, ROOT]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        faults = min(int(number) for number in done.stdout.split())
        assert faults < most if most else faults > 5000
