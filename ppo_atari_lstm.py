"""Proximal policy optimization (PPO) with an LSTM, for Atari games and other image observations.

    python ppo_atari_lstm.py                             # Pong
    python ppo_atari_lstm.py --env-id Breakout --capture-video
    python ppo_atari_lstm.py --env-id CarRacing-v3 --env-kwargs '{"continuous": false}' --no-clip-rewards
    python ppo_atari_lstm.py --help                      # every flag, with its meaning and default

On 2 CPU cores: 580 steps/s.

A row is one step of one environment; in a game, four frames. Fillers are rows whose action is not the
agent's: an environment only resets, because vector environments take a step of their own for that, or FIRE is
pressed after a reset or a lost life. They have valid = 0 and no weight; all other rows are real.
Letters: T steps per rollout (num_steps), N environments (num_envs), n of them in a minibatch, B = T * N rows
of a batch, M = T * n rows of a minibatch, C = 1 frame of an observation, L = 128 numbers from the LSTM, I
iterations. Sections 5 to 8 follow one iteration.

Sources: Schulman et al. 2017, arXiv 1707.06347; openai/baselines at commit ea25b9e, folder ppo2; Huang et al.
2022, "The 37 Implementation Details of Proximal Policy Optimization", which numbers the tags [D01] to [D37];
[A1] to [A3] are auxiliary details.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0",
#   "numpy==2.4.6",
#   "gymnasium[box2d,classic-control]==1.4.0",
#   "ale-py==0.12.1",
#   "opencv-python-headless==5.0.0.93",
#   "tyro==1.0.17",
#   "tensorboard==2.21.0",
#   "tqdm==4.70.1",
#   "moviepy==2.2.1",
# ]
# ///

# ---- 1. Imports ----
import argparse
import atexit
import contextlib
import ctypes
import json
import math
import os
import re
import signal
import sys
import threading
import time
import weakref
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, get_args

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # a later import would keep the process group from being destroyed
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


# ---- 2. Arguments: Args ----
class BadInput(ValueError):
    """A flag or a space that cannot be served, in one sentence; on the command line, exit status 2."""

    def __init__(self, sentence):
        super().__init__(" ".join(sentence.split()))


def num_cores() -> int:
    """CPU cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@dataclass
