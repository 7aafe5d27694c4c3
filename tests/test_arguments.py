"""Flags: defaults that follow from N, what is refused, and how."""

import os
import re

import pytest
from helpers import IMAGE, MULTI, VECTOR, continuous, make_args, multi, only_run, run_here, small_flags

BAD = [
    ({"num_envs": 0}, "--num-envs"),
    ({"num_envs": -3}, "--num-envs"),
    ({"num_envs": 2**31}, "--num-envs"),
    ({"num_steps": 0}, "--num-steps"),
    ({"num_steps": 2**31}, "--num-steps"),
    ({"num_minibatches": 0}, "--num-minibatches"),
    ({"update_epochs": 0}, "--update-epochs"),
    ({"total_timesteps": 0}, "--total-timesteps"),
    ({"checkpoint_interval": 0}, "--checkpoint-interval"),
    ({"torch_threads": 0}, "--torch-threads"),
    ({"torch_threads": 2**31}, "--torch-threads"),
    ({"gamma": 1.01}, "--gamma"),
    ({"gamma": -0.1}, "--gamma"),
    ({"gamma": float("nan")}, "--gamma"),
    ({"gae_lambda": 2.0}, "--gae-lambda"),
    ({"learning_rate": 0.0}, "--learning-rate"),
    ({"learning_rate": float("inf")}, "--learning-rate"),
    ({"clip_coef": 0.0}, "--clip-coef"),
    ({"max_grad_norm": -1.0}, "--max-grad-norm"),
    ({"target_kl": 0.0}, "--target-kl"),
    ({"ent_coef": -0.1}, "--ent-coef"),
    ({"vf_coef": float("nan")}, "--vf-coef"),
    ({"seed": -1}, "--seed"),
    ({"eval_episodes": -1}, "--eval-episodes"),
    ({"num_envs": 4, "num_steps": 1, "num_minibatches": 4}, "--num-minibatches 4 leaves fewer than 2 rows"),
    ({"num_envs": 4, "num_steps": 12, "num_minibatches": 4, "total_timesteps": 47}, "--total-timesteps 47"),
    ({"resume": "no/such/checkpoint.pt"}, "--resume no/such/checkpoint.pt"),
    ({"update_epochs": 2.5}, "--update-epochs must be a whole number, not 2.5"),
    ({"num_steps": float("nan")}, "--num-steps must be a whole number, not nan"),
    ({"eval_episodes": float("inf")}, "--eval-episodes must be a whole number, not inf"),
]


@pytest.mark.parametrize(
    ("flags", "words"), BAD, ids=[f"{next(iter(f))}-{i}" for i, (f, _) in enumerate(BAD)]
)
def test_bad_numbers(script, flags, words):
    """From Python, a ValueError that names the flag and the number."""
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        script.Args(**flags)
    assert "\n" not in str(error.value)


def test_whole_numbers_may_be_floats(script):
    """In Python, 1e6 is one; what is saved is an integer."""
    args = script.Args(total_timesteps=1e6, eval_episodes=2.0, update_epochs=3.0, gamma=1.0)
    numbers = args.total_timesteps, args.eval_episodes, args.update_epochs, args.given["total_timesteps"]
    assert numbers == (1_000_000, 2, 3, 1_000_000)
    assert {type(number) for number in numbers} == {int}
    assert isinstance(args.gamma, float)


def test_refusals_are_one_line(script):
    """Also where what was typed has several."""
    with pytest.raises(script.BadInput, match=r"--env-kwargs must be a JSON object, not 1 2$"):
        script.train(make_args(script, env_kwargs="1\n2"))


@pytest.mark.parametrize("exp_name", ["a/b", "../up", "\0", "two\nlines", "x" * 300, "名" * 150, ""])
def test_names_of_experiments_become_legal_folders(script, exp_name):
    script.train(make_args(script, exp_name=exp_name, total_timesteps=48))
    assert (only_run() / "checkpoint.pt").exists()


