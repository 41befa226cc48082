"""Programs that print names and numbers behind their step: a row of a table for each."""

import re
from collections.abc import Iterable, Iterator

from rolloutdoctor.importers.logs.block_form import BlockForm
from rolloutdoctor.importers.logs.printed import NUMBER
from rolloutdoctor.importers.reading.sections import sections_of

_PLAIN = NUMBER.replace("[-+]?", "-?")

# ``Detected 95/128 rollouts (zero_advantage=95)``: ``apply_filters`` (src/prime_rl/orchestrator/filters.py).
_DETECTED = re.compile(
    r"Detected [0-9]{1,9}/([1-9][0-9]{0,8})(?: rollouts)? \([^()\n]{0,200}\bzero_advantage=([0-9]{1,9})\b"
)


def _with_filtered(lines: Iterable[str]) -> Iterator[str]:
    """Put the share of rollouts without an advantage on the line of their step, before which it is printed."""
    share = ""
    for line in lines:
        match = _DETECTED.search(line) if "zero_advantage=" in line else None
        if match is not None and int(match[2]) <= int(match[1]):
            share = f" | Zero Advantage {int(match[2]) / int(match[1]):.9f}"
        elif share and "Step " in line and "| Reward" in line:
            yield f"{line.rstrip()}{share}"
            share = ""
        else:
            yield line


# ``train`` (src/prime_rl/trainer/rl/train.py) and ``log_train_batch`` (src/prime_rl/orchestrator/orchestrator.py):
# ``SUCCESS Step 3 | 12s | Loss 0.0123 | ...``; up to 0.6 ``Step 3 | Time: 12.34s | Loss: 0.0123 | ...``. Loops of
# anybody's own have no time there.
PRIME_RL = BlockForm(
    "the console log of prime-rl",
    re.compile(r"\bStep ([0-9]{1,18}) (?=\|\s*(?:Time: )?[0-9][0-9. dhms]{0,15}[dhms]\b)"),
    re.compile(rf"\|\s*([A-Z][\w. ]{{0,30}}?:?) ({_PLAIN}%?)"),
    ("Step ", "|"),
    {
        f"{label}{colon}": name
        for label, now, before in (
            ("Loss", "loss/mean", "loss/mean"),
            ("Entropy", "entropy/all/mean", "entropy/mean"),
            ("Mismatch KL", "mismatch_kl/all/mean", "mismatch_kl/mean"),
            ("Grad. Norm", "optim/grad_norm", "optim/grad_norm"),
            ("LR", "optim/lr", "optim/lr"),
            ("Reward", "train/agg/all/reward/mean", "reward/mean"),
            ("Truncation", "train/agg/all/is_truncated/mean", "is_truncated/mean"),
            ("Time", "time/step", "time/step"),
            ("Zero Advantage", "zero_advantage", ""),
        )
        for colon, name in (("", now), (":", before))
    },
    in_block=False,
    before=_with_filtered,
)

# ``grpo_train`` and ``async_grpo_train`` (nemo_rl/algorithms/grpo.py).
NEMO_RL = BlockForm(
    "the console log of NeMo-RL",
    re.compile(r"={8,64} Step ([0-9]{1,18})/([0-9]{1,18}) ={8,64}"),
    re.compile(rf"(?:^|\s) {{1,3}}• ([A-Z][A-Za-z ]{{1,30}}): ({_PLAIN})s?\s*$"),
    ("= Step", "•"),
    {
        "Loss": "train/loss",
        "Generation KL Error": "train/gen_kl_error",
        "Avg Reward": "train/reward",
        "Avg Total Reward": "train/reward",
        "Mean Generation Length": "train/mean_gen_tokens_per_sample",
        "Total step time": "timing/train/total_step_time",
    },
    is_headless=True,
)

# ``commit`` and ``print_stats`` (areal/utils/stats_logger.py), ``tabulate_stats`` (areal/utils/printing.py); its
# trackers count from 0.
AREAL = BlockForm(
    "the console log of AReaL",
    re.compile(r"Train step ([0-9]{1,18})/([0-9]{1,18}) done"),
    re.compile(rf"[│|] *([\w.-]{{1,100}}/[\w./-]{{1,200}}) *[│|] *({_PLAIN}) *(?=[│|])"),
    ("Train step ", "/"),
    first=1,
)

# ``ConsoleBackend.log_batch`` (src/forge/observability/metrics.py).
TORCHFORGE = BlockForm(
    "the console log of torchforge",
    re.compile(r"=== \[[\w.-]{0,100}\] - METRICS STEP ([0-9]{1,18}) ==="),
    re.compile(rf"^\s*([\w.-]{{1,100}}/[\w./-]{{1,200}}): ({NUMBER})\s*$"),
    ("METRICS STEP ", "/"),
)

