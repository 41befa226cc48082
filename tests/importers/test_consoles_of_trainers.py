"""What trainers print: the steps and metrics of each console, whose names they are, and the options above them."""

import json
import pprint
from dataclasses import dataclass, field
from typing import Any

import pytest

from rolloutdoctor.metric_names.table import writers
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.opening.stated.settings import read

STEPS = range(6)


def reward(step):
    return round(0.25 + 0.0123 * step, 6)


def bar(name, done, total, shown=""):
    return f"{name}: {100 * done // total:3d}%|{'█' * done}| {done}/{total} [00:0{done}<00:09,  1.20s/it{shown}]"


def rich_table(step, metrics):
    rows = [f"│ {name:<30} │ {f'{value:.6f}':<10} │" for name, value in metrics.items()]
    edges = [f"{left}{'━' * 32}{mid}{'━' * 12}{right}" for left, mid, right in ("┏┳┓", "┡╇┩", "└┴┘")]
    return "\n".join(
        [f"Step {step}".center(47), edges[0], f"┃ {'Metric':<30} ┃ {'Value':<10} ┃", edges[1], *rows, edges[2]]
    )


def ray(name, text):
    """Return text as Ray prints it, a line of another process within."""
    first, *rest = (f"\x1b[36m({name} pid=77)\x1b[0m {line}" for line in text.split("\n"))
    return "\n".join([first, *rest[:1], "(LLMRayActor pid=9) INFO 08-01 12:00:00 [block_pool.py:280] reset", *rest[1:]])


def openrlhf(step):
    metrics = {"policy_loss": 0.5, "actor_lr": 1e-06, "rollout/reward_mean": reward(step)}
    return "\n".join(
        [
            bar("(PolicyModelActor pid=5) Train epoch [1/1]", 8, 8, ", act_loss=0.5, reward=0.9, kl=0.01"),
            f"(PPOTrainer pid=3) INFO 08-01 12:00:00 ppo_trainer.py:547] ✨ Global step {step + 1}: {metrics}",
        ]
    )


def openrlhf_of_old(step):
    metrics = {"policy_loss": 0.5, "actor_lr": 1e-06, "reward": reward(step), "response_length": 100.0}
    return f"(PPOTrainer pid=3) INFO 05-01 12:00:00 ppo_trainer.py:322] ✨ Global step {step + 1}: {metrics}"


def openrlhf_of_bars(step):
    inner = [
        bar("(ActorModelRayActor pid=5) Train epoch [1/1]", done, 4, ", pg=0.1, rm=0.9, kl=0.2, act_lr=5e-07")
        for done in (1, 4)
    ]
    shown = f", policy_loss=0.5, actor_lr=5e-07, reward={reward(step)}, kl=0.01, response_length=400"
    return "\n".join([*inner, bar("(ActorModelRayActor pid=5) Episode [1/1]", step + 1, 60, shown)])


def roll(step):
    metrics = {"system/step": step, "critic/score/mean": reward(step), "actor_train/grad_norm": 0.5, "actor/lr": 1e-6}
    head = "[2026-08-01 12:00:00] [rlvr_pipeline.py (837)] [INFO] [DRIVER 0 / 1][PID 9] "
    return f"{head}pipeline step {step} start...\n{head}{json.dumps(metrics)}"


def roll_tracker(step):
    metrics = {"critic/score/mean": reward(step), "actor_train/grad_norm": 0.5, "actor/lr": 1e-6}
    head = "[2026-08-01 12:00:00] [tracking.py (140)] [INFO] [DRIVER 0 / 1][PID 9] "
    return f"{head}metrics_tag: {json.dumps({'step': step, 'metrics': metrics})}"


