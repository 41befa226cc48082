"""Edits of the recording `tools.parquet`, each the fault that a question about agents is about."""

from pathlib import Path

import polars as pl

HERE = Path(__file__).parent
TOOLS = HERE / "tools.parquet"
TOKENS = ("response_ids", "response_mask", "response_mask_pre", "policy_log_probs", "entropy")


def recorded() -> pl.DataFrame:
    """The rows as recorded."""
    return pl.read_parquet(TOOLS)


def failed_rollouts() -> pl.DataFrame:
    """A rollout in which a call failed has an error, and no reward: groups of them alone are flat."""
    failed = pl.col("turns").list.eval(pl.element().struct.field("error").is_not_null()).list.any()
    whole = failed.any().over("step", "group_id")
    rows = recorded().with_columns(error=pl.when(whole).then(pl.lit("timeout")))
    return rows.with_columns(pl.when(whole).then(0.0).otherwise("reward").alias("reward")).drop("advantage", "rewards")


def a_row_for_each_turn() -> pl.DataFrame:
    """Each turn of the policy is a row of its own, with what came before it in the prompt."""
    rows = recorded().with_row_index("trajectory_id")
    turns = rows.select("trajectory_id", turn=pl.col("turns")).explode("turn").unnest("turn")
    own = turns.filter(author="model").select("trajectory_id", "start", "stop", "turn")
    cut = [pl.col(name).list.slice("start", pl.col("stop") - pl.col("start")) for name in TOKENS]
    before = pl.concat_list("prompt_ids", pl.col("response_ids").list.head("start"))
    return (
        rows.join(own, on="trajectory_id", maintain_order="left")
        .with_columns(prompt_ids=before, sample_id=pl.format("{}/{}", "sample_id", "turn"))
        .with_columns(*cut)
        .with_columns(pl.col("trajectory_id").cast(pl.Int64))
        .drop("turns", "start", "stop", "turn", "prompt", "response")
    )


def groups_of_rollouts() -> pl.DataFrame:
    """Groups are named after the rollout, and every advantage is the raw reward."""
    return recorded().with_columns(group_id="sample_id", advantage="reward")


def advantages_of_the_turn_before() -> pl.DataFrame:
    """As `a_row_for_each_turn`, and each row has the advantage of the row before it."""
    return a_row_for_each_turn().with_columns(pl.col("advantage").shift(1).over("step", "group_id").fill_null(0.0))
