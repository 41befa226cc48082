"""Rules that look at sampled tokens, and at the first tokens of each row by their contexts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.table_rule import TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock


class SampledTokens(TableRule):
    """A rule of the sampler's log-probs against the trainer's, token by token."""

    needs_objective = False
    splits = ("train",)
    needs = ("rollout_log_probs", "old_log_probs")

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask, version stamps, and what makes contexts."""
        prompts = {"prompt_ids"} if "prompt_ids" in context.columns else {"prompt"}
        stamps = {"policy_version_min", "policy_version_max"}
        return frozenset({"response_mask", "response_ids", "group_id", *stamps, *prompts})

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """The first tokens of each row."""
        from rolloutdoctor.rules.measures.contexts import first_tokens

        return first_tokens(block)
