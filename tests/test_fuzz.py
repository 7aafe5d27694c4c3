"""Bad input, made by a machine: flags at their edges, spaces of all kinds. Faults that it found are plain tests elsewhere.

Each case trains two iterations with finite numbers, or is refused in one sentence that names the flag.
"""

import dataclasses
import math
import typing
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import MULTI, continuous, images, make_args, probe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def cases(number):
    """The same ones each time, however long one takes."""
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


INTEGERS = [-(2**63), -1, 0, 1, 2, 3, 5, 2**31, 2**63, 10**30]
FLOATS = [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1e-5, 0.5, 1.0, 1.5, 1e6, 1e300]
TEXTS = [
    "",
    " ",
    "x",
    "..",
    "a/b",
    "/",
    "x" * 300,
    "é",
    "a\nb",
    "\0",
    "{",
    "[]",
    "null",
    '{"nothing": 1}',
    "-",
    "--x",
]
IDS = [
    "CartPole",
    "CartPole-v99",
    "nowhere:Env-v0",
    "probe_envs:",
    ":",
    "probe_envs:ConstBox-v0",
    "Pendulum-v1",
    "Pong",
]
IDS += ["MicrortsNothing-v1", "FrozenLake-v1", "Blackjack-v1"]


class Enough(Exception):
    """Two iterations have been trained."""


def outcome(script, make) -> str:
    """ "trained" or "refused" for make(), which returns Args; AssertionError for anything in between."""
    iterations = []

    def watch(writer, bar, progress, scalars, episodes):
        iterations.append(scalars)
        if len(iterations) == 2:
            writer.close()
            raise Enough

    original, script.log_iteration = script.log_iteration, watch
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="gymnasium")  # which comments on strange environments
            script.train(make())
    except Enough:
        pass
    except script.BadInput as error:
        assert "--" in str(error), error
        assert "\n" not in str(error), error
        return "refused"
    finally:
        script.log_iteration = original
    assert len(iterations) >= 1
    for scalars in iterations:
        if not all(math.isfinite(v) for k, v in scalars.items() if k != "losses/explained_variance"):
            raise FloatingPointError(scalars)
    return "trained"


def values(script, field) -> st.SearchStrategy:
    """Edge values for a flag."""
    kind = field.type
    optional = type(None) in typing.get_args(kind)
    kind = (
        next((each for each in typing.get_args(kind) if each is not type(None)), kind) if optional else kind
    )
    if typing.get_origin(kind) is typing.Literal:
        options = st.sampled_from(typing.get_args(kind))
    elif kind is bool:
        options = st.booleans()
    elif kind is int:  # so many epochs would be learned, for years
        options = st.sampled_from([n for n in INTEGERS if n != 2**31 or field.name != "update_epochs"])
    elif kind is float:
        options = st.sampled_from(FLOATS)
    else:
        options = st.sampled_from(TEXTS + (IDS if field.name == "env_id" else []))
    return st.none() | options if optional else options


# What takes long, not what is wrong: compiling, films, another game of Java's.
LEFT_OUT = {"compile", "capture_video", "async_envs", "eval_episodes", "cuda"}
# A step size or weight that nobody could learn with may well overflow; the run then says so.
WILD = {"learning_rate", "ent_coef", "vf_coef", "max_grad_norm", "clip_coef"}


@pytest.mark.slow
def test_flags(script):
    flags = {f.name: values(script, f) for f in dataclasses.fields(script.Args) if f.name not in LEFT_OUT}

    @cases(40 if images(script) else 100)
    @given(
        st.lists(st.sampled_from(sorted(flags)), min_size=1, max_size=3, unique=True).flatmap(
            lambda names: st.fixed_dictionaries({name: flags[name] for name in names})
        )
    )
    def check(changes):
        sizes = {
            "num_envs": 2,
            "num_steps": 6,
            "num_minibatches": 2,
            "update_epochs": 1,
            "total_timesteps": 24,
        }
        sizes["torch_threads"] = 1
        try:
            outcome(script, lambda: script.Args(**({"env_id": probe(script, "Clock")} | sizes | changes)))
        except FloatingPointError:
            assert WILD & set(changes), changes

    check()


# ---- spaces ----
DTYPES = [np.float16, np.float32, np.float64, np.int8, np.uint8, np.int64]
LIMITS = [-math.inf, -1e30, -1.0, 0.0, 1.0, 1e30, math.inf]


