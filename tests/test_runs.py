"""What a run leaves behind: logs, checkpoints, films; and how it is resumed, interrupted and reproduced."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    DISTINCT,
    ROOT,
    TRAINS,
    act,
    build,
    continuous,
    environment,
    frames,
    images,
    make_args,
    only_run,
    other_actions,
    real,
    recurrent,
    rollout,
    run,
    scalars,
    small_flags,
)

NAMES = {
    *("charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/learning_rate"),
    *(
        "losses/value_loss",
        "losses/policy_loss",
        "losses/entropy",
        "losses/approx_kl",
        "losses/old_approx_kl",
    ),
    *("losses/clipfrac", "losses/explained_variance", "losses/grad_norm", "losses/gradient_steps"),
}


def weights(agent) -> torch.Tensor:
    return torch.cat([x.double().flatten() for x in agent.state_dict().values()])


# ---- logs ----
def test_scalars(script):
    """Each name once per iteration, over real steps; fillers do not count as steps."""
    result = script.train(make_args(script, "Score", num_steps=11, total_timesteps=44 * 6))
    logged = scalars(only_run())
    assert set(logged) == NAMES
    assert {len(points) for points in logged.values()} == {6}
    steps = [step for step, _ in logged["charts/SPS"]]
    assert steps == [40 * i for i in range(1, 7)]
    assert result["global_step"] == 240
    assert {value for _, value in logged["charts/episodic_return"]} == {1000}
    assert {value for _, value in logged["charts/episodic_length"]} == {10}
    assert {value for _, value in logged["losses/gradient_steps"]} == {8 if recurrent(script) else 6}
    assert result["episodic_return"] == 1000
    assert result["sps"] > 0


@pytest.mark.scripts(*DISTINCT)
def test_no_episode_has_ended(script):
    """Nothing is invented: None, no scalar, and the console says so."""
    result = script.train(make_args(script, "Endless"))
    assert result["episodic_return"] is None
    assert "charts/episodic_return" not in scalars(only_run())
    done = run(script.__file__, *small_flags(script, "Endless"))
    assert "no episode has ended" in done.stderr


@pytest.mark.scripts(*DISTINCT)
def test_run_folder(script):
    """Events, the script, the checkpoint; a second run gets a folder of its own."""
    args = make_args(script)
    for _ in range(2):
        script.train(args)
    folders = sorted(Path("runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert folder.name.startswith(f"{args.env_id.replace(':', '-')}__{script.__name__}__1__")
        names = {path.name for path in folder.iterdir()}
        assert {"checkpoint.pt", f"{script.__name__}.py"} < names
        assert sum(name.startswith("events.out.tfevents") for name in names) == 1
        assert len(names) == 3
        assert (folder / f"{script.__name__}.py").read_text() == Path(script.__file__).read_text()


@pytest.mark.scripts(*DISTINCT)
def test_stderr_holds_the_progress_bar_only(script):
    done = run(script.__file__, *small_flags(script))
    assert done.returncode == 0
    lines = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.strip()]
    assert lines
    assert all("iteration" in line and "%" in line for line in lines), done.stderr
    assert "5/5" in lines[-1]
    assert "step 160" in lines[-1]


# ---- same seed, other seed ----
def test_same_seed_same_numbers(script):
    """Bit for bit, apart from the speed."""
    flags = {"norm_obs": True, "norm_reward": True} if continuous(script) else {}
    logs = []
    for seed in (3, 3, 4):
        result = script.train(make_args(script, "Noise", seed=seed, exp_name=f"seed{seed}", **flags))
        log = scalars(Path(result["checkpoint"]).parent)
        log.pop("charts/SPS")
        logs.append(log)
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


@pytest.mark.scripts(*DISTINCT)
def test_evaluation_never_changes_training(script):
    flags = {"norm_obs": True, "norm_reward": True} if continuous(script) else {}
    results = [script.train(make_args(script, "Noise", eval_episodes=k, **flags)) for k in (0, 3)]
    plain, evaluated = (torch.load(result["checkpoint"]) for result in results)
    for name, value in plain["agent"].items():
        assert torch.equal(value, evaluated["agent"][name]), name
    assert torch.equal(plain["rng"], evaluated["rng"])
    assert len(results[1]["eval_returns"]) == 3


# ---- checkpoints ----
@pytest.mark.scripts(*DISTINCT)
def test_checkpoint_opens_with_the_defaults_of_torch(script):
    """Tensors on the CPU and plain values, so that weights_only loading takes it; no part file is left."""
    result = script.train(make_args(script))
    checkpoint = torch.load(result["checkpoint"])
    assert set(checkpoint) == {"agent", "optimizer", "rng", "cuda_rng", "args", "spaces", "progress"}
    assert checkpoint["args"]["num_steps"] == 12
    assert checkpoint["progress"]["rows"] == 480
    assert not list(only_run().glob("*.tmp"))


def test_load_agent(script):
    """From the file alone, on raw observations, as the agent that was trained acts."""
    few = {"learning_rate": 1e-3, "total_timesteps": 4 * 64 * 8} if images(script) else {}
    args = make_args(script, "Contextual", **({"num_steps": 64, "total_timesteps": 4 * 64 * 20} | few))
    result = script.train(args)
    agent = script.load_agent(result["checkpoint"])
    raw_obs = frames(script, np.array([[-1.0], [1.0]]))
    with torch.no_grad():
        actions = agent.env_actions(act(script, agent, agent.normalize(raw_obs), deterministic=True))
    assert actions.shape == (2, *agent.action_shape)
    assert actions.reshape(2, -1)[0, 0] < actions.reshape(2, -1)[1, 0]


@pytest.mark.scripts(*DISTINCT)
def test_what_is_no_checkpoint(script):
    Path("notes.txt").write_text("not a checkpoint")
    torch.save({"weights": torch.ones(3)}, "other.pt")
    torch.save(torch.ones(3), "tensor.pt")
    for path in ("notes.txt", "missing.pt", ".", "other.pt", "tensor.pt"):
        with pytest.raises(script.BadInput, match=f"--resume {path}: cannot be read"):
            script.Args(resume=path)


@pytest.mark.scripts(*DISTINCT)
def test_checkpoint_interval(script, monkeypatch):
    saved, save = [], script.save_checkpoint

    def spy(path, agent, optimizer, args, progress):
        saved.append(progress["rows"] // 48)
        save(path, agent, optimizer, args, progress)

    monkeypatch.setattr(script, "save_checkpoint", spy)
    script.train(make_args(script, checkpoint_interval=4))
    assert saved == [4, 8, 10]


@pytest.mark.scripts(*DISTINCT)
def test_not_finite_stops_and_keeps_the_last_good_checkpoint(script):
    """The 40th reward of each environment is NaN: iteration 4 of 12 steps stops, iteration 3 was saved."""
    with pytest.raises(FloatingPointError, match="iteration 4"):
        script.train(make_args(script, "BrokenReward", checkpoint_interval=1))
    checkpoint = torch.load(only_run() / "checkpoint.pt")
    assert checkpoint["progress"]["rows"] == 3 * 48
    assert all(torch.isfinite(value).all() for value in checkpoint["agent"].values())
    done = run(script.__file__, *small_flags(script, "BrokenReward", iterations=9))
    assert done.returncode == 1
    assert "stopped: iteration" in done.stderr


# ---- resuming ----
@pytest.mark.scripts(*DISTINCT)
def test_resume_is_exact_where_episodes_allow(script):
    """8 steps and a filler, T = 18: every rollout ends on a filler, so 5 + 5 iterations equal 10, bit for bit."""
    flags = {"norm_obs": True, "norm_reward": True} if continuous(script) else {}
    flags |= {"num_steps": 18, "num_minibatches": 4, "total_timesteps": 72 * 10, "checkpoint_interval": 5}
    straight = script.train(make_args(script, **flags))

    save, stopped = script.save_checkpoint, []

    def stop_halfway(*inputs):
        save(*inputs)
        stopped.append(True)
        raise KeyboardInterrupt

    script.save_checkpoint = stop_halfway
    try:
        with pytest.raises(KeyboardInterrupt):
            script.train(make_args(script, exp_name="half", **flags))
    finally:
        script.save_checkpoint = save
    assert stopped
    (half,) = Path("runs").glob("*__half__*")
    resumed = script.train(script.Args(resume=str(half / "checkpoint.pt")))
    assert resumed["global_step"] == straight["global_step"]
    a, b = torch.load(straight["checkpoint"]), torch.load(resumed["checkpoint"])
    for name, value in a["agent"].items():
        assert torch.equal(value, b["agent"][name]), name
    for key, state in a["optimizer"]["state"].items():
        assert all(torch.equal(state[name], b["optimizer"]["state"][key][name]) for name in state)
    assert torch.equal(a["rng"], b["rng"])
    log, rest = scalars(Path(straight["checkpoint"]).parent), scalars(Path(resumed["checkpoint"]).parent)
    assert rest["losses/policy_loss"] == log["losses/policy_loss"][5:]


def test_first_update_after_a_resume(script):
    """Weights, optimizer, normalizers and random numbers are those that were saved."""
    flags = {"norm_obs": True, "norm_reward": True} if continuous(script) else {}
    result = script.train(make_args(script, "Noise", **flags))
    args = script.Args(resume=result["checkpoint"], total_timesteps=960)
    updated = []
    for _ in range(2):
        saved = torch.load(result["checkpoint"])
        envs, agent, optimizer = script.build(args, 0, torch.device("cpu"), saved, 10)
        assert torch.equal(weights(agent), weights(script.load_agent(result["checkpoint"])))
        batch = script.evaluate_rollout(agent, rollout(script, agent, envs, args), args)
        script.update(agent, optimizer, batch, args, 0.2)
        updated.append(weights(agent))
    assert torch.equal(*updated)
    assert all(
        state["step"] == 11 * args.update_epochs * args.num_minibatches
        for state in optimizer.state_dict()["state"].values()
    )


@pytest.mark.scripts(*DISTINCT)
def test_resume_of_another_agent(script):
    """Other spaces, or another script with the same ones."""
    path = script.train(make_args(script, total_timesteps=48))["checkpoint"]
    with pytest.raises(script.BadInput, match=r"--resume .* other spaces"):
        script.train(make_args(script, resume=path, total_timesteps=480, env_kwargs=other_actions(script)))
    saved = torch.load(path)
    saved["agent"]["one more"] = torch.ones(1)
    torch.save(saved, "other.pt")
    with pytest.raises(script.BadInput, match=r"--resume other.pt: is of another script"):
        script.train(make_args(script, resume="other.pt", total_timesteps=480))


def test_resume_of_a_resumed_run(script):
    """The third run reads the second's checkpoint, not the first's, and what is given to it wins."""
    first = script.train(make_args(script, total_timesteps=48, seed=5))["checkpoint"]
    second = script.train(script.Args(resume=first, total_timesteps=96))["checkpoint"]
    Path(first).unlink()
    assert "resume" not in torch.load(second)["args"]
    done = run(script.__file__, "--resume", second, "--total-timesteps", 144, "--seed", 1)
    assert done.returncode == 0, done.stderr
    (third,) = [
        x for x in Path("runs").iterdir() if x.name not in (Path(first).parent.name, Path(second).parent.name)
    ]
    assert "__1__" in third.name


@pytest.mark.scripts(*TRAINS)
def test_resume_keeps_flags_and_derives_the_rest_anew(script):
    """What was typed then is the default, what is typed now wins, also where it equals the script's default."""
    default_envs = script.Args().num_envs
    typed = [*small_flags(script), "--seed", 5, "--gamma", 0.5, "--ent-coef", 0.25]
    assert run(script.__file__, *typed).returncode == 0
    first = only_run() / "checkpoint.pt"
    more = ["--resume", first, "--total-timesteps", 36 * 9, "--gamma", 0.99, "--num-envs", default_envs]
    done = run(script.__file__, *more)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 160" in done.stdout
    (second,) = [folder for folder in Path("runs").iterdir() if folder != first.parent]
    args = torch.load(second / "checkpoint.pt")["args"]
    assert args["seed"] == 5
    assert args["ent_coef"] == 0.25
    assert "gamma" not in args  # 0.99 is the default
    assert args.get("num_envs", default_envs) == default_envs
    assert "learning_rate" not in args  # never typed, so never saved
    assert "resume" not in args
    assert min(step for step, _ in scalars(second)["losses/entropy"]) > 160