class Args:
    """Flags, with the values of openai/baselines for Atari as defaults."""

    env_id: str = "Pong"
    """a game (Pong, ALE/Pong-v5, PongNoFrameskip-v4: the same), or a gymnasium id that shows RGB frames"""
    num_envs: int = 8
    """N, environments that step together (in each process)"""
    num_steps: int = 128
    """T, steps per rollout"""
    num_minibatches: int | None = None
    """parts of the batch, one gradient step each; divides N; default the largest divisor of N up to 4"""
    update_epochs: int = 4
    """passes over each batch"""
    learning_rate: float = 2.5e-4
    """step size of Adam at the start"""
    total_timesteps: int = 10_000_000
    """rows to collect, by all processes together; in games, a row is 4 frames"""
    clip_coef: float = 0.1
    """how far the probability ratio may move from 1 before that stops paying; usually 0.1 to 0.3"""
    ent_coef: float = 0.01
    """weight of the entropy bonus; usually 0 to 0.01"""
    repeat_action_probability: float = 0.0
    """sticky actions: probability that the last action is taken again; 0.25 in arXiv 1709.06009"""
    clip_rewards: bool = True
    """learn from the signs of rewards; scores are logged as they are. Without it, try --no-clip-vloss"""
    exp_name: str = Path(__file__).stem
    """name of the experiment, part of the run folder's name"""
    seed: int = 1
    """seed of weights, actions, shuffles and environments"""
    env_kwargs: str = "{}"
    """arguments of the environment as a JSON object: '{"continuous": false}' for CarRacing-v3"""
    async_envs: bool = False
    """run each environment that is no game in a process of its own; worth it where a step is slow"""
    anneal_lr: bool = True
    """lower the learning rate linearly towards 0"""
    anneal_clip: bool = False
    """lower the clip range of policy and value linearly towards 0"""
    gamma: float = 0.99
    """discount per step"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation: 0 trusts the values at once, 1 as late as it can"""
    bootstrap_truncation: bool = True
    """value what a time limit cut off; --no-bootstrap-truncation treats a time limit as a termination"""
    norm_adv: bool = True
    """normalize advantages in each minibatch"""
    clip_vloss: bool = True
    """limit the change of values in the value loss by the clip range, here in units of the returns"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """upper limit for the L2 norm of the gradient"""
    target_kl: float | None = None
    """stop learning from a batch when a minibatch's KL divergence exceeds this; usually 0.01 to 0.05"""
    cuda: bool = True
    """use the GPU if there is one"""
    torch_deterministic: bool = True
    """have cuDNN use reproducible convolutions; its LSTM needs CUBLAS_WORKSPACE_CONFIG=:4096:2 as well"""
    torch_threads: int | None = None
    """CPU threads of PyTorch; default one per core"""
    compile: bool = False
    """compile loss and gradient with torch.compile, which takes half a minute at the start"""
    checkpoint_interval: int = 25
    """iterations between two checkpoints; the end of the run always writes one"""
    resume: str | None = None
    """continue from this checkpoint.pt: its flags are the defaults, what is typed now wins"""
    eval_episodes: int = 0
    """deterministic episodes to play at the end; at least 1 with --capture-video"""
    capture_video: bool = False
    """film the episodes played at the end"""

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and int in (f.type, *get_args(f.type)):  # such as 1e6, in Python
                if value % 1:
                    raise BadInput(f"--{f.name.replace('_', '-')} must be a whole number, not {value}")
                setattr(self, f.name, int(value))

        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if self.resume:
            # In Python, what equals the class's default counts as not given; the command line knows better.
            given = load_checkpoint(self.resume)["args"] | given
            vars(self).update(given)
        given.pop("resume", None)
        self.given = given  # for checkpoints, without what follows from it: a resumed run derives that anew

        ranges = dict.fromkeys(["num_envs", "num_steps"], (1, 10**7)) | {"torch_threads": (1, 1024)}
        counts = ["num_minibatches", "update_epochs", "total_timesteps", "checkpoint_interval"]
        ranges |= dict.fromkeys(counts, (1, 1e15))
        ranges |= dict.fromkeys(["seed", "eval_episodes", "ent_coef", "vf_coef"], (0, 1e15))
        ranges |= dict.fromkeys(["gamma", "gae_lambda"], (0, 1)) | {"repeat_action_probability": (0, 0.99)}
        ranges |= dict.fromkeys(["learning_rate", "clip_coef", "max_grad_norm", "target_kl"], (1e-12, 1e15))
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # NaN is in no range
                raise BadInput(f"--{name.replace('_', '-')} must lie in [{low:g}, {high:g}], not {value}")

        divisors = [n for n in range(1, 5) if self.num_envs % n == 0]
        self.num_minibatches = self.num_minibatches or max(divisors)
        self.torch_threads = self.torch_threads or num_cores()
        self.eval_episodes = max(self.eval_episodes, int(self.capture_video))

        batch = f"--num-envs {self.num_envs} x --num-steps {self.num_steps} in {self.world_size} process(es)"
        if self.num_envs % self.num_minibatches:
            raise BadInput(
                f"--num-minibatches {self.num_minibatches} does not divide --num-envs {self.num_envs}"
            )
        if self.minibatch_size < 2:
            raise BadInput(f"--num-minibatches {self.num_minibatches} leaves fewer than 2 rows each: {batch}")
        if self.num_iterations < 1:
            raise BadInput(f"--total-timesteps {self.total_timesteps} is less than one iteration of {batch}")

    world_size = property(lambda self: int(os.environ.get("WORLD_SIZE", "1")))  # processes, as torchrun says
    batch_size = property(lambda self: self.num_envs * self.num_steps)  # B, rows of a rollout, per process
    minibatch_size = property(lambda self: self.batch_size // self.num_minibatches)  # M
    rows_per_iteration = property(lambda self: self.batch_size * self.world_size)
    num_iterations = property(lambda self: self.total_timesteps // self.rows_per_iteration)  # I


# ---- 3. Environments: make_envs() ----
class EpisodeTracker(gym.vector.VectorWrapper):
    """Holds the current observations, marks fillers, and records score and length of each whole game.

    obs: (N, ...) raw observations, which the coming actions answer
    fillers: (N,) bool, rows of the coming step that are fillers: after the end of a game, the step ignores
    its action and returns the first observation of a new game, with reward 0; then, and after a lost life,
    its action is FIRE
    starts: (N,) bool, rows of the coming step that begin an episode: its first that is no filler
    """

    def __init__(self, envs):
        super().__init__(envs)
        if (mode := envs.metadata.get("autoreset_mode")) != gym.vector.AutoresetMode.NEXT_STEP:
            raise BadInput(f"--env-id: the vector environment resets by {mode}, only NEXT_STEP is served")
        self.games = isinstance(envs.unwrapped, ale_py.AtariVectorEnv)
        names = [action.name for action in envs.unwrapped.ale.get_action_set()] if self.games else []
        self.fire = names.index("FIRE") if "FIRE" in names else None

    def reset(self, *, seed=None, options=None):
        self.obs, infos = self.env.reset(seed=seed, options=options)
        self.lives = infos["lives"] if self.games else np.zeros(self.num_envs, int)
        self.forced = np.full(self.num_envs, self.fire is not None)
        self.fillers = self.forced.copy()
        self.starts = ~self.fillers
        self.returns, self.lengths = np.zeros((2, self.num_envs))  # of the current games
        self.ended = []
        return self.obs, infos

    def step(self, actions):
        # [D17] FireResetEnv: where a game has FIRE, it is pressed after a reset and a lost life. The row is a
        # filler, since its action is not the agent's.
        restarted = self.fillers & ~self.forced
        actions = np.where(self.forced, self.fire, actions) if self.forced.any() else actions
        self.obs, rewards, terminations, truncations, infos = self.env.step(actions)
        self.returns += rewards
        self.lengths += 1
        over, lives = terminations | truncations, infos["lives"] if self.games else self.lives
        # [D16] EpisodicLifeEnv: a lost life terminates the episode that is learned from, while the game goes
        # on and frames stay in the stack. Some games show 0 lives for a while before they end; then the end
        # counts.
        life_lost = (lives < self.lives) & (lives > 0)
        terminations |= life_lost
        self.lives = np.where(over, 0, lives)  # a new game may have less than one that was cut off
        self.forced = (restarted | life_lost & ~over) & (self.fire is not None)
        were_fillers, self.fillers = self.fillers, over | self.forced
        # An episode begins after its fillers, or at once after a lost life where there is no FIRE.
        self.starts = (were_fillers | life_lost) & ~self.fillers
        if over.any():
            self.ended.append(np.stack([self.returns, self.lengths], axis=1)[over])
            self.returns[over], self.lengths[over] = 0, -1  # the filler is no step of theirs
        return self.obs, rewards, terminations, truncations, infos

    def pop_episodes(self) -> np.ndarray:
        """(episodes, 2): raw score and length of each game that ended since the last call."""
        episodes, self.ended = np.concatenate([np.zeros((0, 2)), *self.ended]), []
        return episodes


def parse_env_kwargs(args) -> dict:
    """--env-kwargs, parsed. Raises BadInput unless it is a JSON object."""
    try:
        return {**json.loads(args.env_kwargs)}
    except (ValueError, TypeError) as error:
        raise BadInput(f"--env-kwargs must be a JSON object, not {args.env_kwargs}") from error


@contextlib.contextmanager
def ignored_interrupts():
    """Processes started in here ignore Ctrl-C and SIGTERM: these may reach all, and this one handles them."""
    in_main_thread = threading.current_thread() is threading.main_thread()  # Python sets handlers only there
    both = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
    previous = {each: signal.signal(each, signal.SIG_IGN) for each in both}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


class ColorTwin(gym.vector.VectorWrapper):
    """Adds render(): frames in color, from a twin with the same seed that takes the same actions."""

    render_mode = "rgb_array"

    def __init__(self, envs, twin):
        super().__init__(envs)
        self.twin = twin

    def reset(self, *, seed=None, options=None):
        self.frames, _ = self.twin.reset(seed=seed, options=options)
        return self.env.reset(seed=seed, options=options)

    def step(self, actions):
        self.frames = self.twin.step(actions)[0]
        return self.env.step(actions)

    def render(self):
        return list(self.frames[:, -1])


def make_games(args, game, num_envs, height=84, width=84, grayscale=True, stack=1):
    """The vector environment of ale-py, which plays `num_envs` games in threads.

    Lives are left to EpisodeTracker and clipping to Agent: ale-py's episodic_life would start a new game
    after each lost life, its life_loss_info would hide which row follows, and clipped rewards are no scores.
    A game is cut off after 108,000 frames; --env-kwargs has max_num_frames_per_episode for that.
    """
    return ale_py.AtariVectorEnv(
        game,
        num_envs,
        num_threads=min(num_envs, num_cores()),
        repeat_action_probability=args.repeat_action_probability,
        batch_size=num_envs,
        autoreset_mode="NextStep",
        # [D14] NoopResetEnv: a game starts after 0 to 29 frames without action.
        noop_max=30,
        # [D15] MaxAndSkipEnv: an action lasts 4 frames, whose rewards are added. What is seen is the maximum
        # of the last two, because many games draw some things in every other frame only.
        frameskip=4,
        maxpool=True,
        # [D18] WarpFrame: 84 x 84 pixels, gray.
        img_height=height,
        img_width=width,
        grayscale=grayscale,
        # [D20] FrameStack: 4 frames, since one does not show what moves; with an LSTM, which remembers, 1.
        stack_num=stack,
        episodic_life=False,
        life_loss_info=False,
        reward_clipping=False,
        use_fire_reset=False,  # it presses for one frame, which sticky actions may swallow
        **parse_env_kwargs(args),
    )


def adapt(env, args, film):
    """The environment with gray frames of 84 x 84, stacks of 1. `film`: arguments of RecordVideo, or None.

    Raises BadInput unless it shows RGB frames.
    """
    if isinstance(env.unwrapped, ale_py.AtariEnv):
        raise BadInput(f"--env-id {args.env_id}: write games as Pong, ALE/Pong-v5 or PongNoFrameskip-v4")
    space = env.observation_space
    if len(space.shape or ()) != 3 or space != gym.spaces.Box(0, 255, (*space.shape[:2], 3), np.uint8):
        raise BadInput(f"--env-id {args.env_id}: observations must be uint8 frames (H, W, 3), not {space}")
    if film:
        env = gym.wrappers.RecordVideo(env, **film)
    env = gym.wrappers.StickyAction(env, args.repeat_action_probability)
    env = gym.wrappers.ResizeObservation(gym.wrappers.GrayscaleObservation(env), (84, 84))
    return gym.wrappers.FrameStackObservation(env, 1)


def make_vec(args, num_envs, video_folder=None):
    """The vector environment, as ale-py or gymnasium makes it."""
    gym.register_envs(ale_py)
    spec = gym.registry.get(f"ALE/{args.env_id}-v5") or gym.registry.get(args.env_id)
    film = None
    if video_folder:
        film = {"video_folder": str(video_folder), "episode_trigger": lambda episode: True}
    if spec is not None and spec.entry_point == "ale_py.env:AtariEnv":
        if args.async_envs:
            raise BadInput("--async-envs is for other environments: ale-py has threads of its own")
        game = spec.kwargs["game"]
        envs = make_games(args, game, num_envs)
        if film:
            envs = ColorTwin(envs, make_games(args, game, num_envs, 210, 160, grayscale=False, stack=1))
            envs = gym.wrappers.vector.RecordVideo(envs, fps=15, **film)  # 60 frames per second by 4
        return envs
    wrappers = [lambda env: adapt(env, args, film)]
    kwargs = parse_env_kwargs(args) | ({"render_mode": "rgb_array"} if film else {})
    if args.async_envs and not film:
        with ignored_interrupts():
            envs = gym.make_vec(args.env_id, num_envs, "async", wrappers=wrappers, **kwargs)
        ref = weakref.ref(envs)  # at its end, Python would send SIGTERM to open ones and wait for ever
        atexit.register(lambda: ref() and ref().close())
        return envs
    return gym.make_vec(args.env_id, num_envs, "sync", wrappers=wrappers, **kwargs)


def make_envs(args, num_envs, seed, video_folder=None):
    """A vector environment, reset with `seed`, that knows its fillers: see EpisodeTracker.

    With a `video_folder`, films every game into it. Raises BadInput for what cannot be made or served.
    """
    try:
        with contextlib.closing(make_vec(args, 1)) as one:  # before many are made
            if not isinstance(one.single_action_space, gym.spaces.Discrete):
                raise BadInput(
                    f"--env-id {args.env_id}: actions must be Discrete, not {one.single_action_space}"
                )
        envs = EpisodeTracker(make_vec(args, num_envs, video_folder))
        envs.reset(seed=seed)
    except BadInput:
        raise
    except Exception as error:
        if video_folder:  # a missing renderer may raise anything
            raise BadInput(f"--capture-video: cannot film {args.env_id}: {error}") from error
        if isinstance(error, gym.error.Error | ImportError) or args.env_id.startswith(":"):
            raise BadInput(f"--env-id {args.env_id}: {error}") from error
        of_arguments = TypeError | ValueError | OSError | ArithmeticError | AssertionError
        if isinstance(error, of_arguments) and parse_env_kwargs(args):
            raise BadInput(f"--env-kwargs {args.env_kwargs}: {str(error) or repr(error)}") from error
        raise
    return envs


EVALUATION = 2**32 - 1  # used in place of a rank, so that evaluation gets seeds of its own


def derive_seed(*numbers) -> int:
    """A seed of 30 bits, hashed from the numbers.

    Most vector environments give environment i seed + i: runs 1 and 2 would share all environments but one.
    """
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 2)


# ---- 4. Networks: Agent ----
def layer_init(layer, std=2**0.5):
    """The layer, with weights orthogonal times `std` and biases 0."""
    # [D02] Orthogonal initialization and constant biases: gain sqrt(2) in hidden layers, 1 for the value,
    # 0.01 for the policy, so that it hardly depends on the observation at first.
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value function. It alone knows dtype and shape of observations and actions.

    observe() and merge_normalizers() are for running statistics; here there are none.
    """

    def __init__(self, envs, args):
        super().__init__()
        shape = tuple(envs.single_observation_space.shape)  # (C, 84, 84)
        self.obs_shape, self.obs_dtype = (*shape[1:], shape[0]), torch.uint8
        self.action_shape, self.action_dtype = (), torch.int64
        space = {"n": int(envs.single_action_space.n), "start": int(envs.single_action_space.start)}
        self.first_action, self.clip_rewards = space["start"], args.clip_rewards
        # What this method reads of `envs`, as plain values: load_agent() has no environments.
        self.spaces = {"single_observation_space": {"shape": shape}, "single_action_space": space}
        # First, so that cuDNN finds its weights where our flatten_parameters() starts.
        self.lstm = nn.LSTM(512, 128)
        # [D32] Layer initialization for LSTM: weights orthogonal with gain 1, those of all gates as one
        # matrix; biases 0.
        for parameter in self.lstm.parameters():
            nn.init.orthogonal_(parameter) if parameter.ndim > 1 else nn.init.zeros_(parameter)
        # [D21] Shared Nature-CNN: three convolutions and a layer of 512, which policy and value both train.
        self.trunk = nn.Sequential(
            *(layer_init(nn.Conv2d(shape[0], 32, 8, stride=4)), nn.ReLU(inplace=True)),
            *(layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(inplace=True)),
            *(layer_init(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(inplace=True), nn.Flatten()),
            *(layer_init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(inplace=True)),
        )
        self.critic = layer_init(nn.Linear(128, 1), std=1.0)
        self.actor = layer_init(nn.Linear(128, space["n"]), std=0.01)

    def features(self, obs) -> Tensor:
        """(..., 84, 84, C) -> (..., 512)"""
        frames = obs.flatten(0, -4).movedim(-1, 1)  # (rows, C, 84, 84), the channel still last in memory
        # Without gradients, pieces keep the activations of a whole rollout from being in memory at once.
        pieces = [frames] if torch.is_grad_enabled() else frames.split(256)
        # [D22] Scaling images to [0, 1]: here, so that a rollout holds bytes. Changing these floats and the
        # inputs of ReLU in place saves a seventh of an update on a CPU.
        return torch.cat([self.trunk(x.float().div_(255)) for x in pieces]).unflatten(0, obs.shape[:-3])

    def initial_state(self, n) -> Tensor:
        """(2, n, L) hidden and cell states."""
        # [D33] Initialize LSTM states to zeros: nothing has been seen yet.
        return torch.zeros(2, n, self.lstm.hidden_size, device=self.critic.weight.device)

    @torch.compiler.disable  # would compile each number of stretches anew; backward stays out, too
    def remember(self, features, state, starts) -> tuple[Tensor, Tensor]:
        """T steps of the LSTM: (T, n, 512), (2, n, L), (T, n) -> outputs (T, n, L) and the next state.

        Each call of the LSTM takes the rows up to the next in which any of the n sequences starts an episode.
        """
        cuts = (starts[1:].any(1).nonzero().flatten() + 1).tolist()
        outputs = []
        for stretch, start in zip(features.tensor_split(cuts), starts[[0, *cuts]], strict=True):
            # [D34] Reset LSTM states at episode end: at the first row of the next episode, not at the filler
            # before it, which still shows the last observation: after a time limit its value counts, and
            # needs the old state.
            state = state * (1 - start).unsqueeze(-1)
            output, state = self.lstm(stretch, tuple(state[:, None]))
            state = torch.cat(state)
            outputs.append(output)
        return torch.cat(outputs), state

    def normalize(self, raw_obs) -> Tensor:
        """(n, C, 84, 84) from the environments -> the same bytes as (n, 84, 84, C), on the agent's device."""
        # With the channel as the last index in memory, convolutions on a CPU take two thirds of the time.
        return torch.as_tensor(raw_obs, device=self.critic.weight.device).permute(0, 2, 3, 1)

    def observe(self, raw_obs, valid) -> Tensor:
        """normalize(), for the observations of a rollout."""
        return self.normalize(raw_obs)

    def scale_rewards(self, rewards, dones, valid) -> np.ndarray:
        """(N,) raw rewards -> (N,) rewards to learn from."""
        # [D19] ClipRewardEnv: the sign of the reward, so that one learning rate suits all games.
        return np.sign(rewards) if self.clip_rewards else rewards

    def merge_normalizers(self):
        """Nothing to merge here."""

    def get_value(self, obs, state, starts) -> Tensor:
        """(n, 84, 84, C), (2, n, L), (n,) -> (n,)"""
        outputs, _ = self.remember(self.features(obs)[None], state, starts[None])
        return self.critic(outputs[0]).squeeze(-1)

    def act(self, obs, state, starts, deterministic=False) -> tuple[Tensor, Tensor]:
        """(n, 84, 84, C), (2, n, L), (n,) -> actions (n,), sampled or the most likely; the next state."""
        starts = torch.as_tensor(starts, dtype=torch.float32, device=obs.device)
        outputs, state = self.remember(self.features(obs)[None], state, starts[None])
        logits = self.actor(outputs[0])  # (n, actions)
        if not deterministic:
            # Minus the log of Exp(1) is Gumbel noise; the argmax of logits + noise samples the softmax.
            logits = logits - torch.empty_like(logits).exponential_().log()
        return logits.argmax(-1), state

    def env_actions(self, actions) -> np.ndarray:
        """Actions as the environments take them."""
        return actions.cpu().numpy() + self.first_action

    def evaluate_actions(self, batch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of batch.actions, entropies and values, each in the shape of batch.valid."""
        # [D36] Reconstruct LSTM states during training: by the current weights, from the state before the
        # rollout, which stays as earlier weights left it.
        outputs, _ = self.remember(self.features(batch.obs), batch.state, batch.starts)  # (T, n, L)
        all_logprobs = self.actor(outputs).log_softmax(-1)  # (..., actions)
        logprobs = all_logprobs.gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1)
        entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return logprobs, entropies, self.critic(outputs).squeeze(-1)


# ---- 5. Experience: rollout() ----
class Rollout(NamedTuple):
    """What T steps in N environments gave; as a minibatch, n environments and of them what the loss reads."""

    obs: Tensor  # (T, N, *obs_shape) normalized
    actions: Tensor  # (T, N, *action_shape) as sampled
    valid: Tensor  # (T, N) float32, 0 on fillers, 1 on real rows
    starts: Tensor  # (T, N) float32, 1 on the first row of an episode, fillers aside
    state: Tensor  # (2, N, L) of the LSTM, before the first step
    rewards: Tensor | None = None  # (T, N) float32, to learn from
    terminations: Tensor | None = None  # (T, N) float32, 1 where an episode ended by the rules of its task
    dones: Tensor | None = None  # (T, N) float32, 1 where it ended by them or by a time limit
    next_obs: Tensor | None = None  # (N, *obs_shape) normalized, what the last step led to
    next_state: Tensor | None = None  # (2, N, L) of the LSTM, before that row
    logprobs: Tensor | None = None  # (T, N) float32, of the policy that acted
    values: Tensor | None = None  # (T, N) float32, before learning from this rollout
    advantages: Tensor | None = None  # (T, N) float32
    returns: Tensor | None = None  # (T, N) float32, targets of the value function


def rollout(agent, envs, args, state) -> Rollout:
    """Acts for T steps in all environments, from `state` (2, N, L) of the LSTM on."""
    T, N, device = args.num_steps, envs.num_envs, next(agent.parameters()).device
    obs = torch.zeros((T + 1, N, *agent.obs_shape), dtype=agent.obs_dtype, device=device)
    actions = torch.zeros((T, N, *agent.action_shape), dtype=agent.action_dtype, device=device)
    columns = np.zeros((5, T, N), np.float32)
    rewards, terminations, dones, valid, starts = columns
    first_state = state
    with torch.inference_mode():
        # [D01] Vectorized architecture: N environments take T steps each, from where the last rollout
        # stopped; long episodes are learned from piece by piece.
        for t in range(T):
            valid[t] = ~envs.fillers
            obs[t] = agent.observe(envs.obs, valid[t])
            starts[t] = envs.starts
            actions[t], state = agent.act(obs[t], state, envs.starts)
            _, raw_rewards, terminations[t], truncations, _ = envs.step(agent.env_actions(actions[t]))
            dones[t] = np.maximum(terminations[t], truncations)
            rewards[t] = agent.scale_rewards(raw_rewards, dones[t], valid[t])
        obs[T] = agent.normalize(envs.obs)
    rewards, terminations, dones, valid, starts = torch.as_tensor(columns, device=device)
    known = {"rewards": rewards, "terminations": terminations, "dones": dones}
    return Rollout(obs[:T], actions, valid, starts, first_state, **known, next_obs=obs[T], next_state=state)


# ---- 6. Advantages: gae(), evaluate_rollout() ----
def gae(rewards, values, terminations, dones, gamma, gae_lambda) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both (T, N), of Schulman et al. 2016, arXiv 1506.02438, equation 16.

    rewards, terminations, dones: (T, N); values: (T+1, N), of which the last row is that of next_obs.
    """
    # [D05] Generalized advantage estimation: what follows a termination is worth 0, what a time limit cut off
    # is worth the value of the last observation; later rewards flow back across neither.
    deltas = rewards + gamma * values[1:] * (1 - terminations) - values[:-1]  # (T, N)
    decay = gamma * gae_lambda * (1 - dones)  # (T, N)
    advantages, advantage = [], torch.zeros_like(rewards[0])  # from the last step back, (N,) each
    for delta, weight in zip(deltas.flip(0), decay.flip(0), strict=True):
        advantage = delta + weight * advantage
        advantages.append(advantage)
    advantages = torch.stack(advantages).flip(0)  # (T, N)
    return advantages, advantages + values[:-1]


@torch.no_grad()
def evaluate_rollout(agent, batch, args) -> Rollout:
    """The rollout with logprobs, values, advantages and returns filled in; to be called before any update.

    One pass over all rows, not T small ones: acting needs only the action, and the policy is still the same.
    """
    logprobs, _, values = agent.evaluate_actions(batch)  # (T, N)
    no_starts = torch.zeros_like(batch.starts[0])  # the value of a next episode would not be used
    next_values = agent.get_value(batch.next_obs, batch.next_state, no_starts)
    values = torch.cat([values, next_values[None]])  # (T+1, N)
    ends = batch.terminations if args.bootstrap_truncation else batch.dones
    advantages, returns = gae(batch.rewards, values, ends, batch.dones, args.gamma, args.gae_lambda)
    return batch._replace(logprobs=logprobs, values=values[:-1], advantages=advantages, returns=returns)


# ---- 7. Loss: ppo_loss(), ppo_gradient() ----
NAMES = "policy_loss value_loss entropy old_approx_kl approx_kl clipfrac grad_norm explained_variance"
DEBUG = [f"losses/{name}" for name in NAMES.split()]  # six from ppo_loss(), the last two from update()


def ppo_loss(agent, batch, clip_coef, args) -> tuple[Tensor, Tensor]:
    """The loss of one minibatch, and its debug variables (6,) in the order of DEBUG.

    All means are over real rows. clip_coef is a tensor: torch.compile would compile anew for each new float.
    """
    weights = batch.valid / batch.valid.sum().clamp(min=1)  # as valid, with sum 1, or 0 without real rows
    logprobs, entropies, values = agent.evaluate_actions(batch)
    log_ratio = logprobs - batch.logprobs
    ratio = log_ratio.exp()

    advantages = batch.advantages
    if args.norm_adv:
        # [D07] Normalization of advantages: per minibatch, not per batch.
        advantages = advantages - (advantages * weights).sum()
        advantages = advantages / ((advantages.square() * weights).sum().sqrt() + 1e-8)

    # [D08] Clipped surrogate objective: a ratio that left the clip range on the side that pays gets no
    # gradient; one that left it on the other side is still called back.
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    policy_losses = -torch.minimum(advantages * ratio, advantages * clipped_ratio)

    squared_errors = (values - batch.returns).square()
    if args.clip_vloss:
        # [D09] Value function loss clipping: the larger of two errors, one of them with the value clipped to
        # a range around the old one. The range is in units of the returns: large ones are learned slowly.
        clipped_values = batch.values + (values - batch.values).clamp(-clip_coef, clip_coef)
        squared_errors = torch.maximum(squared_errors, (clipped_values - batch.returns).square())

    # [D12] Debug variables: means over all minibatches of an iteration; many ports log only the last one. The
    # KL divergence is estimated twice, by k1 and k3 of joschu.net/blog/kl-approx.html; k3 is never negative.
    with torch.no_grad():
        debugs = [-log_ratio, ratio - 1 - log_ratio, ((ratio - 1).abs() > clip_coef).float()]
    terms = torch.stack([policy_losses, 0.5 * squared_errors, entropies, *debugs])
    means = terms.flatten(1) @ weights.flatten()  # (6,)

    # [D10] Overall loss and entropy bonus: one loss, and so one optimizer, for policy and value.
    policy_loss, value_loss, entropy = means[:3]
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    return loss, means.detach()


def ppo_gradient(agent, parameters, batch, clip_coef, args) -> tuple[Tensor, Tensor]:
    """Of ppo_loss(), the gradient in one vector, in the order of the parameters, and the debug variables."""
    loss, debug = ppo_loss(agent, batch, clip_coef, args)
    gradients = torch.autograd.grad(loss, parameters)
    return torch.cat([gradient.flatten() for gradient in gradients]), debug


# ---- 8. Learning: update() ----
def update(agent, optimizer, batch, args, clip_coef, gradient_fn=ppo_gradient) -> dict[str, float]:
    """Learns from one rollout, in epochs of minibatch gradient steps; returns the debug variables."""
    device, (flat,) = batch.valid.device, optimizer.param_groups[0]["params"]
    parameters = list(agent.parameters())  # all of them parts of `flat`
    unread = dict.fromkeys(["rewards", "terminations", "dones", "next_obs", "next_state"])  # by the loss
    columns = batch._replace(**unread)  # in each, the second index is that of the environment
    clip_coef, debugs, steps = torch.tensor(clip_coef, device=device), [], 0
    # [D06] Mini-batch updates: in each epoch all rows, shuffled, are dealt into num_minibatches parts.
    # [D35] Sequential rollouts in mini-batches: here environments are dealt, each with its T rows in order.
    shuffles = (torch.randperm(args.num_envs, device=device) for _ in range(args.update_epochs))
    for chosen in (part for shuffle in shuffles for part in shuffle.tensor_split(args.num_minibatches)):
        minibatch = Rollout(*(None if x is None else x.index_select(1, chosen) for x in columns))
        gradient, debug = gradient_fn(agent, parameters, minibatch, clip_coef, args)
        if dist.is_initialized():
            # [A2] Parallelized gradient update: the mean over the real rows of all processes. P processes
            # with N environments step as one with P * N, but each normalizes its own advantages.
            sums = torch.cat([debug, gradient, torch.ones(1, device=device)]) * minibatch.valid.sum()
            dist.all_reduce(sums)
            averaged = sums[:-1] / sums[-1].clamp(min=1)
            debug, gradient = averaged.split([len(debug), len(gradient)])
        # [D11] Global gradient clipping: by one norm over all parameters.
        grad_norm = gradient.norm()
        flat.grad = gradient * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1)
        debugs.append(torch.cat([debug, grad_norm[None]]))
        # [A3] Early stopping of the policy optimizations: the step that would lead even further is not taken.
        if args.target_kl is not None and debug[DEBUG.index("losses/approx_kl")] > args.target_kl:
            break
        optimizer.step()
        steps += 1
    real = batch.valid > 0  # of this process: explained variance is not averaged over processes
    errors, returns = (x[real] - x[real].mean() for x in (batch.returns - batch.values, batch.returns))
    explained_variance = 1 - errors.square().sum() / returns.square().sum()
    means = torch.cat([torch.stack(debugs).mean(0), explained_variance[None]]).tolist()
    return dict(zip(DEBUG, means, strict=True)) | {"losses/gradient_steps": steps}


# ---- 9. What was learned: evaluate_policy(), save_checkpoint(), load_checkpoint(), load_agent() ----
@torch.inference_mode()
def evaluate_policy(agent, envs, num_episodes, max_steps=100_000) -> list[float]:
    """Raw returns of deterministic episodes in one environment, which leave the agent as it is.

    Fewer than num_episodes come back if they take more than max_steps each on average.
    """
    returns, state = [], agent.initial_state(1)
    for _ in range(max_steps * num_episodes):
        actions, state = agent.act(agent.normalize(envs.obs), state, envs.starts, deterministic=True)
        envs.step(agent.env_actions(actions))
        returns += envs.pop_episodes()[:, 0].tolist()
        if len(returns) == num_episodes:
            break
    return returns


def on_cpu(x):
    """Dicts, lists, tensors and plain values, the tensors on the CPU: torch.load() opens them anywhere."""
    if isinstance(x, dict):
        return {key: on_cpu(value) for key, value in x.items()}
    return [on_cpu(value) for value in x] if isinstance(x, list) else x.cpu() if isinstance(x, Tensor) else x


def save_checkpoint(path, agent, optimizer, args, progress):
    """Writes what load_agent() and --resume need; whoever is killed here leaves the old file or the new."""
    state = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "spaces": agent.spaces}
    state |= {"args": args.given, "progress": progress, "rng": torch.get_rng_state()}
    state["cuda_rng"] = torch.cuda.get_rng_state() if next(agent.parameters()).is_cuda else None
    torch.save(on_cpu(state), f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def load_checkpoint(path) -> dict:
    """What save_checkpoint() wrote, on the CPU. Raises BadInput where there is nothing of the kind."""
    names = ("agent", "optimizer", "spaces", "args", "progress", "rng", "cuda_rng")
    try:
        checkpoint = torch.load(path, map_location="cpu")
        return {name: checkpoint[name] for name in names}
    except Exception as error:  # whatever a file can be instead
        raise BadInput(f"--resume {path}: cannot be read as a checkpoint: {error!r}") from error


def load_agent(path) -> Agent:
    """The agent of a checkpoint, without gradients. With envs of make_envs(), which press FIRE:

    actions, state = agent.act(agent.normalize(envs.obs), state, envs.starts, deterministic=True)
    envs.step(agent.env_actions(actions))

    At first, state is agent.initial_state(n) for n environments.
    """
    checkpoint = load_checkpoint(path)
    spaces = {name: SimpleNamespace(**space) for name, space in checkpoint["spaces"].items()}
    values = {f.name: f.default for f in fields(Args)} | checkpoint["args"]
    agent = Agent(SimpleNamespace(**spaces), SimpleNamespace(**values))
    if agent.spaces != checkpoint["spaces"]:
        raise BadInput(f"{path} is of another script")
    agent.load_state_dict(checkpoint["agent"])
    return agent.requires_grad_(False)


# ---- 10. Training: train() ----
def keep_freed_memory():
    """Has glibc keep it: getting the memory of images back, page by page, slows training by 6%."""
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: hands nothing back
        libc.mallopt(-4, 0)  # M_MMAP_MAX: maps no block by itself, to be handed back when it is freed


def start_process(args) -> tuple[int, torch.device]:
    """Rank and device of this process; joins the others if torchrun started several."""
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            raise BadInput("--cuda: this machine has fewer GPUs than processes; add --no-cuda")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if args.world_size > 1 and not dist.is_initialized():
        # nccl averages gradients on GPUs; gloo carries what is on the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        # Else a thread of gloo that still holds a tensor when Python ends would abort the process.
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.set_num_threads(args.torch_threads)
    keep_freed_memory()
    return int(os.environ.get("RANK", "0")), device


def gather(x) -> list:
    """The x of every process, in order of rank."""
    everyone = [x] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(everyone, x)
    return everyone


@contextlib.contextmanager
def noted_signals():
    """Yields a list to which Ctrl-C or SIGTERM adds its number; the same again ends the process, unsaved."""
    noted = []

    def note(number, frame):
        noted.append(number)
        signal.signal(number, signal.SIG_DFL)

    in_main_thread = threading.current_thread() is threading.main_thread()  # Python sets handlers only there
    previous = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM) if in_main_thread}
    try:
        yield noted
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def flatten_parameters(agent) -> nn.Parameter:
    """One vector, of which all parameters become parts: one tensor to clip the gradient of and to step.

    The agent must not be moved afterwards, which would take its parameters out of the vector.
    """
    flat = nn.Parameter(nn.utils.parameters_to_vector(agent.parameters()).detach())
    nn.utils.vector_to_parameters(flat.detach(), agent.parameters())
    return flat