def skyrl(step):
    metrics = {
        "trainer/global_step": step + 1,
        "reward/avg_raw_reward": f"{reward(step):.4f}",
        "policy/policy_lr": "0.0000",
        **{f"policy/{name}": f"{0.0123 * (step + 1):.4f}" for name in ("grad_norm", "policy_kl", "policy_entropy")},
        "policy/final_loss": f"{0.0311 * step:.4f}",
    }
    head = "2026-08-01 12:00:01.123 | INFO     | skyrl.train.utils.tracking:log:189 - "
    status = f"{head}{ {'final_loss': 0.0123456, 'policy_lr': 1e-06, 'grad_norm': 0.0123}!s}"
    return f"{status}\n{ray('skyrl_entrypoint', f'{head}Step {step + 1}: ' + chr(10) + pprint.pformat(metrics))}"


def skyrl_with_a_tracker(step):
    head = "(skyrl_entrypoint pid=77) 2026-08-01 12:00:01.123 | INFO     | skyrl_train.trainer:train:497 - "
    status = {"final_loss": 0.5, "policy_loss": 0.5, "policy_lr": 1e-06, "policy_entropy": 0.4, "raw_grad_norm": 0.3}
    rewards = f"{head}reward/avg_pass_at_8: 0.75, reward/avg_raw_reward: {reward(step)}"
    return f"{rewards}\n{head}{status}\n{bar('Training Step Progress', step + 1, 60)}"


def nemo_rl(step):
    return "\n".join(
        [
            f"\n{'=' * 25} Step {step + 1}/60 {'=' * 25}",
            "▶ Generating responses for batch of size 512...",
            "📊 Training Results:",
            "  • Loss: 0.0123",
            "  • Generation KL Error: 0.0011",
            f"  • Avg Reward: {reward(step):.4f}",
            "⏱️  Timing:",
            "  • Total step time: 12.34s",
            "  • policy_training: 12.32s (31.5%)",
        ]
    )


def prime_rl(step):
    return (
        f"\x1b[2m12:00:00\x1b[0m \x1b[32mSUCCESS\x1b[0m Step {step} |   40.0s | Reward {reward(step):.4f} | "
        "Trainable 90/128 (70.3%) | Turns 1.0 | Max Off-Policy 1 | Error 0.0% | Truncation 2.5%\x1b[0m"
    )


def prime_rl_as_json(step):
    return json.dumps({"timestamp": "2026-08-01", "level": "SUCCESS", "message": prime_rl(step), "line": 888})


def open_instruct(step):
    return "\n".join(
        [
            f"╭{'─' * 24} Metrics {'─' * 25}╮",
            "│  loss    policy_avg: -0.01 | kl_avg: 9.95e-06            │",
            f"│  other   training_step: {step + 1} | scores: {reward(step):.2f} | lr:        │",
            "│          1.00e-06 | episode: 512                         │",
            "│  policy  entropy_avg: 0.61                               │",
            f"╰{'─' * 58}╯",
        ]
    )


def torchforge(step):
    return "\n".join(
        [
            "Step 1: the reward: 1.0, and the loss: 0.5",
            f"INFO:forge.observability.metrics: === [global_reduce] - METRICS STEP {step + 1} ===",
            "  grpo_loss/kl_divergence_mean: 0.0123",
            f"  reward/evaluate_response/avg_total_reward: {reward(step)}",
            "  rl_trainer/learning_rate: 1e-06",
            "==============================",
        ]
    )


def rlinf(step):
    return "\n".join(
        [
            f"╭{'─' * 118}╮",
            f"│ Global Step: {step + 1:4d}/60 │ Progress: ██░░░░ │   5.1%                           │",
            "│step=311.6                             │generate_rollouts=123.4                │                     │",
            f"│advantages_mean=0.0000                 │rewards={reward(step):.4f}                         │    │",
            "│actor/approx_kl=9.95e-04               │actor/grad_norm=0.302                  │actor/lr=1.00e-06    │",
            "│a_name_that_is_too_long_for_its_cell=0…│actor/policy_loss=0.0123               │                     │",
            f"╰{'─' * 118}╯",
        ]
    )