@st.composite
def boxes(draw):
    """Boxes of any type, shape and limits; also narrow ones, also without elements."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    low, high = sorted(draw(st.lists(st.sampled_from(LIMITS), min_size=2, max_size=2, unique=True)))
    if dtype.kind != "f":
        info = np.iinfo(dtype)
        low, high = (min(max(x, info.min), info.max) for x in (low, high))
    else:
        low, high = (
            np.clip(x, -6e4, 6e4) if dtype == np.float16 and math.isfinite(x) else x for x in (low, high)
        )
    return spaces.Box(np.full(shape, low, dtype), np.full(shape, high, dtype), dtype=dtype)


@st.composite
def frames(draw, channels=(1, 3, 4)):
    """Images of any size."""
    shape = (draw(st.integers(1, 100)), draw(st.integers(1, 100)), draw(st.sampled_from(channels)))
    return spaces.Box(0, 255, shape, np.uint8)


def leaves():
    discrete = st.builds(
        lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)
    )
    multi = st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3))
    matrix = st.builds(
        lambda n, m: spaces.MultiDiscrete(np.full((n, m), 2)), st.integers(1, 2), st.integers(1, 3)
    )
    binary = st.builds(
        spaces.MultiBinary, st.integers(1, 4) | st.tuples(st.integers(1, 3), st.integers(1, 3))
    )
    return boxes() | discrete | multi | matrix | binary | st.builds(spaces.Text, st.integers(1, 5))


def any_space():
    """Leaves, and Dict, Tuple, Sequence, OneOf and Graph of them."""
    return st.recursive(
        leaves(),
        lambda inner: (
            st.builds(lambda a, b: spaces.Dict({"a": a, "b": b}), inner, inner)
            | st.builds(lambda a, b: spaces.Tuple((a, b)), inner, inner)
            | st.builds(spaces.Sequence, inner)
            | st.builds(lambda a, b: spaces.OneOf((a, b)), inner, inner)
            | st.just(spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(2)))
        ),
        max_leaves=3,
    )


class Sampler(gym.Env):
    """Shows samples of one space, insists on actions of another, ends after 3 steps."""

    def __init__(self, observations, actions):
        self.observation_space, self.action_space = observations, actions
        choices = getattr(actions, "nvec", getattr(actions, "n", 1))  # for the script that reads masks
        self.infos = {"action_mask": np.ones(np.sum(choices), np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), self.infos

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 3, False, self.infos


def spaces_of(script) -> st.SearchStrategy:
    """Pairs (observations, actions): those that `script` is made for, and any others."""
    if images(script):
        observations = frames(channels=(3,))
    else:
        observations = st.builds(
            lambda shape, limit: spaces.Box(-limit, limit, tuple(shape), np.float32),
            st.lists(st.integers(1, 4), min_size=1, max_size=2),
            st.sampled_from([1.0, 1e30, np.inf]),
        )
    if continuous(script):
        actions = st.builds(
            lambda n, limit: spaces.Box(-limit, 2 * limit, (n,), np.float32),
            st.integers(1, 4),
            st.sampled_from([0.5, 1.0, 100.0]),
        )
    elif script.__name__ in MULTI:
        actions = st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3))
    else:
        actions = st.builds(spaces.Discrete, st.integers(1, 4), start=st.integers(-2, 2))
    anything = (frames() if images(script) else boxes()) | any_space()
    return st.tuples(observations, actions) | st.tuples(anything, actions) | st.tuples(anything, anything)


@pytest.mark.slow
def test_spaces(script):
    number = 40 if images(script) else 80
    seen = {"trained": 0, "refused": 0}

    @cases(number)
    @given(spaces_of(script))
    def check(pair):
        observations, actions = pair
        gym.register(
            "Sampler-v0", entry_point=Sampler, kwargs={"observations": observations, "actions": actions}
        )
        changes = {
            "env_id": "Sampler-v0",
            "num_envs": 2,
            "num_steps": 6,
            "num_minibatches": 2,
            "update_epochs": 1,
        }
        try:
            seen[outcome(script, lambda: make_args(script, total_timesteps=24, **changes))] += 1
        finally:
            del gym.registry["Sampler-v0"]

    check()
    assert min(seen.values()) >= number // 5, seen