@pytest.mark.scripts("ppo_continuous_action")
def test_bad_normalizer_samples(script):
    with pytest.raises(ValueError, match="--normalizer-samples"):
        script.Args(normalizer_samples=0)


@pytest.mark.scripts("ppo_continuous_action")
def test_samples_per_env(script):
    """The other way to count: a minibatch has so many steps of each environment, and N times as many rows."""
    args = script.Args(num_envs=4096, num_steps=32, samples_per_env=4)
    assert (args.num_minibatches, args.minibatch_size) == (8, 16_384)
    assert script.Args(num_envs=4, samples_per_env=512).num_minibatches == 1
    assert script.Args(num_envs=4, num_steps=32, samples_per_env=4, num_minibatches=8).minibatch_size == 16
    for flags, product in [
        ({"num_minibatches": 4}, "--samples-per-env 4 x --num-minibatches 4"),
        ({"samples_per_env": 5}, "--samples-per-env 5 x --num-minibatches 6"),
        ({"samples_per_env": 33}, "--samples-per-env 33 x --num-minibatches 0"),
    ]:
        with pytest.raises(script.BadInput, match=f"^{product} is not --num-steps 32$"):
            script.Args(**{"num_envs": 64, "num_steps": 32, "samples_per_env": 4} | flags)
    with pytest.raises(script.BadInput, match="--samples-per-env must lie in"):
        script.Args(samples_per_env=0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-minibatches", "1000000000"], "--num-minibatches 1000000000"),
        (["--total-timesteps", "1"], "--total-timesteps 1"),
        (["--gamma", "1.5"], "--gamma"),
        (["--num-envs", "four"], "--num-envs"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--resume", "nowhere.pt"], "--resume nowhere.pt"),
    ],
)
def test_bad_flags_exit_with_status_2(script, flags, words, tmp_path):
    done = run_here(script, *flags)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_states_each_flag(script, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = run_here(script, "--help")
    assert done.returncode == 0
    for name in vars(script.Args()):
        if name != "given":
            assert f"--{name.replace('_', '-')}" in done.stdout, name
    assert ("g = N /" in done.stdout) == (script.__name__ in [*VECTOR, *MULTI])


@pytest.mark.scripts("ppo", "ppo_shared")
def test_defaults_of_classic_control(script):
    """The blog's values at N = 4."""
    args = script.Args()
    assert (args.env_id, args.num_envs, args.num_steps, args.num_minibatches) == ("CartPole-v1", 4, 128, 4)
    assert (args.update_epochs, args.learning_rate, args.total_timesteps) == (4, 2.5e-4, 500_000)
    assert (args.clip_coef, args.ent_coef, args.vf_coef, args.max_grad_norm) == (0.2, 0.01, 0.5, 0.5)
    assert (args.gamma, args.gae_lambda, args.anneal_lr, args.anneal_clip) == (0.99, 0.95, True, False)


@pytest.mark.scripts("ppo_continuous_action")
def test_defaults_of_mujoco(script):
    """ppo2's values at N = 1."""
    args = script.Args()
    assert (args.env_id, args.num_envs, args.num_steps, args.num_minibatches) == (
        "HalfCheetah-v5",
        1,
        2048,
        32,
    )
    assert (args.update_epochs, args.learning_rate, args.total_timesteps) == (10, 3e-4, 1_000_000)
    assert (args.clip_coef, args.ent_coef, args.gamma, args.gae_lambda) == (0.2, 0.0, 0.99, 0.95)
    assert (args.norm_obs, args.norm_reward, args.normalizer_samples) == (True, True, None)


@pytest.mark.scripts("ppo_atari", "ppo_atari_lstm")
def test_defaults_of_atari(script):
    """ppo2's values."""
    args = script.Args()
    assert (args.num_envs, args.num_steps, args.num_minibatches, args.update_epochs) == (8, 128, 4, 4)
    assert (args.learning_rate, args.total_timesteps, args.clip_coef) == (2.5e-4, 10_000_000, 0.1)
    assert (args.ent_coef, args.vf_coef, args.max_grad_norm, args.gamma) == (0.01, 0.5, 0.5, 0.99)
    assert args.repeat_action_probability == 0


@pytest.mark.scripts("ppo_atari_lstm")
def test_minibatches_of_whole_sequences(script):
    """The default is the largest divisor of N up to 4; what is typed and does not divide N is refused."""
    assert [script.Args(num_envs=n).num_minibatches for n in (1, 2, 3, 4, 5, 6, 8, 9)] == [
        1,
        2,
        3,
        4,
        1,
        3,
        4,
        3,
    ]
    with pytest.raises(ValueError, match="--num-minibatches 4 does not divide --num-envs 6"):
        script.Args(num_envs=6, num_minibatches=4)


@pytest.mark.parametrize("world_size", [1, 8])
def test_derived_defaults_alone_are_never_refused(script, world_size, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    if script.__name__ in IMAGE:
        for num_envs in range(1, 300):
            assert script.Args(num_envs=num_envs).num_iterations >= 1
        return
    for num_envs in [*range(1, 300), 511, 1000, 1024, 2047, 2048, 2049, 4095, 4096, 10_000, 65_535, 65_536]:
        args = script.Args(num_envs=num_envs)
        assert args.num_iterations >= 3
        assert args.minibatch_size >= 16


@pytest.mark.scripts(*VECTOR, *MULTI)
def test_rates_and_sizes_grow_with_n(script):
    """Constant up to a point, then monotonic: a larger N never means a smaller batch or a smaller step."""
    sizes = [2**k for k in range(17)]
    plans = [script.Args(num_envs=n) for n in sizes]
    for name in ("batch_size", "minibatch_size", "learning_rate", "total_timesteps"):
        values = [getattr(plan, name) for plan in plans]
        assert values == sorted(values), name
    large = script.Args(num_envs=4096)
    expected = (32, 32, 5, 8.49e-4) if continuous(script) else (16, 32, 4, 8.41e-4)
    expected = (32, 32, 4, 8.41e-4) if multi(script) else expected
    numbers = (large.num_steps, large.num_minibatches, large.update_epochs, large.learning_rate)
    assert numbers == pytest.approx(expected, rel=1e-2)
    assert large.batch_size % large.num_minibatches == 0


def test_what_is_typed_is_never_adjusted(script):
    typed = {
        "num_steps": 7,
        "num_minibatches": 8,
        "update_epochs": 3,
        "learning_rate": 0.5,
        "total_timesteps": 10**6,
    }
    args = script.Args(num_envs=4096, **typed)
    assert {name: getattr(args, name) for name in typed} == typed
    assert args.given == typed | {"num_envs": 4096}


@pytest.mark.scripts(*VECTOR, *MULTI)
def test_threads_follow_the_minibatch(script):
    assert script.Args(num_envs=4, num_steps=128, num_minibatches=4).torch_threads == 1
    large = script.Args(num_envs=4096, num_steps=16, num_minibatches=4, total_timesteps=10**7)
    assert large.torch_threads == len(os.sched_getaffinity(0))
    assert script.Args(torch_threads=3).torch_threads == 3


def test_capture_video_plays_at_least_one_episode(script):
    assert script.Args(capture_video=True).eval_episodes == 1
    assert script.Args(capture_video=True, eval_episodes=4).eval_episodes == 4


def test_the_plan_is_printed(script):
    """The arithmetic, from environments to iterations."""
    done = run_here(
        script,
        *(*small_flags(script), "--num-steps", 12, "--num-minibatches", 4, "--total-timesteps", 100),
    )
    assert done.returncode == 0
    memory = {"ppo_atari": "1.5", "ppo_atari_lstm": "0.4"}.get(script.__name__, "0.0")
    plan = f"4 envs x 12 steps = 48 rows per iteration (observations: {memory} MB); 2 epochs x 4 minibatches of 12 = 8 gradients"
    assert plan in done.stdout
    assert "\n2 iterations = 16 gradients; learning rate" in done.stdout
    assert "SyncVectorEnv" in done.stdout