def build(args, rank, device, saved, iterations_done) -> tuple:
    """Environments, agent, optimizer: new, or as in the checkpoint `saved`."""
    envs = make_envs(args, args.num_envs, derive_seed(args.seed, rank, iterations_done))
    torch.manual_seed(args.seed)  # the same weights in every process
    agent = Agent(envs, args).to(device)
    # [D03] Adam epsilon 1e-5: with PyTorch's 1e-8, parameters with tiny gradients would take full steps.
    optimizer = torch.optim.Adam([flatten_parameters(agent)], lr=args.learning_rate, eps=1e-5, fused=True)
    torch.manual_seed(derive_seed(args.seed, rank, iterations_done))  # other actions and shuffles in each
    if saved:
        if saved["spaces"] != agent.spaces or saved["agent"].keys() != agent.state_dict().keys():
            envs.close()
            raise BadInput(f"--resume {args.resume}: is of another script, or {args.env_id} has other spaces")
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        if rank == 0:  # whose random numbers were saved
            torch.set_rng_state(saved["rng"])
            if device.type == "cuda" and saved["cuda_rng"] is not None:
                torch.cuda.set_rng_state(saved["cuda_rng"])
    if dist.is_initialized():  # machines may round initial weights differently
        for tensor in agent.state_dict().values():
            dist.broadcast(tensor, 0)
    return envs, agent, optimizer


