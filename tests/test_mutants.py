"""Breaks a detail in the source of a script, in memory, and expects the test of that detail to fail."""

import inspect
import sys
import types

import pytest
import test_atari
import test_continuous
import test_details
import test_learning
import test_multidiscrete
import test_processes
from helpers import ROOT

from benchmark.details import TITLES, source, tag_comments

P, C, A, L = "ppo", "ppo_continuous_action", "ppo_atari", "ppo_atari_lstm"
M, K = "ppo_multidiscrete", "ppo_multidiscrete_mask"
MUTANTS = [
    # detail, script, what stands there, what breaks it, the test that must notice
    (
        "D01",
        P,
        "valid[t] = ~envs.fillers",
        "valid[t] = 1",
        test_details.test_d01_rows_say_what_happened,
    ),
    (
        "D01",
        P,
        "for t in range(T):\n            valid[t]",
        "envs.reset()\n        for t in range(T):\n            valid[t]",
        test_details.test_d01_vectorized_architecture,
    ),
    (
        "D02",
        P,
        "nn.init.orthogonal_(layer.weight, std)",
        "nn.init.xavier_uniform_(layer.weight)",
        test_details.test_d02_orthogonal_initialization_and_constant_biases,
    ),
    (
        "D02",
        P,
        'space["n"]), std=0.01)',
        'space["n"]), std=1.0)',
        test_details.test_d02_orthogonal_initialization_and_constant_biases,
    ),
    ("D03", P, "eps=1e-5, ", "", test_details.test_d03_adam_epsilon),
    (
        "D04",
        P,
        "1 - (iteration - 1) / args.num_iterations",
        "1 - iteration / args.num_iterations",
        test_details.test_d04_adam_learning_rate_annealing,
    ),
    (
        "D04",
        P,
        'optimizer.param_groups[0]["lr"] = learning_rate',
        "pass",
        test_details.test_d04_the_optimizer_takes_the_annealed_rate,
    ),
    ("D05", P, "* (1 - terminations) ", "* (1 - dones) ", test_details.test_d05_by_hand),
    (
        "D05",
        P,
        "gae_lambda * (1 - dones)",
        "gae_lambda * (1 - terminations)",
        test_details.test_d05_by_brute_force,
    ),
    (
        "D05",
        P,
        "advantages + values[:-1]",
        "advantages + values[1:]",
        test_details.test_d05_lambda_1_is_monte_carlo,
    ),
    (
        "D05",
        P,
        "batch.terminations if args.bootstrap_truncation else batch.dones",
        "batch.dones",
        test_details.test_d05_truncation_bootstraps_with_the_last_observation,
    ),
    (
        "D05",
        P,
        "batch.terminations if args.bootstrap_truncation else batch.dones",
        "batch.terminations",
        test_details.test_d05_no_bootstrap_truncation,
    ),
    (
        "D06",
        P,
        "shuffle.tensor_split(args.num_minibatches)",
        "shuffle.split(args.minibatch_size)",
        test_details.test_d06_mini_batch_updates,
    ),
    (
        "D06",
        P,
        "torch.randperm(args.batch_size, device=device)",
        "torch.randint(args.batch_size, (args.batch_size,))",
        test_details.test_d06_mini_batch_updates,
    ),
    (
        "D06",
        P,
        "torch.randperm(args.batch_size, device=device)",
        "torch.arange(args.batch_size)",
        test_details.test_d06_mini_batch_updates,
    ),
    (
        "D06",
        P,
        "weights = batch.valid / batch.valid.sum().clamp(min=1)",
        "weights = torch.ones_like(batch.valid) / batch.valid.numel()",
        test_details.test_d06_fillers_carry_no_weight,
    ),
    (
        "D07",
        P,
        "advantages = advantages - (advantages * weights).sum()",
        "pass",
        test_details.test_d07_normalization_of_advantages,
    ),
    (
        "D07",
        P,
        ".sum().sqrt() + 1e-8",
        ".sum().sqrt() * 1.01 + 1e-8",
        test_details.test_d07_normalization_of_advantages,
    ),
    (
        "D08",
        P,
        "torch.minimum(advantages * ratio, advantages * clipped_ratio)",
        "(advantages * clipped_ratio)",
        test_details.test_d08_clipped_surrogate_objective,
    ),
    (
        "D08",
        P,
        "torch.minimum(advantages * ratio,",
        "torch.maximum(advantages * ratio,",
        test_details.test_d08_clipped_surrogate_objective,
    ),
    (
        "D09",
        P,
        "squared_errors = torch.maximum(squared_errors, ",
        "squared_errors = torch.minimum(squared_errors, ",
        test_details.test_d09_value_function_loss_clipping,
    ),
    (
        "D09",
        P,
        "0.5 * squared_errors,",
        "squared_errors,",
        test_details.test_d09_value_function_loss_clipping,
    ),
    (
        "D10",
        P,
        "policy_loss - args.ent_coef * entropy",
        "policy_loss + args.ent_coef * entropy",
        test_details.test_d10_overall_loss_and_entropy_bonus,
    ),
    (
        "D11",
        P,
        "grad_norm = gradient.norm()",
        "grad_norm = gradient[:4].norm()",
        test_details.test_d11_global_gradient_clipping,
    ),
    (
        "D12",
        P,
        "torch.stack(debugs).mean(0)",
        "debugs[-1]",
        test_details.test_d12_means_over_all_minibatches,
    ),
    (
        "D12",
        P,
        "ratio - 1 - log_ratio",
        "0.5 * log_ratio.square()",
        test_details.test_d12_debug_variables_of_one_minibatch,
    ),
    (
        "D12",
        P,
        "(batch.returns - batch.values, batch.returns)",
        "(batch.returns - batch.values, batch.values)",
        test_details.test_d12_explained_variance,
    ),
    (
        "D13",
        "ppo_shared",
        "hidden = self.trunk(batch.obs)",
        "hidden = self.trunk(batch.obs).detach()",
        test_details.test_d13_shared_and_separate_networks,
    ),
    (
        "A1",
        P,
        "args.clip_coef * (remaining if args.anneal_clip else 1)",
        "args.clip_coef",
        test_details.test_a1_clip_range_annealing,
    ),
    (
        "A3",
        P,
        "> args.target_kl:\n            break\n        optimizer.step()",
        "> args.target_kl:\n            optimizer.step()\n            break\n        optimizer.step()",
        test_details.test_a3_early_stopping_of_the_policy_optimizations,
    ),
    (
        "A3",
        P,
        "> args.target_kl:",
        "> 1.5 * args.target_kl:",
        test_details.test_a3_early_stopping_of_the_policy_optimizations,
    ),
    (
        "D23",
        C,
        "- log_std - 0.5 * math.log(2 * math.pi)",
        "- 0.5 * math.log(2 * math.pi)",
        test_continuous.test_d23_continuous_actions_via_normal_distributions,
    ),
    (
        "D24",
        C,
        "self.log_std.clamp(-10, 10)",
        "self.log_std",
        lambda script: test_continuous.test_d24_extreme_log_std_stays_finite(script, -1e6),
    ),
    (
        "D25",
        C,
        "logprobs.sum(-1), (log_std",
        "logprobs.mean(-1), (log_std",
        test_continuous.test_d25_independent_action_components,
    ),
    (
        "D26",
        C,
        "return self.critic(obs).squeeze(-1)",
        "return self.critic(obs).squeeze(-1) + 0.1 * self.actor(obs).sum(-1)",
        test_continuous.test_d26_separate_mlp_networks_for_continuous_control,
    ),
    (
        "D27",
        C,
        "return np.clip(actions, self.low, self.high)",
        "return actions",
        test_continuous.test_d27_action_clipping_and_storage,
    ),
    (
        "D28",
        C,
        "rows = x if valid.all() else x[valid > 0]",
        "rows = x",
        test_continuous.test_d28_normalization_of_observation,
    ),
    (
        "D28",
        C,
        " and count < self.max_samples",
        "",
        test_continuous.test_d28_freeze_after_normalizer_samples,
    ),
    (
        "D29",
        C,
        "self.obs_moments.std, -10, 10)",
        "self.obs_moments.std, -1e9, 1e9)",
        test_continuous.test_d29_observation_clipping,
    ),
    ("D30", C, "returns *= 1 - dones", "pass", test_continuous.test_d30_reward_scaling),
    (
        "D30",
        C,
        "rewards / self.return_moments.std",
        "(rewards - self.return_moments.mean.numpy()) / self.return_moments.std",
        test_continuous.test_d30_reward_scaling,
    ),
    (
        "D31",
        C,
        "self.return_moments.std, -10, 10)",
        "self.return_moments.std, -1e9, 1e9)",
        test_continuous.test_d31_reward_clipping,
    ),
    ("D14", A, "noop_max=30", "noop_max=0", test_atari.test_d14_noop_reset_env),
    ("D15", A, "frameskip=4", "frameskip=3", test_atari.test_d15_max_and_skip_env),
    ("D15", A, "maxpool=True", "maxpool=False", test_atari.test_d15_max_and_skip_env),
    ("D16", A, "terminations |= life_lost", "pass", test_atari.test_d16_episodic_life_env),
    ("D16", A, "life_lost & ~over", "life_lost", test_atari.test_d16_a_life_lost_at_the_time_limit),
    (
        "D16",
        A,
        "np.where(over, 0, lives)",
        "lives",
        test_atari.test_d16_a_new_game_with_fewer_lives_is_no_lost_life,
    ),
    ("D17", A, "np.where(self.forced, self.fire, actions)", "actions", test_atari.test_d17_fire_reset_env),
    ("D17", A, "over | self.forced", "over", test_atari.test_d16_episodic_life_env),
    ("D18", A, "width=84", "width=80", test_atari.test_d18_warp_frame),
    ("D19", A, "return np.sign(rewards) if", "return rewards if", test_atari.test_d19_clip_reward_env),
    ("D19", A, "reward_clipping=False", "reward_clipping=True", test_atari.test_d19_clip_reward_env),
    ("D20", A, "stack=4", "stack=3", test_atari.test_d20_frame_stack),
    (
        "D21",
        A,
        "self.critic(features)",
        "self.critic(features.detach())",
        test_atari.test_d21_shared_nature_cnn,
    ),
    ("D22", A, "x.float().div_(255)", "x.float().div_(256)", test_atari.test_d22_scaling_images_to_0_1),
    (
        "D32",
        L,
        "nn.init.orthogonal_(parameter) if",
        "nn.init.xavier_uniform_(parameter) if",
        test_atari.test_d32_layer_initialization_for_lstm,
    ),
    ("D33", L, "torch.zeros(2, n", "torch.ones(2, n", test_atari.test_d33_initialize_lstm_states_to_zeros),
    ("D34", L, "state * (1 - start)", "state * (1 + start)", test_atari.test_d34_stretches_equal_rows),
    ("D34", L, " & ~self.fillers\n", "\n", test_atari.test_d34_starts_after_lost_lives),
    ("D34", L, "(were_fillers | ", "(", test_atari.test_d34_reset_lstm_states_at_episode_end),
    (
        "D35",
        L,
        "torch.randperm(args.num_envs, device=device)",
        "torch.arange(args.num_envs)",
        test_atari.test_d35_sequential_rollouts_in_mini_batches,
    ),
    (
        "D36",
        L,
        "self.features(batch.obs), batch.state",
        "self.features(batch.obs), 0 * batch.state",
        test_atari.test_d36_reconstruct_lstm_states_during_training,
    ),
    (
        "D13",
        P,
        "nn.Sequential(*hidden_layers(num_inputs), output)",
        "nn.Sequential(*self.critic[:4], output)",
        test_details.test_d13_shared_and_separate_networks,
    ),
    (
        "D18",
        A,
        "img_width=width",
        "img_width=height // 2 * 2 - 4",
        test_atari.test_d18_warp_frame,
    ),
    ("D18", A, "grayscale=grayscale", "grayscale=False", test_atari.test_d18_warp_frame),
    ("D20", A, "stack_num=stack", "stack_num=1", test_atari.test_d20_frame_stack),
    (
        "D21",
        A,
        "nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(inplace=True)",
        "nn.Conv2d(64, 64, 3, stride=1)), nn.Tanh()",
        test_atari.test_d21_shared_nature_cnn,
    ),
    (
        "D24",
        C,
        "self.log_std = nn.Parameter(torch.zeros(self.action_shape))",
        "self.log_std = torch.zeros(self.action_shape)",
        test_continuous.test_d24_state_independent_log_standard_deviation,
    ),
    (
        "D26",
        C,
        "nn.Sequential(*hidden_layers(num_inputs), output)",
        "nn.Sequential(*self.critic[:4], output)",
        test_continuous.test_d26_separate_mlp_networks_for_continuous_control,
    ),
    (
        "D28",
        C,
        "self.obs_moments.update(np.asarray(",
        "(lambda *_: None)(np.asarray(",
        test_continuous.test_d28_normalization_of_observation,
    ),
    (
        "D37",
        M,
        "logprobs = all_logprobs.gather(-1, batch.actions + self.starts).sum(-1)",
        "logprobs = all_logprobs.gather(-1, batch.actions + self.starts).mean(-1)",
        lambda script: test_multidiscrete.test_d37_independent_components_of_multidiscrete_actions(
            script, "start_multi"
        ),
    ),
    (
        "D37",
        M,
        "batch.actions + self.starts",
        "batch.actions",
        lambda script: test_multidiscrete.test_d37_independent_components_of_multidiscrete_actions(
            script, "matrix_multi"
        ),
    ),
    (
        "A2",
        P,
        "            dist.all_reduce(sums)\n",
        "",
        test_processes.test_a2_parallelized_gradient_update,
    ),
    (
        "A2",
        P,
        "torch.ones(1, device=device)]) * minibatch.valid.sum()",
        "torch.ones(1, device=device)])",
        test_processes.test_a2_parallelized_gradient_update,
    ),
    (
        "A4",
        K,
        "logits.where(valid, torch.finfo(logits.dtype).min)",
        "logits.where(valid, logits - 5)",
        test_multidiscrete.test_a4_invalid_action_masking,
    ),
    (
        "A4",
        K,
        "valid[..., self.starts] |= masks.float() @ self.membership == 0",
        "pass",
        test_multidiscrete.test_a4_nothing_valid_in_a_component,
    ),
    (
        "A4",
        K,
        "masks[t] = torch.as_tensor(envs.masks)",
        "masks[t] = True",
        lambda script: test_multidiscrete.test_a4_masks_belong_to_their_observations(script, "Mask"),
    ),
    (
        "fillers",
        P,
        "terms.flatten(1) @ weights.flatten()",
        "terms.flatten(1).mean(1)",
        test_learning.test_fillers_teach_nothing,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m[0]}-{i}" for i, m in enumerate(MUTANTS)])
def test_a_broken_detail_is_noticed(mutant, monkeypatch, tmp_path):
    _, name, old, new, test = mutant
    path = ROOT / f"{name}.py"
    text = path.read_text()
    assert old in text, "the script no longer says this"
    text = text.replace(old, new)
    broken = types.ModuleType(f"broken_{name}")
    broken.__file__ = str(path)
    monkeypatch.setitem(sys.modules, broken.__name__, broken)
    exec(compile(text, str(path), "exec"), broken.__dict__)
    broken.__name__ = name
    arguments = {"script": broken, "monkeypatch": monkeypatch}
    wanted = inspect.signature(test).parameters
    if "ranks" in wanted:  # processes of their own, which have to import the broken script from a file
        (tmp_path / path.name).write_text(text)
        arguments["ranks"] = test_processes.run_worker(name, tmp_path)
    with pytest.raises((AssertionError, RuntimeError)):
        test(**{key: value for key, value in arguments.items() if key in wanted})


@pytest.mark.parametrize("tag", TITLES)
def test_the_statement_below_a_tag_is_the_one_that_does_it(tag):
    """Breaking one of the 8 lines below the comment of the tag is what some test notices."""
    distances = []
    for _, name, old, _, _ in (mutant for mutant in MUTANTS if mutant[0] == tag):
        text = source(name)
        code = text.splitlines()
        first = tag_comments(text)[tag][0]
        while code[first].lstrip().startswith("#"):
            first += 1
        distances.append(text.count("\n", 0, text.index(old) + len(old)) - first)
    assert any(0 <= distance < 8 for distance in distances), f"mutants of [{tag}]: {distances} lines below it"
