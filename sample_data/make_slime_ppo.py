"""Make `slime_ppo.parquet` and `slime_ppo.metrics.parquet`: a ppo run whose `rollout/kl` logged the reward.

slime needs Megatron and GPUs, so nothing of it runs here: its formulas are written out anew, in float32 and in its
order. Until its fix, which came after release 0.3.1, its ppo estimator built the token rewards in the very tensors
that hold the KL: they are multiplied by -kl_coef in place, and the reward is added to the last token.

Taken from `run.parquet`: the tokens, the log-probs of policy and reference, and the rewards. Constructed: four
responses to one prompt are joined into one row, as in a dialogue of several turns, with the second left out of the
loss like a tool's output and the reward of the last one; four recorded steps make one; the two halves of a step are
two ranks; the values of the critic are drawn around the mean reward. There is one update per rollout, so the policy at
the loss is the one before the update.

    python sample_data/make_slime_ppo.py

takes a second.
"""

from pathlib import Path

import polars as pl
import torch

from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.write.writer import RunWriter, metrics_path, write_metrics

SEED = 7
HERE = Path(__file__).parent
OUTPUT = HERE / "slime_ppo.parquet"
TURNS, TOOL_TURN = 4, 1
STEPS_JOINED = 4
RANKS = 2
CONFIG = {
    "advantage_estimator": "ppo",
    "kl_coef": 0.05,
    "kl_loss_type": "k3",
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "eps_clip_c": None,
    "gamma": 1.0,
    "lambd": 0.95,
    "normalize_advantages": False,
    "calculate_per_token_loss": False,
    "use_rollout_logprobs": False,
    "use_tis": False,
    "entropy_coef": 0.0,
    "n_samples_per_prompt": 2,
}


def joined(rows):
    """One row from the responses of several turns."""
    token_columns = ("response_ids", "policy_log_probs", "ref_log_probs")
    cells = {name: [value for row in rows for value in row[name]] for name in token_columns}
    mask = [int(turn != TOOL_TURN) for turn, row in enumerate(rows) for _ in row["response_ids"]]
    first = rows[0]
    return {
        "group_id": first["group_id"],
        "sample_id": first["sample_id"],
        "reward": rows[-1]["reward"],
        "prompt_ids": first["prompt_ids"],
        "response_mask": mask,
        **cells,
    }


def steps_of(recorded):
    """Rows of each constructed step."""
    for start in range(1, recorded["step"].max() + 1, STEPS_JOINED):
        rows = []
        block = recorded.filter(pl.col("step").is_between(start, start + STEPS_JOINED - 1))
        for _, group in block.group_by("step", "group_id", maintain_order=True):
            turns = group.to_dicts()
            rows += [joined(turns[i : i + TURNS]) for i in range(0, len(turns), TURNS)]
        yield start // STEPS_JOINED + 1, rows


def approximate_kl(policy, reference):
    """The k3 estimator, without a clamp."""
    towards_policy = reference - policy
    return towards_policy.exp() - 1 - towards_policy


def advantages_of(token_rewards, values):
    """Generalised advantage estimation over all tokens of a row, masked ones included; nothing follows the last."""
    gamma, lambd = CONFIG["gamma"], CONFIG["lambd"]
    found, following, value_after = torch.zeros_like(values), 0.0, 0.0
    for t in range(len(values) - 1, -1, -1):
        delta = token_rewards[t] + gamma * value_after - values[t]
        following = delta + gamma * lambd * following
        found[t], value_after = following, values[t]
    return found


def estimate(row, draw):
    """Add what slime has after its advantages, `kl` as release 0.3.1 leaves it."""
    policy, reference = torch.tensor(row["policy_log_probs"]), torch.tensor(row["ref_log_probs"])
    values = 0.6 + 0.2 * torch.randn(len(policy), generator=draw)
    kl = approximate_kl(policy, reference)
    token_rewards = kl  # the same memory: this is the fault
    token_rewards *= -CONFIG["kl_coef"]
    token_rewards[-1] += row["reward"]
    advantages = advantages_of(token_rewards, values)
    return {**row, "kl": kl, "values": values, "advantages": advantages, "returns": advantages + values}


def metrics_of(ranks):
    """What slime logs for the rows of each rank: most columns by row means, `kl` by one mean over all tokens."""
    rows = [row for rank in ranks for row in rank]

    def row_means(name):
        total = 0.0
        for row in rows:
            mask, values = torch.tensor(row["response_mask"]).float(), torch.as_tensor(row[name])
            total += float((values * mask).sum() / mask.sum().clamp(min=1))
        return total / len(rows)

    def mean(numbers):
        return sum(numbers) / len(rows)

    kl = sum(len(rank) * torch.cat([row["kl"] for row in rank]).mean().item() for rank in ranks) / len(rows)
    # With the policy of the rollout every ratio is one, and nothing is clipped.
    policy_loss = -row_means("advantages")
    return {
        "rollout/kl": kl,
        "rollout/rewards": mean(row["reward"] for row in rows),
        "rollout/raw_reward": mean(row["reward"] for row in rows),
        "rollout/response_lengths": mean(len(row["response_mask"]) for row in rows),
        "rollout/log_probs": row_means("policy_log_probs"),
        "rollout/ref_log_probs": row_means("ref_log_probs"),
        "rollout/values": row_means("values"),
        "rollout/advantages": row_means("advantages"),
        "rollout/returns": row_means("returns"),
        "train/loss": policy_loss,
        "train/pg_loss": policy_loss,
        "train/ppo_kl": 0.0,
        "train/pg_clipfrac": 0.0,
    }


def main():
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(SEED)
    recorded = pl.read_parquet(HERE / "run.parquet").filter(pl.col("split") == "train")
    metadata = RunMetadata(trainer="slime", trainer_version="0.3.1", config=CONFIG)
    metrics = []
    with RunWriter(OUTPUT, metadata) as writer:
        for step, bare in steps_of(recorded):
            rows = [estimate(row, draw) for row in bare]
            share = len(rows) // RANKS
            ranks = [rows[rank * share : (rank + 1) * share] for rank in range(RANKS)]
            metrics += [(step, "train", name, value) for name, value in metrics_of(ranks).items()]
            writer.write(
                [
                    {
                        "step": step,
                        "split": "train",
                        "rank": rank,
                        "micro_batch_id": 0,
                        "optim_step_id": 0,
                        **{n: cell.tolist() if isinstance(cell, torch.Tensor) else cell for n, cell in row.items()},
                        "old_log_probs": row["policy_log_probs"],
                    }
                    for rank, part in enumerate(ranks)
                    for row in part
                ]
            )
    write_metrics(metrics_path(OUTPUT), metrics)


if __name__ == "__main__":
    main()