def open_run(args, envs, agent) -> tuple:
    """Makes the run folder, its TensorBoard writer and the environment of the evaluation; prints the plan."""
    name = re.sub(r"[^\w.-]", "-", f"{args.env_id}__{args.exp_name}", flags=re.ASCII)[:200]  # legal anywhere
    folder = Path("runs", f"{name}__{args.seed}__{time.time_ns() // 10**6}")
    folder.mkdir(parents=True)
    (folder / Path(__file__).name).write_bytes(Path(__file__).read_bytes())
    eval_envs = None
    if args.eval_episodes:  # made now, so that a missing renderer is noticed before training
        films = folder / "videos" if args.capture_video else None
        eval_envs = make_envs(args, 1, derive_seed(args.seed, EVALUATION), films)
    writer = SummaryWriter(folder)
    writer.add_text("args", "\n".join(f"    {f.name}: {getattr(args, f.name)}" for f in fields(args)))
    device = next(agent.parameters()).device
    print(f"{args.env_id} by {type(envs.unwrapped).__name__}, learning on {device}; logs in {folder}")
    size = (args.batch_size + args.num_envs) * math.prod(agent.obs_shape) * agent.obs_dtype.itemsize
    batch = f"{args.num_envs} envs x {args.num_steps} steps = {args.batch_size:,} rows per iteration"
    learning = f"{args.update_epochs} epochs x {args.num_minibatches} minibatches of {args.minibatch_size:,}"
    gradients = args.update_epochs * args.num_minibatches  # per iteration
    processes = f" in each of {args.world_size} processes" if args.world_size > 1 else ""
    rate = f"learning rate {args.learning_rate:.3g}{' annealed' if args.anneal_lr else ''}"
    iterations = f"{args.num_iterations:,} iterations = {args.num_iterations * gradients:,} gradients; {rate}"
    print(f"{batch} (observations: {size / 1e6:,.1f} MB); {learning} = {gradients:,} gradients{processes}")
    print(iterations, flush=True)
    return folder, writer, eval_envs