def rlinf_of_texts(step):
    return bar(
        "Global Step",
        step + 1,
        60,
        f", step=40, rewards={reward(step)}, actor/policy_loss=0.5, actor/grad_norm=0.3, actor/kl_loss=0.01",
    )


def tinker(step):
    return rich_table(step, {"env/all/reward/total": reward(step), "optim/lr": 4e-5, "progress/batch": float(step)})


def rllm(step):
    return rich_table(step + 1, {"reward/solver/mean": reward(step), "train/entropy": 0.5, "progress/lr": 4e-5})


def oat(step):
    metrics = {
        "actor/rewards": reward(step),
        "actor/response_tok_len": 400.0,
        **{f"train/{name}": 0.5 for name in ("pg_loss", "entropy", "policy_grad_norm", "pg_clipfrac", "adv_mean")},
        "misc/lr": 1e-6,
        "misc/global_step": step + 1,
    }
    return f"learn data size torch.Size([128, 3000])\n\n{pprint.pformat(metrics)}\n"


def pipeline_rl(step):
    metrics = {"stats/lr": "1.000e-06", "stats/grad_norm": "0.302", "rl/reward": f"{reward(step):.3f}", "rl/kl": "0.01"}
    return f"[finetune]: 08/01/2026 12:00:00.123 - INFO - context - Completed steps {step + 1}: {metrics}"


def areal(step):
    cells = {"ppo_actor/task_reward/avg": reward(step), "ppo_actor/update/lr": 1e-6, "timeperf/rollout": 20.0}
    row = "│".join(f" {name} │ {value:.4e} " for name, value in cells.items())
    head = "\x1b[1;38;2;180;140;80m(AReaL)\x1b[0m \x1b[92m20260801-12:00:00.123 StatsLogger INFO: "
    return f"{head}Epoch 1/1 Step {step + 1}/60 Train step {step + 1}/60 done.\x1b[0m\n╒═╤═╕\n│{row}│\n╘═╧═╛"


def areal_of_old(step):
    return areal(step).replace("ppo_actor/update/", "grpo_actor/").replace("ppo_actor", "grpo_actor")


def easy_r1(step):
    text = f"""\
Step {step + 1}
actor:
  grad_norm: 0.3
  kl_coef: 0.01
  lr: 1.0e-06
critic:
  score:
    max: 1.0
    mean: {reward(step)}
timing_s:
  gen: 12.5"""
    return f"Start generating batch...\n{ray('Runner', text)}\n{bar('Running step', step + 1, 60)}"


def cosmos_rl(step):
    return (
        f"[cosmos] 2026-08-01 12:00:00,000 - INFO - Step: {step + 1}/60, Reward Mean: {reward(step):.4f}, Reward Std: "
        "0.4000, Reward Max: 1.0000, Reward Min: 0.0000, Completion Length Mean: 420.76, Average loss: 0.01230, "
        "Max loss: 0.11, Learning rate: 1.00000e-06, Entropy: 0.62000, Grad Norm: 0.30200, KL Loss Avg: 0.00100"
    )


def slime(step):
    head = "(MegatronTrainRayActor pid=35) [2026-08-01 12:00:02] "
    rollout = {"rollout/raw_reward": reward(step), "rollout/advantages": 1e-9}
    update = {"train/loss": 0.5, "train/grad_norm": 0.3, "train/step": step}
    return f"{head}data.py:119 - rollout {step}: {rollout}\n{head}model.py:665 - step {step}: {update}"


def verl(step):
    metrics = f"critic/score/mean:{reward(step)} - actor/pg_loss:0.5 - actor/grad_norm:0.3 - actor/lr:0.000"
    line = f"\x1b[36m(TaskRunner pid=222)\x1b[0m step:{step + 1} - {metrics}"
    return f"{line}\n{bar('(TaskRunner pid=222) Training Progress', step + 1, 60)}"


