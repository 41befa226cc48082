"""Options of slime's helper for train-inference mismatch, under the names of its ``mis.yaml``."""

from dataclasses import replace
from typing import Literal, cast

from rolloutdoctor.objective.corrections import SamplerCorrection
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option

MIS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
"""The helper, as `custom_tis_function_path` names it."""

LEVELS = ("token", "sequence", "geometric")

_CHOSEN: dict[str, tuple[object, ...]] = {"custom_tis_function_path": (MIS,), "use_tis": (True,)}
_REJECTS = _CHOSEN | {"use_rs": (True,)}

# The helper itself has no defaults: these are those of the file that comes with it.
OPTIONS = (
    Option("use_rs", "flag", True, "also reject tokens by their importance ratio", only_with=_CHOSEN),
    Option("tis_level", "word", "token", "level of the ratio used as weight", choices=LEVELS, only_with=_CHOSEN),
    Option("rs_level", "word", "token", "level of the ratio used for rejection", choices=LEVELS, only_with=_REJECTS),
    Option(
        "tis_mode",
        "word",
        "truncate",
        "truncate: weights are bounded above; clip: on both sides; mask: weights outside reject",
        choices=("truncate", "clip", "mask"),
        only_with=_CHOSEN,
    ),
    Option(
        "tis_lower_bound",
        "number",
        0.5,
        "lower bound of the weights; null: 1 / tis_upper_bound",
        low=0,
        optional=True,
        only_with=_CHOSEN,
    ),
    Option("tis_upper_bound", "number", 2.0, "upper bound of the weights", low=0, only_with=_CHOSEN),
    Option(
        "rs_lower_bound", "number", None, "smallest ratio kept; null: as tis_lower_bound", low=0, only_with=_REJECTS
    ),
    Option("rs_upper_bound", "number", None, "largest ratio kept; null: tis_upper_bound", low=0, only_with=_REJECTS),
    Option(
        "rs_veto_threshold",
        "number",
        1e-4,
        "a token with a smaller ratio rejects its whole row; null: no veto",
        low=0,
        optional=True,
        only_with=_REJECTS,
    ),
    Option(
        "tis_batch_normalize", "flag", True, "divide the weights by their mean over the micro-batch", only_with=_CHOSEN
    ),
)


def sampler_correction(config: Config) -> SamplerCorrection | None:
    """Build what the helper does; None if it is not asked for.

    Raises:
        UsageError: for bounds or levels that the helper itself refuses.
    """
    used = config["use_tis"] or config["get_mismatch_metrics"]
    if config["custom_tis_function_path"] != MIS or not used:
        return None
    if not config["use_tis"]:
        return SamplerCorrection(weighs=False)
    high = config.number("tis_upper_bound")
    if high == 0:
        raise UsageError("tis_upper_bound = 0 leaves no weight")
    low = config.optional_number("tis_lower_bound")
    low = 1 / high if low is None else low
    mode, level = config.word("tis_mode"), config.word("tis_level")
    if mode != "truncate":
        _ordered("tis_lower_bound", low, "tis_upper_bound", high)
    if config["tis_batch_normalize"] and level == "geometric":
        raise UsageError("tis_batch_normalize knows no tis_level = geometric, and slime fails here")
    rule = SamplerCorrection(
        weighs=True,
        level=cast(Literal["token", "sequence", "geometric"], level),
        mode=cast(Literal["truncate", "clip", "mask"], mode),
        low=low,
        high=high,
        normalised=bool(config["tis_batch_normalize"]),
    )
    return _rejecting(config, rule) if config["use_rs"] else rule


def _rejecting(config: Config, rule: SamplerCorrection) -> SamplerCorrection:
    low, high = config.optional_number("rs_lower_bound"), config.optional_number("rs_upper_bound")
    low, high = rule.low if low is None else low, rule.high if high is None else high
    _ordered("rs_lower_bound", low, "rs_upper_bound", high)
    veto = config.optional_number("rs_veto_threshold")
    return replace(
        rule,
        reject_level=cast(Literal["token", "sequence", "geometric"], config.word("rs_level")),
        reject_low=low,
        reject_high=high,
        # No ratio is below 0.
        veto=None if veto == 0 else veto,
    )


def _ordered(low_name: str, low: float, high_name: str, high: float) -> None:
    if low >= high:
        raise UsageError(f"{low_name} = {low:g} is not below {high_name} = {high:g}, and slime insists on that")