def log_iteration(writer, bar, progress, scalars, episodes):
    """One set of scalars, one move of the progress bar."""
    if len(episodes):
        scalars["charts/episodic_return"], scalars["charts/episodic_length"] = episodes.mean(0)
    for name, value in scalars.items():
        writer.add_scalar(name, value, progress["global_step"])
    returns, speed = progress["recent_returns"], f"{scalars['charts/SPS']:,.0f} steps/s"
    mean_return = f"{np.mean(returns):.5g}" if returns else "unknown (no episode has ended)"
    bar.set_postfix_str(f"step {progress['global_step']:,}, {speed}, return {mean_return}", refresh=False)
    bar.update()


def train(args) -> dict:
    """Trains as `args` says and leaves a run folder behind; returns the final numbers.

    episodic_return: mean raw return of the last max(100, P * N) episodes, or None; global_step: real rows;
    sps: those of this call per second; checkpoint: its path; eval_returns: list; signal: what ended it, or 0.
    Raises BadInput for what cannot be served, FloatingPointError when a loss or gradient is not finite.
    """
    rank, device = start_process(args)
    saved = load_checkpoint(args.resume) if args.resume else None
    # Rows, fillers included, are what --total-timesteps counts; global_step counts real rows, for the logs.
    progress = saved["progress"] if saved else {"rows": 0, "global_step": 0, "recent_returns": []}
    iterations_done, first_step = progress["rows"] // args.rows_per_iteration, progress["global_step"]
    if iterations_done >= args.num_iterations and not args.eval_episodes:
        raise BadInput(f"--resume {args.resume}: all --total-timesteps {args.total_timesteps} are done")
    envs, agent, optimizer = build(args, rank, device, saved, iterations_done)
    with contextlib.closing(envs), noted_signals() as noted:
        uneven = args.batch_size % args.num_minibatches > 0  # else minibatches have one shape to compile for
        if args.compile:
            torch._dynamo.config.trace_autograd_ops = True  # so that the backward pass is compiled, too
        gradient_fn = torch.compile(ppo_gradient, dynamic=uneven) if args.compile else ppo_gradient
        folder, writer, eval_envs = open_run(args, envs, agent) if rank == 0 else (None, None, None)
        if rank == 0 and saved:
            print(f"resumed at step {first_step:,}; the environments start new episodes", flush=True)
        bar = tqdm(total=args.num_iterations, initial=iterations_done, unit="iteration", disable=rank > 0)
        signal_number, checkpoint, eval_returns, started = 0, args.resume, [], time.perf_counter()
        state = agent.initial_state(args.num_envs)
        for iteration in range(iterations_done + 1, args.num_iterations + 1):
            iteration_started = time.perf_counter()
            remaining = 1 - (iteration - 1) / args.num_iterations
            # [D04] Adam learning rate annealing: linear, all of it in iteration 1, 1/I of it in iteration I.
            learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1)
            optimizer.param_groups[0]["lr"] = learning_rate
            # [A1] Clip range annealing: in the same way, for policy and value.
            clip_coef = args.clip_coef * (remaining if args.anneal_clip else 1)

            batch = rollout(agent, envs, args, state)
            state = batch.next_state
            agent.merge_normalizers()
            batch = evaluate_rollout(agent, batch, args)
            debug = update(agent, optimizer, batch, args, clip_coef, gradient_fn)

            report = int(batch.valid.count_nonzero()), envs.pop_episodes(), max(noted, default=0)
            steps, episodes, signals = zip(*gather(report), strict=True)
            episodes, signal_number = np.concatenate(episodes), max(signals)
            progress["rows"] = iteration * args.rows_per_iteration
            progress["global_step"] += sum(steps)
            # As many as environments, at least 100: short episodes end first and would count for more.
            returns = progress["recent_returns"] + episodes[:, 0].tolist()
            progress["recent_returns"] = returns[-max(100, args.num_envs * args.world_size) :]
            if rank == 0:
                sps = sum(steps) / (time.perf_counter() - iteration_started)
                charts = {"charts/SPS": sps, "charts/learning_rate": learning_rate}
                log_iteration(writer, bar, progress, charts | debug, episodes)
            # Explained variance alone may be 0 / 0, where all returns are equal.
            if not all(math.isfinite(debug[name]) for name in DEBUG[:-1]):
                if writer is not None:  # so that the log shows what was not finite
                    writer.close()
                raise FloatingPointError(f"stopped: iteration {iteration} is not finite in all of {debug}")
            last = iteration == args.num_iterations or signal_number
            if rank == 0 and (last or iteration % args.checkpoint_interval == 0):
                checkpoint = str(folder / "checkpoint.pt")
                save_checkpoint(checkpoint, agent, optimizer, args, progress)
            if signal_number:
                break
        bar.close()
    sps = (progress["global_step"] - first_step) / (time.perf_counter() - started)
    if eval_envs is not None and not signal_number:
        eval_returns = evaluate_policy(agent, eval_envs, args.eval_episodes)
        mean = np.mean(eval_returns) if eval_returns else math.nan
        writer.add_scalar("eval/episodic_return", mean, progress["global_step"])
        print(f"{len(eval_returns)} of {args.eval_episodes} deterministic episodes, mean return {mean:.5g}")
    for resource in filter(None, (eval_envs, writer)):
        resource.close()
    returns = progress["recent_returns"]
    result = {"episodic_return": float(np.mean(returns)) if returns else None, "sps": sps}
    result |= {"global_step": progress["global_step"], "checkpoint": checkpoint}
    return result | {"eval_returns": eval_returns, "signal": signal_number}


# ---- 11. Command line ----
def parse_args() -> Args:
    """Args from the command line; with --resume, the flags of the checkpoint are the defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    first, rest = parser.parse_known_args()
    saved = load_checkpoint(first.resume)["args"] if first.resume else {}
    defaults = Args.__new__(Args)  # unchecked: what is typed now may still change them
    vars(defaults).update({f.name: f.default for f in fields(Args)} | saved)
    args = tyro.cli(Args, args=rest, default=defaults)
    args.resume = first.resume
    return args


if __name__ == "__main__":
    try:
        signal_number = train(parse_args())["signal"]
    except BadInput as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(128 + signal_number if signal_number else 0)