def deepspeed_chat(step):
    return "\n".join(
        [
            f"Epoch: 0 | Step: {step} | PPO Epoch: 1 | Actor Loss: 0.5 | Critic Loss: 0.05 | Unsupervised Loss: 0.0",
            "Generation => Latency: 2.74s, Per-token Latency 10.70 ms, TFLOPs: 4.84, Answer Seq. Length: 256",
            f"Average reward score: {reward(step)} | EMA reward score: 0.1",
            "-" * 80,
        ]
    )


def art(step):
    gathered = [
        bar("gather", done, 4, f", reward={reward(step) - 0.1 * (4 - done):.4f}, exceptions=0") for done in (1, 4)
    ]
    trained = [bar("train", 1, 2, ", loss=0.5, grad_norm=0.7"), bar("train", 2, 2, ", loss=0.5, grad_norm=0.3")]
    return "\n".join([bar("gather", 0, 4), *gathered, "Packed 4 trajectories", bar("train", 0, 2), *trained])


def trlx(step):
    losses = f"[losses/total_loss: 0.01 | losses/policy_loss: 0.02]: {bar('', 5 * step + 5, 60)[2:]}"
    text = "Step 1: the reward: 1.0, the loss: 0.5" if step == 3 else ""
    return f"{losses}\n[RANK 0] Summarizing evaluation\n   Evaluation #{step} reward/mean: {reward(step)}\n{text}"


def trinity(step):
    explored = f"{{'rollout/accuracy/mean': np.float64({reward(step)}), 'time/run': 12.1, 'rollout/model_version': 1}}"
    trained = {"actor/pg_loss": 0.5, "actor/grad_norm": 0.3, "critic/score/mean": reward(step), "actor/lr": 1e-6}
    lines = ((f"Explorer pid={11 + step % 2}", explored), ("Trainer pid=12", trained))
    return "\n".join(f"({name}) INFO 08-01 12:00:00 [monitor.py:112] Step {step + 1}: {shown}" for name, shown in lines)


def ms_swift(step):
    row = {"loss": 0.5, "reward": reward(step), "kl": 0.01, "train_speed(iter/s)": 0.02, "epoch": 0.1 * (step + 1)}
    return (
        f"{row | {'global_step/max_steps': f'{step + 1}/60', 'elapsed_time': '1m 12s'}}\n{bar('Train', step + 1, 60)}"
    )


def verifiers(step):
    row = {"loss": 0.5, "grad_norm": 0.3, "learning_rate": 1e-06, "reward": reward(step), "tokens/completion": 400.0}
    line = row | {"importance_ratio": 1.0, "entropy": 0.5, "epoch": round((step + 1) / 60, 2)}
    return f"{line}\n{bar('', step + 1, 60)[2:]}"


OPENRLHF = (
    "Namespace(actor=Namespace(adam=Namespace(lr=1e-06), eps_clip=0.2), algo=Namespace(advantage=Namespace("
    "estimator='group_norm'), kl=Namespace(init_coef=0.001)), rollout=Namespace(n_samples_per_prompt=8))"
)
OPENRLHF_OLD = (
    "Namespace(eps_clip=0.2, advantage_estimator='group_norm', init_kl_coef=0.001, n_samples_per_prompt=8, "
    "rollout_batch_size=128, max_epochs=1, actor_learning_rate=1e-06)"
)
NEMO_RL = (
    "Final config:\nMasterConfig(grpo=GRPOConfig(num_prompts_per_step=32, num_generations_per_prompt=16), "
    "loss_fn=ClippedPGLossConfig(reference_policy_kl_penalty=0.01, ratio_clip_min=0.2, ratio_clip_max=0.2))"
)
OPEN_INSTRUCT = """\
[
│   ExperimentConfig(
│   │   seed=1,
│   │   beta=0.01,
│   │   clip_lower=0.2,
│   │   num_learners_per_node=[8],
│   │   clip_higher=0.272
│   ),
│   ModelConfig(
│   │   model_revision=None
│   ),
│   StreamingDataLoaderConfig(
│   │   num_samples_per_prompt_rollout=16
│   )
]"""


