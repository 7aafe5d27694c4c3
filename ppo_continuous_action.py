"""Proximal policy optimization (PPO) for continuous actions and vector observations, complete in this file.

    python ppo_continuous_action.py                       # HalfCheetah-v5
    python ppo_continuous_action.py --num-envs 4096       # the same task, from 4,096 environments at once
    python ppo_continuous_action.py --env-id Hopper-v5 --eval-episodes 10 --capture-video
    python ppo_continuous_action.py --help                # every flag, with its meaning and default

Seed 1 on 2 CPU cores: the second command takes 7 minutes for 18.3M steps and ends at a mean return of 4,781,
in deterministic episodes 5,614. The first, with --backend gymnasium, ended at 1,708 (1,955) after 1M steps.

A row is one step of one environment. Fillers are rows in which an environment only resets: gymnasium's vector
environments take a step of their own for that. They have valid = 0 and no weight; all others are real rows.
Letters: T steps per rollout (num_steps), N environments (num_envs), B = T * N rows of a batch, M rows of a
minibatch, D numbers of an observation, A of an action, I iterations. Sections 5 to 8 follow one iteration.

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
#   "mujoco==4.0.0",
#   "envpool==1.2.5",
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
import json
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
import weakref
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple, get_args

import envpool
import gymnasium as gym
import mujoco.rollout
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
    """Flags. Where a default None follows from N, the line says how; P processes multiply g by P."""

    env_id: str = "HalfCheetah-v5"
    """gymnasium id of the environment; module:Env-v0 imports the module that registers it"""
    num_envs: int = 1
    """N, environments that step together (in each process)"""
    num_steps: int | None = None
    """T, steps per rollout; default 2048 / N, at least 32: beyond N = 64 the batch grows by g = N / 64"""
    num_minibatches: int | None = None
    """parts of the batch, one gradient step each; default 32"""
    samples_per_env: int | None = None
    """instead of --num-minibatches: steps per environment in a minibatch, on average; M is N times that"""
    update_epochs: int | None = None
    """passes over each batch; default 10, or 5 if g exceeds 1"""
    learning_rate: float | None = None
    """step size of Adam at the start; default 3e-4, times g^(1/4)"""
    total_timesteps: int | None = None
    """rows to collect, by all processes together; default 1,000,000, times g^0.7"""
    clip_coef: float = 0.2
    """how far the probability ratio may move from 1 before that stops paying; usually 0.1 to 0.3"""
    ent_coef: float = 0.0
    """weight of the entropy bonus; usually 0 to 0.01"""
    norm_obs: bool = True
    """normalize observations by their running mean and variance"""
    norm_reward: bool = True
    """divide rewards by the running standard deviation of the discounted return"""
    normalizer_samples: int | None = None
    """freeze both normalizers once they have seen this many real rows; default never"""
    backend: Literal["auto", "gymnasium", "envpool", "mujoco"] = "auto"
    """auto: mujoco for HalfCheetah-, Hopper-, Swimmer- and Walker2d-v5 with their own xml_file, all N in one
    call; envpool for other ids that it knows if N is at least 8 and there are no --env-kwargs, and for those
    that only it knows; else, and with --async-envs, gymnasium. Backends differ in details"""
    exp_name: str = Path(__file__).stem
    """name of the experiment, part of the run folder's name"""
    seed: int = 1
    """seed of weights, actions, shuffles and environments"""
    env_kwargs: str = "{}"
    """arguments of the environment as a JSON object: '{"ctrl_cost_weight": 0.05}' for HalfCheetah-v5"""
    async_envs: bool = False
    """run each gymnasium environment in a process of its own; worth it where a step is slow"""
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
    """use the GPU if there is one; with small networks and few environments the CPU may be faster"""
    torch_deterministic: bool = True
    """have cuDNN, which computes convolutions on a GPU, use reproducible algorithms only"""
    torch_threads: int | None = None
    """CPU threads of PyTorch; default 1, or one per core for minibatches of 16,384 rows and more"""
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
        ranges |= dict.fromkeys([*counts, "normalizer_samples", "samples_per_env"], (1, 1e15))
        ranges |= dict.fromkeys(["seed", "eval_episodes", "ent_coef", "vf_coef"], (0, 1e15))
        ranges |= dict.fromkeys(["gamma", "gae_lambda"], (0, 1))
        ranges |= dict.fromkeys(["learning_rate", "clip_coef", "max_grad_norm", "target_kl"], (1e-12, 1e15))
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # NaN is in no range
                raise BadInput(f"--{name.replace('_', '-')} must lie in [{low:g}, {high:g}], not {value}")

        g = self.world_size * max(1.0, self.num_envs / 64)  # with the default T, B grows by g
        self.num_steps = self.num_steps or max(32, 2048 // self.num_envs)
        if per_env := self.samples_per_env:
            self.num_minibatches = self.num_minibatches or self.num_steps // per_env
            if per_env * self.num_minibatches != self.num_steps:
                product = f"--samples-per-env {per_env} x --num-minibatches {self.num_minibatches}"
                raise BadInput(f"{product} is not --num-steps {self.num_steps}")
        self.num_minibatches = self.num_minibatches or 32
        self.update_epochs = self.update_epochs or (10 if g == 1 else 5)
        self.learning_rate = self.learning_rate or 3e-4 * g**0.25
        self.total_timesteps = self.total_timesteps or round(1_000_000 * g**0.7)
        self.torch_threads = self.torch_threads or (num_cores() if self.minibatch_size >= 16_384 else 1)
        self.eval_episodes = max(self.eval_episodes, int(self.capture_video))

        batch = f"--num-envs {self.num_envs} x --num-steps {self.num_steps} in {self.world_size} process(es)"
        if self.minibatch_size < 2:
            raise BadInput(f"--num-minibatches {self.num_minibatches} leaves fewer than 2 rows each: {batch}")
        if self.num_iterations < 1:
            raise BadInput(f"--total-timesteps {self.total_timesteps} is less than one iteration of {batch}")

    world_size = property(lambda self: int(os.environ.get("WORLD_SIZE", "1")))  # processes, as torchrun says
    batch_size = property(lambda self: self.num_envs * self.num_steps)  # B, rows of a rollout, per process
    minibatch_size = property(lambda self: self.batch_size // self.num_minibatches)  # M, in some parts M + 1
    rows_per_iteration = property(lambda self: self.batch_size * self.world_size)
    num_iterations = property(lambda self: self.total_timesteps // self.rows_per_iteration)  # I


# ---- 3. Environments: make_envs() ----
class EpisodeTracker(gym.vector.VectorWrapper):
    """Holds the current observations, marks fillers, and records return and length of each episode.

    obs: (N, ...) raw observations, which the coming actions answer
    fillers: (N,) bool, rows of the coming step that are fillers: the step after the end of an episode ignores
    its action and returns the first observation of a new episode, with reward 0
    """

    def __init__(self, envs):
        super().__init__(envs)
        if (mode := envs.metadata.get("autoreset_mode")) != gym.vector.AutoresetMode.NEXT_STEP:
            raise BadInput(f"--env-id: the vector environment resets by {mode}, only NEXT_STEP is served")

    def reset(self, *, seed=None, options=None):
        self.obs, infos = self.env.reset(seed=seed, options=options)
        self.fillers = np.zeros(self.num_envs, bool)
        self.returns, self.lengths = np.zeros((2, self.num_envs))  # of the current episodes
        self.ended = []
        return self.obs, infos

    def step(self, actions):
        self.obs, rewards, terminations, truncations, infos = self.env.step(actions)
        rewards = np.where(self.fillers, 0, rewards)  # some vector environments reward a reset
        self.returns += rewards
        self.lengths += 1
        self.fillers = np.logical_or(terminations, truncations)
        if self.fillers.any():
            self.ended.append(np.stack([self.returns, self.lengths], axis=1)[self.fillers])
            self.returns[self.fillers], self.lengths[self.fillers] = 0, -1  # the filler is no step of theirs
        return self.obs, rewards, terminations, truncations, infos

    def pop_episodes(self) -> np.ndarray:
        """(episodes, 2): raw return and length of each that ended since the last call."""
        episodes, self.ended = np.concatenate([np.zeros((0, 2)), *self.ended]), []
        return episodes


def check_spaces(env_id, envs):
    """Raises BadInput unless observations flatten to vectors and actions are real numbers."""
    observations, actions = envs.single_observation_space, envs.single_action_space
    if not isinstance(actions, gym.spaces.Box) or actions.dtype.kind != "f" or 0 in actions.shape:
        raise BadInput(f"--env-id {env_id}: actions must be a Box of floating-point numbers, not {actions}")
    frames = observations.dtype == np.uint8 and len(observations.shape) >= 2
    if frames or len(observations.shape or ()) >= 3:
        raise BadInput(f"--env-id {env_id}: observations must be vectors, not images: {observations}")
    try:
        flat = gym.spaces.flatten_space(observations).shape if observations.is_np_flattenable else (0,)
    except ValueError:  # gymnasium's, for some spaces with an empty part
        flat = (0,)
    if 0 in flat:
        raise BadInput(f"--env-id {env_id}: observations do not flatten to vectors: {observations}")


def parse_env_kwargs(args) -> dict:
    """--env-kwargs, parsed. Raises BadInput unless it is a JSON object."""
    try:
        return {**json.loads(args.env_kwargs)}
    except (ValueError, TypeError) as error:
        raise BadInput(f"--env-kwargs must be a JSON object, not {args.env_kwargs}") from error


# Tasks in a plane: observation, reward and end follow from positions, velocities and action. What stands in
# gymnasium's code of each: limit of observed velocities, whether the first ones have normal noise.
PLANAR = {
    "HalfCheetah-v5": (math.inf, True),
    "Hopper-v5": (10, False),
    "Swimmer-v5": (math.inf, False),
    "Walker2d-v5": (10, False),
}


class PlanarMujoco(gym.vector.VectorEnv):
    """The tasks of PLANAR, stepped together: an environment is one row of states, a thread has one MjData.

    Model and constants are those of gymnasium's environment. mujoco.rollout starts the solver of each call
    anew, not from the last result: states differ within its tolerance, which contacts magnify.
    """

    def __init__(self, env_id, num_envs, kwargs):
        made = gym.make(env_id, **kwargs)
        self.one, self.max_steps = made.unwrapped, made.spec.max_episode_steps or math.inf
        self.max_velocity, self.normal = PLANAR[env_id]
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = made.observation_space, made.action_space
        self.observation_space = gym.vector.utils.batch_space(made.observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(made.action_space, num_envs)
        model = self.one.model
        threads = max(1, min(num_cores(), num_envs // 8))  # fewer rows are not worth a thread
        self.models, self.datas = [model] * num_envs, [mujoco.MjData(model) for _ in range(threads)]
        self.threads = mujoco.rollout.Rollout(nthread=threads if threads > 1 else 0)  # 0: the calling one
        size = 1 + model.nq + model.nv  # time, positions (the first is x), velocities
        self.trajectories = np.zeros((num_envs, self.one.frame_skip, size))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.states = self.first_states(self.num_envs)
        self.steps, self.over = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        return self.observations(), {}

    def step(self, actions):
        one, before = self.one, self.states[:, 1]
        controls = np.repeat(actions[:, None].astype(np.float64), one.frame_skip, axis=1)
        inputs = self.models, self.datas, self.states, controls
        self.threads.rollout(*inputs, nstep=one.frame_skip, state=self.trajectories, skip_checks=True)
        self.states = self.trajectories[:, -1].copy()
        rewards = one._forward_reward_weight * (self.states[:, 1] - before) / one.dt
        rewards -= one._ctrl_cost_weight * np.square(actions).sum(1)
        terminations, self.steps = np.zeros(self.num_envs, bool), self.steps + 1
        if hasattr(one, "_healthy_reward"):
            healthy = self.healthy()
            rewards += one._healthy_reward * healthy
            terminations = ~healthy & bool(one._terminate_when_unhealthy)
        truncations = self.steps >= self.max_steps
        if (fillers := self.over).any():
            self.states[fillers] = self.first_states(fillers.sum())
            for each in (rewards, terminations, truncations, self.steps):
                each[fillers] = 0
        self.over = terminations | truncations
        return self.observations(), rewards, terminations, truncations, {}

    def first_states(self, n) -> np.ndarray:
        """(n, 1 + positions + velocities)"""
        one, scale = self.one, self.one._reset_noise_scale
        positions = one.init_qpos + self.np_random.uniform(-scale, scale, (n, len(one.init_qpos)))
        size, rng = (n, len(one.init_qvel)), self.np_random
        noise = rng.normal(0, scale, size) if self.normal else rng.uniform(-scale, scale, size)
        return np.concatenate([np.zeros((n, 1)), positions, one.init_qvel + noise], axis=1)

    def observations(self) -> np.ndarray:
        """(N, positions + velocities), without the first positions, which the task hides."""
        first_velocity = 1 + len(self.one.init_qpos)
        positions = self.states[:, 1 + self.one.observation_structure["skipped_qpos"] : first_velocity]
        velocities = self.states[:, first_velocity:].clip(-self.max_velocity, self.max_velocity)
        return np.concatenate([positions, velocities], axis=1)

    def healthy(self) -> np.ndarray:
        """(N,) bool: height, angle and, of a Hopper, the rest of the state are in their ranges."""
        (z_low, z_high), (angle_low, angle_high) = self.one._healthy_z_range, self.one._healthy_angle_range
        low, high = getattr(self.one, "_healthy_state_range", (-math.inf, math.inf))
        z, angle, rest = self.states[:, 2], self.states[:, 3], self.states[:, 3:]
        upright = (z_low < z) & (z < z_high) & (angle_low < angle) & (angle < angle_high)
        return upright & ((low < rest) & (rest < high)).all(axis=1)

    def close_extras(self, **kwargs):
        self.threads.close()
        self.one.close()


def choose_backend(args) -> str:
    """What steps the environments. Raises BadInput where it was asked for and cannot."""
    in_envpool = args.env_id in envpool.list_all_envs()
    other_model = "xml_file" in parse_env_kwargs(args)  # which may have more state
    planar = args.env_id in PLANAR and not other_model
    if not {"auto": True, "gymnasium": True, "envpool": in_envpool, "mujoco": planar}.get(args.backend):
        model = " with another xml_file" if other_model else ""
        raise BadInput(f"--backend {args.backend} does not know --env-id {args.env_id}{model}")
    only_there = in_envpool and args.env_id not in gym.registry
    if only_there and args.capture_video:
        raise BadInput(f"--capture-video needs gymnasium, which does not know --env-id {args.env_id}")
    backend = args.backend
    if backend == "auto":
        many = args.num_envs >= 8 and args.env_kwargs == "{}"
        backend = "mujoco" if planar else "envpool" if in_envpool and many else "gymnasium"
        backend = "envpool" if only_there else "gymnasium" if args.async_envs else backend
    if args.async_envs and backend != "gymnasium":
        raise BadInput(f"--async-envs is for gymnasium: {backend} has threads of its own")
    return backend


@contextlib.contextmanager
def quiet_mujoco():
    """Silences what MuJoCo 4 says of gymnasium's models, on stderr and in a file, here and in forks."""
    previous = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda text: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(previous)


class Pool(gym.vector.VectorObservationWrapper):
    """A pool of envpool, with the spaces of a vector environment and with Dict observations flattened."""

    def __init__(self, pool):
        super().__init__(pool)
        with warnings.catch_warnings(action="ignore"):  # of gymnasium, on the precision of envpool's bounds
            space, actions = pool.single_observation_space, pool.single_action_space
        self.keys = list(space) if isinstance(space, gym.spaces.Dict) else []
        if not all(isinstance(space[key], gym.spaces.Box) for key in self.keys):
            raise BadInput(f"--backend envpool: observations have parts other than Box: {space}")
        self.single_observation_space = gym.spaces.flatten_space(space) if self.keys else space
        # A pool states both spaces for one environment only.
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        if isinstance(actions, gym.spaces.Box):  # of 64 bits; envpool takes 32 as well, which gymnasium has
            actions = gym.spaces.Box(actions.low.astype("f4"), actions.high.astype("f4"))
        self.single_action_space = actions
        self.action_space = gym.vector.utils.batch_space(actions, self.num_envs)

    def reset(self, *, seed=None, options=None):
        return super().reset()  # it was seeded when it was made, and warns of another seed

    def observations(self, observations):
        if not self.keys:
            return observations
        return np.concatenate([observations[key].reshape(self.num_envs, -1) for key in self.keys], axis=1)


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


@quiet_mujoco()
def make_vec(args, num_envs, seed, video_folder=None):
    """The vector environment as one of the backends makes it."""
    kwargs = parse_env_kwargs(args)
    if video_folder:
        film = {"video_folder": str(video_folder), "episode_trigger": lambda episode: True}
        wrappers = [lambda env: gym.wrappers.RecordVideo(env, **film)]
        kwargs["render_mode"] = "rgb_array"
        return gym.make_vec(args.env_id, num_envs, "sync", wrappers=wrappers, **kwargs)
    backend = choose_backend(args)
    if backend == "mujoco":
        return PlanarMujoco(args.env_id, num_envs, kwargs)
    if num_envs >= 512:
        print(f"building {num_envs} environments ...", flush=True)
    if backend == "envpool":  # which seeds its environments now, not when they are reset
        kwargs |= {"num_envs": num_envs, "num_threads": min(num_envs, num_cores()), "seed": seed}
        return Pool(envpool.make_gymnasium(args.env_id, **kwargs))
    if args.async_envs:
        with ignored_interrupts():
            envs = gym.make_vec(args.env_id, num_envs, "async", **kwargs)
        ref = weakref.ref(envs)  # at its end, Python would send SIGTERM to open ones and wait for ever
        atexit.register(lambda: ref() and ref().close())
        return envs
    return gym.make_vec(args.env_id, num_envs, **kwargs)


def make_envs(args, num_envs, seed, video_folder=None):
    """A vector environment, reset with `seed`, that knows its fillers: see EpisodeTracker.

    With a `video_folder`, films every episode into it. Raises BadInput for what cannot be made or served.
    """
    try:
        with contextlib.closing(make_vec(args, 1, seed)) as one:  # before many are made
            check_spaces(args.env_id, one)
        envs = make_vec(args, num_envs, seed, video_folder)
        if not isinstance(envs.single_observation_space, gym.spaces.Box):
            envs = gym.wrappers.vector.FlattenObservation(envs)
        envs = EpisodeTracker(envs)
        envs.reset(seed=seed)
    except BadInput:
        raise
    except Exception as error:
        if video_folder:  # a missing renderer may raise anything
            hint = "without a screen, set the environment variable MUJOCO_GL=egl"
            raise BadInput(f"--capture-video: cannot film {args.env_id}: {error} ({hint})") from error
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


def hidden_layers(num_inputs) -> nn.Sequential:
    """Two layers of 64 tanh units."""
    layers = [layer_init(nn.Linear(num_inputs, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()]
    return nn.Sequential(*layers)


class RunningMoments(nn.Module):
    """Mean and variance of all real rows seen, as buffers in float64, so that checkpoints hold them."""

    def __init__(self, shape, max_samples):
        super().__init__()
        self.max_samples, self.at_last_merge = max_samples or math.inf, None
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64))  # sum of squared deviations

    def _apply(self, fn, recurse=True):
        return self  # stays on the CPU, where observations and rewards arrive

    def update(self, x, valid):
        """Adds the rows of x (n, *shape) where valid (n,) is 1 (Chan et al. 1979, for many rows at once)."""
        if self.at_last_merge is None:
            self.at_last_merge = self.count.clone(), self.mean.clone(), self.m2.clone()
        count, mean, m2 = self.count.numpy(), self.mean.numpy(), self.m2.numpy()  # views of the buffers
        rows = x if valid.all() else x[valid > 0]
        if len(rows) and count < self.max_samples:
            rows_mean = rows.sum(0) / len(rows)
            shift, share = rows_mean - mean, len(rows) / (count + len(rows))
            m2 += ((rows - rows_mean) ** 2).sum(0) + shift**2 * (count * share)
            mean += shift * share
            count += len(rows)

    def merge(self):
        """Adds what the other processes have seen since the last merge."""
        if dist.is_initialized() and self.at_last_merge is not None:
            count, mean, m2 = self.at_last_merge  # which every process had: summed over all, it is kept once
            surplus = dist.get_world_size() - 1
            counts, sums = total = torch.stack([self.count.expand_as(self.mean), self.count * self.mean])
            dist.all_reduce(total)
            new_count = counts - surplus * count
            new_mean = (sums - surplus * count * mean) / new_count
            squares = self.m2 + self.count * (self.mean - new_mean).square()
            dist.all_reduce(squares)
            self.m2.copy_(squares - surplus * (m2 + count * (mean - new_mean).square()))
            self.mean.copy_(new_mean)
            self.count.copy_(new_count.flatten()[0])
        self.at_last_merge = None

    @property
    def std(self) -> np.ndarray:
        """(*shape), 1 before anything was seen."""
        count = self.count.item()
        return np.sqrt(self.m2.numpy() / count + 1e-8) if count else np.ones_like(self.mean.numpy())


class Agent(nn.Module):
    """Policy and value function. It alone knows dtype and shape of observations and actions."""

    def __init__(self, envs, args):
        super().__init__()
        num_inputs = math.prod(envs.single_observation_space.shape)
        self.obs_shape, self.obs_dtype = (num_inputs,), torch.float32
        box, self.space_dtype = envs.single_action_space, np.dtype(envs.single_action_space.dtype)
        self.low, self.high = np.array(box.low, self.space_dtype), np.array(box.high, self.space_dtype)
        self.action_shape, self.action_dtype = (self.low.size,), torch.float32
        # What this method reads of `envs`, as plain values: load_agent() has no environments.
        space = {"low": self.low.tolist(), "high": self.high.tolist(), "dtype": self.space_dtype.name}
        self.spaces = {"single_observation_space": {"shape": self.obs_shape}, "single_action_space": space}
        # [D13] Shared and separate MLP networks: two designs. Separate networks keep policy and value from
        # disturbing each other; a shared one, called trunk, lets each use what the other has learned.
        self.critic = nn.Sequential(*hidden_layers(num_inputs), layer_init(nn.Linear(64, 1), std=1.0))
        # [D26] Separate MLP networks for continuous control: the default of openai/baselines for MuJoCo.
        output = layer_init(nn.Linear(64, *self.action_shape), std=0.01)
        self.actor = nn.Sequential(*hidden_layers(num_inputs), output)
        # [D24] State-independent log standard deviation: one parameter per component, the same in all states.
        self.log_std = nn.Parameter(torch.zeros(self.action_shape))
        self.norm_obs, self.norm_reward, self.gamma = args.norm_obs, args.norm_reward, args.gamma
        self.obs_moments = RunningMoments(self.obs_shape, args.normalizer_samples)
        self.return_moments = RunningMoments((), args.normalizer_samples)
        self.discounted_returns = np.zeros(args.num_envs)  # of the current episodes

    def normalize(self, raw_obs) -> Tensor:
        """(n, ...) from the environments -> (n, D) for the networks."""
        obs = np.asarray(raw_obs, np.float64).reshape(len(raw_obs), -1)
        if self.norm_obs:
            # [D29] Observation clipping: to [-10, 10], after normalizing.
            obs = np.clip((obs - self.obs_moments.mean.numpy()) / self.obs_moments.std, -10, 10)
        return torch.as_tensor(obs, dtype=self.obs_dtype, device=self.log_std.device)

    def observe(self, raw_obs, valid) -> Tensor:
        """normalize(), after statistics learned from the rows with valid (n,) = 1."""
        if self.norm_obs:
            # [D28] Normalization of observation: by one running mean and variance over all environments.
            self.obs_moments.update(np.asarray(raw_obs, np.float64).reshape(len(raw_obs), -1), valid)
        return self.normalize(raw_obs)

    def scale_rewards(self, rewards, dones, valid) -> np.ndarray:
        """(N,) raw rewards -> (N,) rewards to learn from."""
        if not self.norm_reward:
            return rewards
        # [D30] Reward scaling: divided by the standard deviation of the discounted return; no mean is
        # subtracted.
        returns = self.discounted_returns  # changed in place
        returns *= self.gamma
        returns += rewards
        self.return_moments.update(returns, valid)
        returns *= 1 - dones
        # [D31] Reward clipping: to [-10, 10], after scaling.
        return np.clip(rewards / self.return_moments.std, -10, 10)

    def merge_normalizers(self):
        """Lets all processes share their statistics."""
        self.obs_moments.merge()
        self.return_moments.merge()

    def get_value(self, obs) -> Tensor:
        """(n, D) -> (n,)"""
        return self.critic(obs).squeeze(-1)

    def bounded_log_std(self) -> Tensor:
        """(A,), in [-10, 10], beyond which it gets no gradient: exponentials must not overflow or vanish."""
        return self.log_std.clamp(-10, 10)

    def act(self, obs, deterministic=False) -> Tensor:
        """(n, D) -> (n, A), sampled or the means; not clipped."""
        means = self.actor(obs)  # (n, A)
        return means if deterministic else means + self.bounded_log_std().exp() * torch.randn_like(means)

    def env_actions(self, actions) -> np.ndarray:
        """Actions as the environments take them."""
        # [D27] Action clipping and storage: the environment receives the clipped action, the rollout keeps
        # the sample, whose log-probability is known.
        actions = actions.cpu().numpy().astype(self.space_dtype).reshape(-1, *self.low.shape)
        return np.clip(actions, self.low, self.high)

    def evaluate_actions(self, batch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of batch.actions, entropies and values, each in the shape of batch.valid."""
        log_std = self.bounded_log_std()
        # [D23] Continuous actions via normal distributions: the mean is the actor's output.
        deviations = (batch.actions - self.actor(batch.obs)) / log_std.exp()  # (..., A)
        logprobs = -0.5 * deviations.square() - log_std - 0.5 * math.log(2 * math.pi)
        # [D25] Independent action components: joint log-probability and entropy are sums over components.
        logprobs, entropy = logprobs.sum(-1), (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return logprobs, entropy.expand_as(logprobs), self.get_value(batch.obs)


# ---- 5. Experience: rollout() ----
class Rollout(NamedTuple):
    """What T steps in N environments gave; as a minibatch, M rows of what the loss reads, the rest None."""

    obs: Tensor  # (T, N, *obs_shape) normalized
    actions: Tensor  # (T, N, *action_shape) as sampled
    valid: Tensor  # (T, N) float32, 0 on fillers, 1 on real rows
    rewards: Tensor | None = None  # (T, N) float32, to learn from
    terminations: Tensor | None = None  # (T, N) float32, 1 where an episode ended by the rules of its task
    dones: Tensor | None = None  # (T, N) float32, 1 where it ended by them or by a time limit
    next_obs: Tensor | None = None  # (N, *obs_shape) normalized, what the last step led to
    logprobs: Tensor | None = None  # (T, N) float32, of the policy that acted
    values: Tensor | None = None  # (T, N) float32, before learning from this rollout
    advantages: Tensor | None = None  # (T, N) float32
    returns: Tensor | None = None  # (T, N) float32, targets of the value function


def rollout(agent, envs, args) -> Rollout:
    """Acts for T steps in all environments."""
    T, N, device = args.num_steps, envs.num_envs, next(agent.parameters()).device
    obs = torch.zeros((T + 1, N, *agent.obs_shape), dtype=agent.obs_dtype, device=device)
    actions = torch.zeros((T, N, *agent.action_shape), dtype=agent.action_dtype, device=device)
    columns = np.zeros((4, T, N), np.float32)
    rewards, terminations, dones, valid = columns
    with torch.inference_mode():
        # [D01] Vectorized architecture: N environments take T steps each, from where the last rollout
        # stopped; long episodes are learned from piece by piece.
        for t in range(T):
            valid[t] = ~envs.fillers
            obs[t] = agent.observe(envs.obs, valid[t])
            actions[t] = agent.act(obs[t])
            _, raw_rewards, terminations[t], truncations, _ = envs.step(agent.env_actions(actions[t]))
            dones[t] = np.maximum(terminations[t], truncations)
            rewards[t] = agent.scale_rewards(raw_rewards, dones[t], valid[t])
        obs[T] = agent.normalize(envs.obs)
    rewards, terminations, dones, valid = torch.as_tensor(columns, device=device)
    return Rollout(obs[:T], actions, valid, rewards, terminations, dones, next_obs=obs[T])


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

    In few large pieces, not T small ones: acting needs only the action, and the policy is still the same.
    """
    inputs = batch.obs, batch.actions, batch.valid  # of evaluate_actions()
    pieces = zip(*(x.flatten(0, 1).split(2048) for x in inputs), strict=True)  # to fit in caches
    parts = zip(*(agent.evaluate_actions(Rollout(*piece)) for piece in pieces), strict=True)
    logprobs, _, values = (torch.cat(part).view_as(batch.valid) for part in parts)  # (T, N)
    values = torch.cat([values, agent.get_value(batch.next_obs)[None]])  # (T+1, N)
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
    unread = dict.fromkeys(["rewards", "terminations", "dones", "next_obs"])  # by the loss
    columns = [None if x is None else x.flatten(0, 1) for x in batch._replace(**unread)]  # (B, ...) each
    clip_coef, debugs, steps = torch.tensor(clip_coef, device=device), [], 0
    # [D06] Mini-batch updates: in each epoch all rows, shuffled, are dealt into num_minibatches parts.
    shuffles = (torch.randperm(args.batch_size, device=device) for _ in range(args.update_epochs))
    for rows in (part for shuffle in shuffles for part in shuffle.tensor_split(args.num_minibatches)):
        minibatch = Rollout(*(None if x is None else x.index_select(0, rows) for x in columns))
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
    returns = []
    for _ in range(max_steps * num_episodes):
        envs.step(agent.env_actions(agent.act(agent.normalize(envs.obs), deterministic=True)))
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
    """The agent of a checkpoint, without gradients. For raw observations (n, ...) of n environments:

    actions = agent.act(agent.normalize(raw_obs), deterministic=True)
    envs.step(agent.env_actions(actions))
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
        for iteration in range(iterations_done + 1, args.num_iterations + 1):
            iteration_started = time.perf_counter()
            remaining = 1 - (iteration - 1) / args.num_iterations
            # [D04] Adam learning rate annealing: linear, all of it in iteration 1, 1/I of it in iteration I.
            learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1)
            optimizer.param_groups[0]["lr"] = learning_rate
            # [A1] Clip range annealing: in the same way, for policy and value.
            clip_coef = args.clip_coef * (remaining if args.anneal_clip else 1)

            batch = rollout(agent, envs, args)
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
