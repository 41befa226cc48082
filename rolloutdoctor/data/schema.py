"""The columns of a run file: one table that reading, writing, `info` and the docs share.

One row of a run file is one trained response. Token columns are aligned to the response (tool and observation
tokens included), never padded, and all of one row have the same length.
"""

from dataclasses import dataclass
from enum import Enum

SCHEMA_VERSION = 1
METADATA_KEY = "rolloutdoctor"


class Kind(Enum):
    """Kind of a column's cells."""

    INTEGER = "int64"
    NUMBER = "float64"
    IDENTIFIER = "string or integer"
    TEXT = "string"
    MESSAGES = "string or list<struct<role, content>>"
    NAMED_NUMBERS = "struct or map of float64"
    TURNS = "list<struct<author, start, stop, ...>>"
    FLOATS = "list<float32>"
    TOKENS = "list<int32>"
    MASK = "list<bool or uint8>"

    @property
    def per_token(self) -> bool:
        """True if a cell is a list with one value per response token."""
        return self in (Kind.FLOATS, Kind.TOKENS, Kind.MASK)


@dataclass(frozen=True)
class Column:
    """One column of the contract.

    Attributes:
        name: canonical name.
        kind: what its cells are.
        meaning: one line.
        aliases: names of other trainers that are read as this column.
        aligned: True if a list cell has exactly one value per response token.
        compared: True if its cells matter only as the same or another, in any step.
    """

    name: str
    kind: Kind
    meaning: str
    aliases: tuple[str, ...] = ()
    aligned: bool = True
    compared: bool = False

    @property
    def per_token(self) -> bool:
        """True if the column is packed along the token axis of a batch."""
        return self.kind.per_token and self.aligned

    @property
    def hashed(self) -> bool:
        """True if a batch carries a hash of each cell in its place: what it says matters only as same or other."""
        return self.compared or self.kind is Kind.MESSAGES or (self.kind is Kind.TOKENS and not self.aligned)


