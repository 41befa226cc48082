"""RDI018: placeholders of images that the policy sampled."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.data.schema import PLACEHOLDER
from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock


class SpecialTokenSampled(TableRule):
    """The policy sampled a token that stands for an image or a video.

    ## What it does
    Finds the id that a prompt repeats in a long run, as processors write it for an image, and counts trained tokens of
    the response with this id. It needs no tokenizer.

    ## Why it matters
    Models pair each run of placeholders with an image. One that the policy sampled has no image behind it: the pairing
    moves or breaks, positions and features are those of something else, or the trainer ends with a shape error after
    hours. TRL suppresses the token of images from 1.16 on where transformers generates, not where vLLM does.

    ## How it is measured
    A placeholder is an id with a run of 64 or more between other ids of the prompt (`prompt_ids`); a run at either end
    is padding. Trained tokens with this id count in responses to the prompt, except for the last token. Runs of 16
    tokens or more are an image that a tool returned, trained by a wrong mask (`RDI006`). The id is taken for an
    ordinary token, such as a digit of a grid, if more than one response in twenty has it (at least five), or less than
    one prompt in ten. It is a warning from three such tokens, information for fewer; exposed: a rare token that prompts
    repeat looks the same. The placeholder of a video is not known if the prompts have only images.

    ## What to do
    Keep the sampler from these ids: a logit bias or bad words in vLLM and SGLang, verl from the release that masks
    them.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> ids = [[9, 5, 6, 7]] + [[5, 6, 7, 8]] * 39
    >>> prompts = {"prompt_ids": range(1, 41), "placeholder": [9] * 40}
    >>> batch = toy_batch([[1, 0]] * 20, per_token={"response_ids": ids}, per_row=prompts)
    >>> diagnose_one("RDI018", batch, trainer=None)
    'RDI018 info exposed: sampled_tokens 1'
    """

    code = "RDI018"
    name = "special-token-sampled"
    references = (
        "https://github.com/volcengine/verl/issues/5817",
        "https://github.com/volcengine/verl/pull/7038",
    )
    adds = ("placeholder", "placeholders", "runs")
    needs_objective = False
    needs = ("prompt_ids", "response_ids", "response_mask")
    splits = ("train",)

    ordinary: float = 0.05
    fewest: int = 5
    warned: int = 3
    images_from: float = 0.1
    image: int = 16

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count trained placeholders of each row, and their runs."""
        import torch

        id_N = block.of_step(PLACEHOLDER)
        if id_N is None or not block.is_logged("response_ids"):
            return dict.fromkeys(self.adds, torch.full_like(block.trained_n, -1))
        id_n = id_N[block.rows]
        is_there_T = (block.column("response_ids") == block.runs.expand(id_n)) & block.trained_T
        # The end-of-sequence token may be the one that pads prompts.
        ends_n = block.runs.offsets[1:][block.runs.lengths > 0] - 1
        is_there_T[ends_n] = False
        starts_T = is_there_T.clone()
        starts_T[1:] &= ~is_there_T[:-1]
        return {"placeholder": id_n, "placeholders": block.row_sum(is_there_T), "runs": block.row_sum(starts_T)}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return the responses of each step by the placeholder of their prompt, and those with most of these tokens."""
        placeholders, runs, column = pl.col("placeholders"), pl.col("runs"), "placeholder"
        sampled = pl.when((placeholders > 0) & (placeholders < self.image * runs)).then(placeholders).otherwise(0.0)
        lines = rows.select(*NAMES, column, value=sampled)
        sums = lines.group_by(*STEP_KEY, column, maintain_order=True).agg(
            responses=pl.len(), having=(pl.col("value") > 0).sum(), sampled=pl.sum("value")
        )
        return with_places(sums, lines, context, column)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Leave out responses to prompts without a placeholder, and say which are ordinary tokens."""
        column = "placeholder"
        having, responses = pl.sum("having").over(column), pl.sum("responses").over(column)
        is_ordinary = (having > self.ordinary * responses) & (having >= self.fewest)
        is_text = is_ordinary | (responses < self.images_from * pl.sum("responses"))
        return run.rows.with_columns(is_text=is_text).filter(pl.col(column) >= 0)

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of such tokens."""
        return {
            "sampled_tokens": (pl.col("sampled").filter(~pl.col("is_text")).sum(), "tokens"),
            "rows": (pl.col("having").filter(~pl.col("is_text")).sum(), "rows"),
            "responses": (pl.sum("responses"), "rows"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Responses with most of them."""
        return table.filter(~pl.col("is_text"))

    def note(self, place: Mapping[str, Any]) -> str:
        """Name the id."""
        return f"{counted(place['value'], 'token')} with the id {place['placeholder']:.0f}"

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No prompt with an image."""
        if not len(run.table):
            return "no prompt has a run of 64 equal ids, as one with an image has"
        if run.table["is_text"].all():
            return "the ids of which prompts have long runs are in many responses or few prompts: ordinary tokens"
        return None

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning from some such tokens on: one may be any rare token."""
        tokens, rows = run.count("sampled_tokens"), run.count("rows")
        if not tokens:
            return None
        ids = run.table.filter(~pl.col("is_text"), pl.col("having") > 0)["placeholder"].unique().sort().to_list()
        named = ", ".join(f"{token_id:.0f}" for token_id in ids)
        return Judgement(
            severity=Severity.WARNING if tokens >= self.warned else Severity.INFO,
            confirmed=False,
            headline=f"the policy sampled {counted(tokens, 'placeholder')} of an image (id {named}) in "
            f"{counted(rows, 'response')} of {run.count('responses'):,}",
            message=f"{percent(rows / run.count('responses'))} of the responses have trained tokens of the id that "
            "stands for an image in their prompt, and no image behind them",
            evidence="the id has a run of 64 or more in the prompt, and is rare in responses",
            advice=f"keep the sampler from the id {named} (logit bias or bad words), and mask these tokens",
        )