SKYRL = ray(
    "skyrl_entrypoint",
    """\
2026-08-01 12:00:01.123 | INFO     | skyrl.train.entrypoints.main_base:run:258 - trainer:
  algorithm:
    advantage_estimator: grpo
    kl_loss_coef: 0.001
  policy:
    optimizer_config:
      lr: 1.0e-06
  critic:
    optimizer_config:
      lr: 5.0e-06
generator:
  n_samples_per_prompt: 5
  sampling_params:
    temperature: 1.0""",
)
RLINF = json.dumps(
    {"algorithm": {"kl_beta": 0.0, "group_size": 8}, "actor": {"optim": {"lr": 1e-6}}, "runner": {"max_epochs": 60}},
    indent=2,
)
RLLM = "\n".join(
    f"│ {name:<40} │ {value:>20} │"
    for name, value in {"algorithm.adv_estimator": "grpo", "training.learning_rate": 2e-5, "rollout.n": 8}.items()
)
ROLL = """\
adv_estimator: reinforce
kl_loss_coef: 0.001
actor_train:
  training_args:
    learning_rate: 1.0e-06
critic:
  training_args:
    learning_rate: 1.0e-05"""
EASY_R1 = json.dumps(
    {"algorithm": {"kl_coef": 0.02}, "worker": {"actor": {"optim": {"lr": 1e-6}}, "rollout": {"n": 5}}}, indent=2
)
TINKER = "Configuration:\n  learning_rate: 4e-05\n  kl_penalty_coef: 0.0\n  max_tokens: 512\n  model_name: 'x'"


@dataclass
class Console:
    """What one trainer prints: the text of a step, and what is read of six of them.

    Attributes:
        of_step: text of a step that is counted from 0.
        reward: the name of the mean reward.
        writer: whose names they are; empty: any loop's.
        first: number of the first step.
        more: other metrics of every step.
        head: what it prints of its options.
        trainer: whose options these are; empty: settings that tell no trainer.
        options: some of them.
    """

    of_step: Any
    reward: str
    writer: str
    first: int = 1
    more: dict[str, float] = field(default_factory=dict)
    head: str = ""
    trainer: str = ""
    options: dict[str, object] = field(default_factory=dict)


