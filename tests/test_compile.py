"""--compile: the same numbers, compiled once, and checkpoints that know nothing of it."""

import pytest
import torch
from helpers import continuous, make_args, recorded

# What the compiler of torch 2.13 says of its own parts.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


@pytest.mark.scripts("ppo_continuous_action", "ppo_atari_lstm")
@torch._dynamo.config.patch(trace_autograd_ops=True)
def test_compiled_updates_agree_with_eager_ones(script):
    """5 updates of the same rollout with the same permutations: losses within 1e-3, one compilation, ratio 1."""
    torch._dynamo.reset()
    flags = {"norm_obs": True, "norm_reward": True} if continuous(script) else {}
    compiled = torch.compile(script.ppo_gradient, dynamic=False)
    logs = []
    for gradient_fn in (script.ppo_gradient, compiled):
        args, agent, optimizer, batch = recorded(script, "Noise", num_steps=48, num_minibatches=4, **flags)
        frames, ratios = [], []

        def spy(*inputs, gradient_fn=gradient_fn, frames=frames, ratios=ratios):
            gradient, debug = gradient_fn(*inputs)
            frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            ratios.append(abs(debug[4].item()))
            return gradient, debug

        torch.manual_seed(0)
        logs.append([script.update(agent, optimizer, batch, args, 0.2 - 0.01 * i, spy) for i in range(5)])
        assert ratios[0] < 1e-4
        assert frames[-1] == frames[1]
    assert frames[-1] >= 1
    for eager, other in zip(*logs, strict=True):
        for name, value in eager.items():
            if "loss" in name or "entropy" in name:
                assert other[name] == pytest.approx(value, abs=1e-3), name


@pytest.mark.scripts("ppo")
def test_a_compiled_run_can_be_used_without_compiling(script):
    result = script.train(make_args(script, compile=True))
    agent = script.load_agent(result["checkpoint"])
    assert all(not name.startswith("_orig_mod") for name in agent.state_dict())
    again = script.train(script.Args(resume=result["checkpoint"], total_timesteps=960, compile=False))
    assert again["global_step"] > result["global_step"]