# ``print_metrics_table`` (rlinf/utils/metric_utils.py): three cells ``name=number`` a line.
RLINF = BlockForm(
    "the console log of RLinf",
    re.compile(r"│ Global Step: {1,4}([0-9]{1,18})/([0-9]{1,18}) "),
    re.compile(rf"│\s*([A-Za-z][\w./-]{{0,100}})=({NUMBER})\s*(?=│)"),
    ("Global Step", "="),
)

# ``tabulate`` and ``rich.table`` with a row for each metric, the step among them or above: ``log_metrics`` of tinker
# (tinker_cookbook/utils/ml_log.py), ``print_metrics_table`` of rLLM (rllm/trainer/algorithms/visualization.py);
# ``HumanOutputFormat.write`` (stable_baselines3/common/logger.py), in sections.
TWO_COLUMNS = BlockForm(
    "tables of names and numbers",
    re.compile(r"^\s*(?:Step ([0-9]{1,18})|[-+|┏┡╒┌╭├╞┣╔╠└╘╰╚][-=+|─━═┬┼┳╇┿╤╪┴╧╩]{4,300}[-+|┓┩╕┐╮┤╡┫╗╣┘╛╯╝])\s*$"),
    re.compile(
        rf"^\s*[|│┃║] {{0,8}}([A-Za-z][\w./()@: -]{{0,80}}?) {{0,60}}[|│┃║] {{0,60}}({NUMBER}|) {{0,60}}[|│┃║]\s*$"
    ),
    ("", ""),
    needs_step=True,
)

_PANEL = re.compile(r"^\s*│\s+(?:([a-z_][\w-]{0,60}) {2,})?(\S.*?)\s*│\s*$")


def _with_groups(lines: Iterable[str]) -> Iterator[str]:
    """Put the names of a group, wrapped over several lines, on one line with its name before each."""
    group, text = "", ""
    for line in lines:
        match = _PANEL.match(line) if "│" in line else None
        if match is not None and not match[1]:
            text += f" {match[2]}"
            continue
        if text:
            yield " | ".join(f"{group}{pair}" for pair in text.split(" | "))
        group, text = ("", "") if match is None else ("" if match[1] == "other" else f"{match[1]}/", match[2])
        if match is None:
            yield line


# ``print_rich_single_line_metrics`` (open_instruct/model_utils.py): a panel with a line for each group of names.
OPEN_INSTRUCT = BlockForm(
    "the console log of open-instruct",
    re.compile(r"^\s*╭─{2,300} Metrics ─{2,300}╮"),
    re.compile(rf"(?:^|\| )([A-Za-z][\w./@-]{{0,200}}): ({NUMBER})(?= \||\s*$)"),
    (" Metrics ", ": "),
    needs_step=True,
    before=_with_groups,
)

_YAML = re.compile(
    rf"(?:\([\w.:]{{1,60}} pid=[0-9]{{1,9}}[^()\n]{{0,40}}\) )? *([A-Za-z][\w.@-]{{0,100}}: {NUMBER})\s*"
)


def _below_sections(lines: Iterable[str]) -> Iterator[str]:
    """Give the numbers of a dict in YAML the names of what they are nested in."""
    for line, sections in sections_of(lines):
        match = _YAML.fullmatch(line) if sections else None
        yield line if match is None else f"{sections.replace('.', '/')}{match[1]}"


# ``ConsoleLogger.log`` of EasyR1 (verl/utils/logger/logger.py): verl's names, at each slash a section of YAML.
EASY_R1 = BlockForm(
    "the console log of EasyR1",
    re.compile(r"(?:^|\) )Step ([0-9]{1,18})\s*$"),
    re.compile(rf"^([A-Za-z][\w.@-]*/[\w./@-]{{1,200}}): ({NUMBER})$"),
    ("Step ", "/"),
    before=_below_sections,
)

OF_TRAINERS = (PRIME_RL, NEMO_RL, OPEN_INSTRUCT, AREAL, RLINF, TORCHFORGE, EASY_R1)

# ``_footer_history_summary_info`` (wandb/sdk/wandb_run.py).
WANDB_SUMMARY = BlockForm(
    "the summary that wandb prints at the end of a run",
    re.compile(r"^wandb:.{0,40}Run summary:"),
    re.compile(rf"^wandb:\s+([\w./@ -]{{1,200}}?) +({NUMBER})\s*$"),
    ("Run summary:", "wandb:"),
    is_of_tracker=True,
    remarks=("this is the summary of the last step alone; the run's history is not in it",),
)

# ``record_step_stats`` of TRL's PPO trainer before 0.12; a console may have nothing else.
WARNINGS = BlockForm(
    "warnings of TRL's PPO trainer",
    re.compile(r"KL divergence is starting to become (?=negative: )"),
    re.compile(rf"(negative): ({NUMBER})(?=\s)"),
    ("KL divergence", ""),
    {"negative": "objective/kl"},
    in_block=False,
    remarks=("read are warnings alone, which are of the updates with a KL below -1: other updates are not there",),
)