CONSOLES = (
    # openrlhf/trainer/ppo_trainer.py, fit; openrlhf/cli/train_ppo_ray.py, train (0.11, and before it)
    Console(openrlhf, "train/rollout/reward_mean", "openrlhf", more={"train/actor_lr": 1e-6}, head=OPENRLHF,
        trainer="openrlhf", options={"algo.advantage.estimator": "group_norm", "algo.kl.init_coef": 0.001}),
    Console(openrlhf_of_old, "train/reward", "openrlhf", head=OPENRLHF_OLD, options={"init_kl_coef": 0.001}),
    # openrlhf/trainer/ppo_trainer.py, save_logs_and_checkpoints, and openrlhf/trainer/ray/ppo_actor.py, ppo_train (0.6)
    Console(openrlhf_of_bars, "reward", "openrlhf", more={"policy_loss": 0.5, "kl": 0.01}),
    # roll/pipeline/rlvr/rlvr_pipeline.py, run; examples/start_rlvr_pipeline.py, main; roll/utils/tracking.py,
    # StdoutTracker.log
    Console(roll, "critic/score/mean", "roll", 0, {"actor_train/grad_norm": 0.5}, head=ROLL, options={
        "kl_loss_coef": 0.001, "actor_train.training_args.learning_rate": 1e-6,
        "critic.training_args.learning_rate": 1e-5}),
    Console(roll_tracker, "critic/score/mean", "roll", 0, {"actor_train/grad_norm": 0.5}),
    # skyrl/train/utils/tracking.py, ConsoleLogger.log; skyrl/train/entrypoints/main_base.py, get_cfg_as_str
    Console(skyrl, "reward/avg_raw_reward", "skyrl", more={"policy/policy_lr": 0.0}, head=SKYRL, trainer="skyrl",
        options={"trainer.algorithm.kl_loss_coef": 0.001, "generator.n_samples_per_prompt": 5,
            "trainer.policy.optimizer_config.lr": 1e-6, "trainer.critic.optimizer_config.lr": 5e-6}),
    # skyrl/train/trainer.py, postprocess_generator_output and train
    Console(skyrl_with_a_tracker, "reward/avg_raw_reward", "skyrl", more={"policy_lr": 1e-6, "raw_grad_norm": 0.3}),
    # nemo_rl/algorithms/grpo.py, grpo_train; examples/run_grpo.py, main
    Console(nemo_rl, "train/reward", "nemo-rl", more={"train/loss": 0.0123}, head=NEMO_RL, trainer="nemo-rl",
        options={"grpo.num_generations_per_prompt": 16, "loss_fn.ratio_clip_max": 0.2}),
    # src/prime_rl/orchestrator/orchestrator.py, log_train_batch; src/prime_rl/utils/logger.py, json_sink
    Console(prime_rl, "train/agg/all/reward/mean", "prime-rl", 0, {"train/agg/all/is_truncated/mean": 0.025}),
    Console(prime_rl_as_json, "train/agg/all/reward/mean", "prime-rl", 0),
    # open_instruct/model_utils.py, print_rich_single_line_metrics; open_instruct/grpo_fast.py, main
    Console(open_instruct, "scores", "open-instruct", more={"loss/kl_avg": 9.95e-6, "lr": 1e-6}, head=OPEN_INSTRUCT,
        trainer="open-instruct", options={"beta": 0.01, "num_samples_per_prompt_rollout": 16}),
    # src/forge/observability/metrics.py, ConsoleBackend.log_batch
    Console(torchforge, "reward/evaluate_response/avg_total_reward", "torchforge", more={
        "grpo_loss/kl_divergence_mean": 0.0123}),
    # rlinf/utils/metric_utils.py, print_metrics_table; rlinf/runners/reasoning_runner.py, run; main of its examples
    Console(rlinf, "rewards", "rlinf", more={"actor/grad_norm": 0.302, "actor/approx_kl": 9.95e-4}, head=RLINF,
        options={"algorithm.group_size": 8, "actor.optim.lr": 1e-6}),
    Console(rlinf_of_texts, "rewards", "rlinf", more={"actor/kl_loss": 0.01}),
    # tinker_cookbook/utils/ml_log.py, PrettyPrintLogger.log_metrics
    Console(tinker, "env/all/reward/total", "tinker-cookbook", 0, {"optim/lr": 4e-5}, head=TINKER,
        options={"learning_rate": 4e-5, "kl_penalty_coef": 0.0}),
    # rllm/trainer/algorithms/visualization.py, print_metrics_table and print_config_table
    Console(rllm, "reward/solver/mean", "rllm", more={"progress/lr": 4e-5}, head=RLLM,
        options={"algorithm.adv_estimator": "grpo", "rollout.n": 8}),
    # oat/learners/base.py, eval_and_log
    Console(oat, "actor/rewards", "oat", more={"train/policy_grad_norm": 0.5}),
    # pipelinerl/finetune/logging_.py, log_metrics
    Console(pipeline_rl, "rl/reward", "pipeline-rl", more={"stats/grad_norm": 0.302}),
    # areal/utils/stats_logger.py, commit
    Console(areal, "ppo_actor/task_reward/avg", "areal", 0, {"ppo_actor/update/lr": 1e-6}),
    # areal/engine/ppo/actor.py, ppo_update; examples/math/gsm8k_grpo.py, main (0.3.3)
    Console(areal_of_old, "grpo_actor/task_reward/avg", "areal", 0, {"grpo_actor/lr": 1e-6}),
    # EasyR1's verl/utils/logger/logger.py, ConsoleLogger.log; verl/trainer/main.py, run
    Console(easy_r1, "critic/score/mean", "verl", more={"actor/lr": 1e-6, "critic/score/max": 1.0},
        head=EASY_R1, options={"algorithm.kl_coef": 0.02, "worker.actor.optim.lr": 1e-6}),
    # cosmos_rl/dispatcher/status.py, train_ack
    Console(cosmos_rl, "reward_mean", "", more={"average_loss": 0.0123, "grad_norm": 0.302}),
    # slime/observability/train_metric_utils.py, gather_log_data; slime/backends/megatron_utils/model.py, train
    Console(slime, "rollout/raw_reward", "slime", 0, {"train/grad_norm": 0.3}),
    # verl/utils/logger/aggregate_logger.py, concat_dict_to_str
    Console(verl, "critic/score/mean", "verl", more={"actor/grad_norm": 0.3}),
    # applications/DeepSpeed-Chat/training/step3_rlhf_finetuning/main.py, main
    Console(deepspeed_chat, "average_reward_score", "", 0, {"actor_loss": 0.5}),
    # src/art/gather.py, GatherContext.update_pbar; src/art/local/backend.py, _train_model
    Console(art, "reward", "", more={"loss": 0.5, "grad_norm": 0.3}),
    # trlx/trainer/accelerate_base_trainer.py, evaluate and learn: the rewards are of evaluations alone
    Console(trlx, "reward/mean", ""),
    # trinity/utils/monitor.py, log, of two processes
    Console(trinity, "critic/score/mean", "verl", more={"actor/grad_norm": 0.3}),
    # swift/trainers/patcher.py, on_log
    Console(ms_swift, "reward", "ms-swift", more={"kl": 0.01}),
    # verifiers/rl/trainer/trainer.py, log
    Console(verifiers, "reward", "verifiers", more={"tokens/completion": 400.0}),
)  # fmt: skip


