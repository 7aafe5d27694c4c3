"""Small environments with known answers, registered when this module is imported: --env-id probe_envs:Const-v0.

Values at gamma 0.9 once learned: Const 10.0 (an endless stream of 1, cut by a time limit every 8 steps), Both 3.71 at
lambda 0.95, where each episode truly ends after 8 steps.
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def box(low=-1.0, high=1.0, shape=(1,), dtype=np.float32):
    return spaces.Box(low, high, shape, dtype)


ACTIONS = {
    "two": spaces.Discrete(2),
    "box": box(),
    "start": spaces.Discrete(3, start=-1),
    "asymmetric": spaces.Box(np.array([0, -5], np.float32), np.array([3, 10], np.float32)),
    "float64": box(-0.1, 0.1, (2,), np.float64),
    "unbounded": box(-np.inf, np.inf, (2,)),
    "half": spaces.Box(np.float32([0, 0]), np.float32([1, np.inf])),
    "matrix": box(shape=(2, 2)),
    "scalar": box(shape=()),
    "integers": spaces.Box(0, 255, (2,), np.uint8),
    "multi": spaces.MultiDiscrete([2, 3]),
    "matrix_multi": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "masked": spaces.MultiDiscrete([3, 4]),
    "start_multi": spaces.MultiDiscrete([2, 3], start=[-1, 5]),
}
OBSERVATIONS = {
    "vector": box(),
    "scalar": box(shape=()),
    "matrix": box(shape=(2, 3)),
    "float64": box(-1e9, 1e9, (3,), np.float64),
    "ram": spaces.Box(0, 255, (128,), np.uint8),
    "discrete": spaces.Discrete(5, start=2),
    "binary": spaces.MultiBinary(4),
    "multi": spaces.MultiDiscrete([2, 3]),
    "dict": spaces.Dict({"a": box(), "b": spaces.Discrete(3)}),
    "tuple": spaces.Tuple((box(shape=(2,)), spaces.MultiBinary(2))),
    "frames": spaces.Box(0, 255, (84, 84, 3), np.uint8),
    "gray": spaces.Box(0, 255, (84, 84), np.uint8),
    "image": box(shape=(8, 8, 3)),
    "sequence": spaces.Sequence(box()),
    "text": spaces.Text(5),
    "graph": spaces.Graph(box(), None),
}


class Probe(gym.Env):
    """One constant observation, reward 1 at each step, no end of its own. step() insists on legal actions."""

    def __init__(self, actions="two", observations="vector"):
        self.action_space, self.observation_space = ACTIONS[actions], OBSERVATIONS[observations]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation(), {}

    def step(self, action):
        action = np.asarray(action) if isinstance(self.action_space, spaces.Box) else action
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.t += 1
        reward, terminated, truncated = self.outcome(action)
        return self.observation(), reward, terminated, truncated, {}

    def observation(self):
        return np.ones(1, np.float32)

    def outcome(self, action):
        return 1.0, False, False


class Both(Probe):
    """Terminated and truncated on the same, eighth step."""

    def outcome(self, action):
        return 1.0, self.t >= 8, self.t >= 8


class Clock(Probe):
    """Shows the step of the episode, one-hot; terminates after 5 steps, with reward 1 on the last."""

    def __init__(self, actions="two"):
        super().__init__(actions)
        self.observation_space = box(0, 1, (6,))

    def observation(self):
        return np.eye(6, dtype=np.float32)[self.t]

    def outcome(self, action):
        return float(self.t == 5), self.t == 5, False


class Noise(Probe):
    """Observations and rewards from this environment's own random numbers; episodes of 5 steps."""

    def observation(self):
        return self.np_random.uniform(-1, 1, 1).astype(np.float32)

    def outcome(self, action):
        return float(self.np_random.normal()), self.t >= 5, False


class Score(Probe):
    """Every episode returns exactly 1000 in 10 steps."""

    def outcome(self, action):
        return 100.0, self.t >= 10, False


class BrokenReward(Probe):
    """The 40th reward is not a number."""

    steps = 0

    def outcome(self, action):
        self.steps += 1
        return (np.nan if self.steps == 40 else 1.0), self.t >= 8, False


class Contextual(Probe):
    """Shows a random sign; the action that agrees with it pays 1, in episodes of one step."""

    def observation(self):
        if self.t == 0:
            self.sign = float(self.np_random.choice([-1, 1]))
        return np.array([self.sign], np.float32)

    def outcome(self, action):
        first = np.ravel(action)[0]
        agrees = (first if isinstance(self.action_space, spaces.Box) else 2 * first - 1) * self.sign > 0
        return float(agrees), True, False