@pytest.mark.scripts(*DISTINCT)
def test_a_finished_run_is_not_trained_again(script):
    result = script.train(make_args(script))
    with pytest.raises(script.BadInput, match="--resume"):
        script.train(script.Args(resume=result["checkpoint"]))
    only_evaluated = script.train(script.Args(resume=result["checkpoint"], eval_episodes=2))
    assert only_evaluated["eval_returns"] == [8, 8]
    assert only_evaluated["global_step"] == result["global_step"]
    assert only_evaluated["checkpoint"] == result["checkpoint"]


# ---- interruptions ----
def start(script, *flags, launcher=()):
    """The script as a process that has finished its first iteration."""
    command = [*(launcher or [sys.executable]), script.__file__, *map(str, flags)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    deadline = time.time() + 60
    while not list(Path("runs").glob("*/checkpoint.pt")):
        assert time.time() < deadline, process.kill() or process.communicate()
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process


@pytest.mark.scripts(*TRAINS)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_exit(script, number, status):
    process = start(script, *small_flags(script, iterations=10**6), "--checkpoint-interval", 7)
    process.send_signal(number)
    output = process.communicate(timeout=30)
    assert process.returncode == status, output
    checkpoint = torch.load(only_run() / "checkpoint.pt")
    assert checkpoint["progress"]["rows"] % 36 == 0
    resumed = script.train(
        script.Args(
            resume=str(only_run() / "checkpoint.pt"), total_timesteps=checkpoint["progress"]["rows"] + 72
        )
    )
    assert resumed["global_step"] > checkpoint["progress"]["global_step"]


@pytest.mark.scripts(*TRAINS)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_with_processes_for_environments(script, number, status):
    """A terminal sends Ctrl-C to all of them, timeout and torchrun SIGTERM; the environments must live on until
    the checkpoint is written.
    """
    command = [sys.executable, script.__file__, *small_flags(script, iterations=10**6), "--async-envs"]
    command += ["--checkpoint-interval", "1"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    while not list(Path("runs").glob("*/checkpoint.pt")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, number)
    output = process.communicate(timeout=30)
    assert process.returncode == status, output
    assert "Traceback" not in output[1]


@pytest.mark.scripts(*DISTINCT)
def test_processes_for_environments_end_with_python(script):
    """Also those that nobody closed, as after an error: they ignore the SIGTERM that Python has for them."""
    flags = make_args(script, async_envs=True).given
    code = (
        f"import {script.__name__} as script\n"
        "if __name__ == '__main__':\n"
        f"    envs = script.make_envs(script.Args(**{flags}), 2, 1)\n"
        "    raise RuntimeError('an error')"
    )
    Path("forgetful.py").write_text(code)
    done = run("forgetful.py", PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: an error")


@pytest.mark.scripts("ppo")  # save_checkpoint() is the same in all
def test_kill_leaves_a_readable_checkpoint(script):
    """Checkpoints are written all the time here; kill -9 hits wherever it hits."""
    for attempt in range(3):
        shutil.rmtree("runs", ignore_errors=True)
        process = start(script, *small_flags(script, iterations=10**6), "--checkpoint-interval", 1)
        time.sleep(0.03 * attempt)
        process.kill()
        process.communicate()
        script.load_agent(only_run() / "checkpoint.pt")


# ---- alone, imported, filmed ----
def test_copied_alone(script, tmp_path):
    """The file is enough: nothing of the repository is imported."""
    shutil.copy(script.__file__, tmp_path / "copy_of_it.py")
    changes = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    flags = ["--env-id", real(script)["env_id"], "--num-steps", 64, "--num-minibatches", 4]
    flags += ["--total-timesteps", 512]
    done = run("copy_of_it.py", *flags, **changes)
    assert done.returncode == 0, done.stderr
    assert (only_run() / "copy_of_it.py").exists()
    assert "__copy_of_it__" in only_run().name


def test_import_has_no_effect(script, tmp_path):
    """No output, no file, no seed, no environment variable, no thread count, no change to default dtypes."""
    code = (
        "import os, random, sys, numpy, torch\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "torch.manual_seed(7); numpy.random.seed(7); random.seed(7)\n"
        "def state(): return (dict(os.environ), torch.initial_seed(), torch.get_rng_state().tolist(),\n"
        "    numpy.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads(), torch.get_default_dtype())\n"
        "import gymnasium, torch.utils.tensorboard, tyro, tqdm\n"
        + ("import envpool, mujoco\n" if continuous(script) else "")
        + ("import ale_py\n" if images(script) else "")
        + f"before = state(); import {script.__name__}; assert state() == before"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_capture_video(script):
    """Films of the evaluation, one per episode."""
    args = make_args(script, capture_video=True, eval_episodes=2, total_timesteps=48, **real(script))
    os.environ["SDL_VIDEODRIVER"] = "dummy"
    result = script.train(args)
    assert len(result["eval_returns"]) == 2
    films = sorted((only_run() / "videos").glob("*.mp4"))
    assert len(films) == 2
    assert all(film.stat().st_size > 1000 for film in films)


@pytest.mark.filterwarnings("ignore:.*render_mode")
def test_what_films_need_is_said_at_the_start(script):
    """The probes cannot be rendered: refused before training, in one sentence."""
    with pytest.raises(script.BadInput, match="--capture-video: cannot film"):
        script.train(make_args(script, capture_video=True))
    assert not list(Path("runs").glob("*/events*"))


def test_evaluation_is_deterministic_and_frozen(script):
    flags = {"norm_obs": True} if continuous(script) else {}
    args, _, agent, _ = build(script, "Noise", **flags)
    before = weights(agent)
    returns = [script.evaluate_policy(agent, script.make_envs(args, 1, 5), 4) for _ in range(2)]
    assert returns[0] == returns[1]
    assert len(returns[0]) == 4
    assert torch.equal(weights(agent), before)


@pytest.mark.scripts(*DISTINCT)
def test_evaluation_ends_though_episodes_do_not(script):
    args, _, agent, _ = build(script, "Endless")
    assert script.evaluate_policy(agent, script.make_envs(args, 1, 5), 2, max_steps=50) == []