@pytest.mark.parametrize("console", CONSOLES, ids=lambda console: console.of_step.__name__)
def test_a_trainers_console_is_read_whole(console, tmp_path):
    path = tmp_path / "train.log"
    path.write_text("\n".join([console.head, *map(console.of_step, STEPS)]) + "\n", encoding="utf-8")
    told = []
    with open_any([str(path)], trainer=None, options=ConvertOptions(), tell=told.append, logs_alone=True) as run:
        steps = {key.step: run.metrics.at(key) for key in run.metrics.steps()}
        metadata = run.metadata
    assert sorted(steps) == [console.first + step for step in STEPS]
    for step in STEPS:
        values = steps[console.first + step]
        assert values[console.reward] == pytest.approx(
            reward(step), abs=6e-3 if console.of_step is open_instruct else 6e-4
        )
        assert {name: values[name] for name in console.more} == pytest.approx(console.more)
    assert writers(steps[console.first])[:1] == ((console.writer,) if console.writer else ())
    stated = {name: read(value) for name, value in metadata.config.items()}
    stated |= {setting.name: setting.value for setting in metadata.settings}
    assert metadata.trainer == (console.trainer or None), told
    assert console.options.items() <= stated.items()


@pytest.mark.parametrize(("rounds", "steps"), [(5, 20), (6, 6)])
def test_a_bar_that_is_drawn_anew_often_is_of_a_step_each_time(rounds, steps, tmp_path):
    drawn = [bar("loop", done, 4, ", loss=0.5, reward=0.25") for _ in range(rounds) for done in range(1, 5)]
    (tmp_path / "train.log").write_text("\n".join(drawn) + "\n", encoding="utf-8")
    paths = [str(tmp_path / "train.log")]
    with open_any(paths, trainer=None, options=ConvertOptions(), tell=list, logs_alone=True) as run:
        assert len(run.metrics.steps()) == steps