class Leak(Probe):
    """Only the last observation of an episode shows a bit; the first action of the next is paid for agreeing with it.

    The bit is no part of the next episode, so 0.5 per episode is all that can be had; more betrays a leak.
    """

    bit = 0

    def __init__(self, actions="two"):
        super().__init__(actions)
        self.observation_space = box(0, 1, (2,))

    def observation(self):
        shown = np.zeros(2, np.float32)
        if self.t == 4:
            self.bit = int(self.np_random.integers(2))
            shown[self.bit] = 1
        return shown

    def outcome(self, action):
        return float(self.t == 1 and action == self.bit), self.t == 4, False


class Recall(Leak):
    """The first observation shows a bit; the action of the last step, 3 steps later, is paid for agreeing with it."""

    def observation(self):
        shown = np.zeros(2, np.float32)
        if self.t == 0:
            self.bit = int(self.np_random.integers(2))
            shown[self.bit] = 1
        return shown

    def outcome(self, action):
        return float(self.t == 4 and action == self.bit), self.t == 4, False


class Mask(Probe):
    """Two components of which a few choices are valid, other ones at each step; step() insists on them.

    With `empty`, the second component has no valid choice at the fourth step.
    """

    def __init__(self, actions="masked", empty=False):
        super().__init__(actions)
        self.empty = empty
        self.observation_space = box(0, 1, (9,))

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed)
        return observation, {"action_mask": self.mask()}

    def mask(self):
        mask = np.zeros(7, bool)
        mask[self.t % 3] = mask[3 + self.t % 4] = True
        mask[3:] &= not (self.empty and self.t == 3)
        return mask

    def step(self, action):
        mask = self.mask()
        assert mask[action[0]]
        assert mask[3 + action[1]] or (action[1] == 0 and not mask[3:].any())
        observation, *rest, _ = super().step(action)
        return observation, *rest, {"action_mask": self.mask()}

    def observation(self):
        return np.eye(9, dtype=np.float32)[self.t]

    def outcome(self, action):
        return 1.0, self.t >= 8, False


class AllValid(gym.Wrapper):
    """Adds a mask that rules nothing out."""

    def with_mask(self, infos):
        return infos | {"action_mask": np.ones(gym.spaces.flatdim(self.action_space), np.int8)}

    def reset(self, **kwargs):
        observation, infos = self.env.reset(**kwargs)
        return observation, self.with_mask(infos)

    def step(self, action):
        *rest, infos = self.env.step(action)
        return *rest, self.with_mask(infos)


class Stripes(gym.ObservationWrapper):
    """Shows numbers in [-1, 1] as stripes of a frame, from black to white."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)

    def observation(self, observation):
        levels = np.round((observation + 1) * 127.5).astype(np.uint8)
        stripes = np.repeat(levels, 84 // len(levels))
        return np.broadcast_to(stripes[None, :, None], (84, 84, 3)).copy()


class AnyObservation(Probe):
    """Samples of the observation space."""

    def observation(self):
        return self.observation_space.sample()


def register(name, cls, limit=None, **kwargs):
    gym.register(f"{name}-v0", cls, max_episode_steps=limit, kwargs=kwargs)


def as_image(cls):
    return lambda **kwargs: Stripes(cls(**kwargs))


def as_masked(cls):
    return lambda **kwargs: AllValid(cls(**kwargs))


def as_it_is(cls):
    return cls


KINDS = [("", "two", as_it_is), ("Box", "box", as_it_is), ("Image", "two", as_image)]
KINDS += [("Multi", "multi", as_it_is), ("Masked", "multi", as_masked)]
PROBES = {"Endless": Probe, "Both": Both, "Clock": Clock, "Noise": Noise, "Score": Score}
PROBES |= {"BrokenReward": BrokenReward, "Contextual": Contextual, "Leak": Leak, "Recall": Recall}
for suffix, actions, form in KINDS:
    register(f"Const{suffix}", form(Probe), limit=8, actions=actions)
    for name, cls in PROBES.items():
        register(f"{name}{suffix}", form(cls), actions=actions)
    for kind in OBSERVATIONS:
        any_observation = as_it_is(AnyObservation) if form is as_image else form(AnyObservation)
        register(f"Observe_{kind}{suffix}", any_observation, limit=8, actions=actions, observations=kind)
for kind in ACTIONS:
    register(f"Act_{kind}", Probe, limit=8, actions=kind)
register("Mask", Mask)
register("MaskEmpty", Mask, empty=True)
for kind in ("two", "start", "matrix_multi", "start_multi"):
    register(f"Masked_{kind}", as_masked(Probe), limit=8, actions=kind)