COLUMNS: tuple[Column, ...] = (
    Column("step", Kind.INTEGER, "optimizer step as logged", ("global_step", "iteration")),
    Column(
        "group_id",
        Kind.IDENTIFIER,
        "responses to one prompt; unique within a step; absent: `task_id`",
        ("uid", "group_index", "prompt_idx", "group_idx"),
    ),
    Column("task_id", Kind.IDENTIFIER, "which task the row is an attempt at, the same in any step", compared=True),
    Column("sample_id", Kind.IDENTIFIER, "stable row key", ("sample_index", "rollout_position", "idx")),
    Column("split", Kind.TEXT, "train or eval; absent means train", ("kind",)),
    Column(
        "reward",
        Kind.NUMBER,
        "the task's score before any KL penalty; null or NaN: the row could not be scored",
        ("score", "total_reward", "raw_reward", "scores"),
    ),
    Column("rewards", Kind.NAMED_NUMBERS, "one number per reward function"),
    Column("token_rewards", Kind.FLOATS, "dense rewards, one per token", ("token_level_scores",)),
    Column("reward_baseline", Kind.NUMBER, "reward of the greedy rollout (ReMax)", ("reward_baselines",)),
    Column("advantage", Kind.NUMBER, "as the trainer computed it, one per row"),
    Column("advantages", Kind.FLOATS, "as the trainer computed them, one per token"),
    Column("prompt", Kind.MESSAGES, "the prompt; never needed for the maths", ("input",)),
    Column("response", Kind.MESSAGES, "the response; never needed for the maths", ("completion", "output")),
    Column(
        "ground_truth",
        Kind.MESSAGES,
        "the reference answer of the task; never needed for the maths",
        ("gts", "solution"),
    ),
    Column("prompt_ids", Kind.TOKENS, "token ids of the prompt", ("prompt_tokens",), aligned=False),
    Column(
        "response_ids",
        Kind.TOKENS,
        "token ids of the response",
        ("completion_ids", "response_tokens", "responses"),
    ),
    Column(
        "response_mask",
        Kind.MASK,
        "tokens the trainer trained on, after rejection and filters",
        ("loss_mask", "loss_masks", "action_mask"),
    ),
    Column("response_mask_pre", Kind.MASK, "the same before rejection; null: as `response_mask`", ("loss_mask_pre",)),
    Column(
        "rollout_log_probs",
        Kind.FLOATS,
        "log-probs of the sampler; NaN: the engine gave none",
        (
            "sampling_log_probs",
            "rollout_logprobs",
            "sampling_per_token_logps",
            "generation_logprobs",
            "inference_logprobs",
        ),
    ),
    Column(
        "old_log_probs",
        Kind.FLOATS,
        "log-probs of the trainer before the update; absent: equal to policy_log_probs",
        ("old_per_token_logps", "old_log_prob", "prev_logprobs", "action_log_probs"),
    ),
    Column(
        "policy_log_probs",
        Kind.FLOATS,
        "log-probs of the trainer at the loss; absent: equal to old_log_probs",
        ("per_token_logps", "log_prob", "trainer_logprobs"),
    ),
    Column(
        "ref_log_probs",
        Kind.FLOATS,
        "log-probs of the reference model",
        ("ref_per_token_logps", "ref_log_prob", "base_action_log_probs", "ref_logprobs"),
    ),
    Column("kl", Kind.FLOATS, "per-token KL as the trainer stored it"),
    Column("entropy", Kind.FLOATS, "per-token entropy as the trainer stored it", ("entropys",)),
    Column("values", Kind.FLOATS, "value predictions before the update"),
    Column("returns", Kind.FLOATS, "returns as the trainer stored them"),
    Column(
        "is_weights",
        Kind.FLOATS,
        "importance weights as the trainer stored them",
        ("rollout_is_weights", "importance_sampling_ratio"),
    ),
    Column("sum_pi_squared", Kind.FLOATS, "sum over the vocabulary of the squared policy probability"),
    Column("micro_batch_id", Kind.INTEGER, "which micro-batch of the optimizer step the row was in"),
    Column("pack_index", Kind.INTEGER, "place of the row among those packed into one sequence, from 0"),
    Column("optim_step_id", Kind.INTEGER, "which optimizer step, where one logged step holds several"),
    Column(
        "generation_id",
        Kind.INTEGER,
        "which generated batch the row is of, where an optimizer step trains on several",
    ),
    Column("trained_beyond", Kind.INTEGER, "trained tokens at the end of the row that are padding, not response"),
    Column("rank", Kind.INTEGER, "which data-parallel rank the row was on", ("data_parallel_rank", "dp_rank")),
    Column(
        "trajectory_id",
        Kind.INTEGER,
        "which trajectory the row is a part of, where one gives several rows",
        ("rollout_ids",),
    ),
    Column("turns", Kind.TURNS, "who wrote which tokens of the response: spans that do not overlap"),
    Column("status", Kind.TEXT, "finish reason: stop, length, aborted, ...", ("finish_reason", "stop_reason")),
    Column("error", Kind.TEXT, "why the rollout failed, as its environment says; null: it did not"),
    Column("policy_version_min", Kind.INTEGER, "oldest policy version that sampled the row", ("min_global_steps",)),
    Column("policy_version_max", Kind.INTEGER, "newest policy version that sampled the row", ("max_global_steps",)),
)

BY_NAME: dict[str, Column] = {column.name: column for column in COLUMNS}

METRIC_COLUMNS = ("step", "split", "name", "value")

IMPORT_METRICS = "import/"
"""Prefix of the metrics in which an importer says what it found in the files themselves."""

PROMPTS = ("prompt_ids", "prompt")
"""Columns that say which prompt a row answers, best first: the first of them that is there is read."""

TEXTS = ("prompt", "response", "ground_truth")
"""Columns of text, which are most of a file."""

STATED_ANSWER = "stated_answer"
"""Row value of a batch that has `response` and `ground_truth`: how they compare (`data.answers.compared`), int64."""

PROMPT_LENGTH = "prompt_length"
"""Row value that a batch carries beside the hash of `prompt_ids`: its tokens, int64, below 0 where null."""

PLACEHOLDER = "placeholder"
"""Row value beside the hash of `prompt_ids`: the id that stands for an image in the prompt, int64; -1: none."""

CONTEXT = ("context", "context_kept", "context_of")
"""Row values of a batch that has `prompt_ids`, `response_ids` and `trajectory_id`: what the row is to those before it
in its trajectory, and of a rewritten one how much of which response is kept (`ops.kept_contexts`), int64."""

STAND_INS = {
    "old_log_probs": ("old_log_probs", "policy_log_probs"),
    "policy_log_probs": ("policy_log_probs", "old_log_probs"),
}
"""Column to the columns that give it, best first."""

TRUNCATED = frozenset({"length", "truncated", "max_tokens", "max_length"})
"""Finish reasons of a response that was cut off."""

AUTHORS = ("model", "tool", "user", "system")
"""Who may have written a turn: the policy, an environment or tool, a user (or what plays one), a template."""

FAILED = frozenset({"abort", "aborted", "cancelled", "canceled", "error", "failed", "timeout", "timed_out"})
"""Values of the column status, in lower case, of a rollout that did not come to an end that could be scored."""
