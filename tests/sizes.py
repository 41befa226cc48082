"""Bounds by unit: a rule, an importer, a picture, a command, a trainer, a function. `make lint` runs it.

A unit above its bound is split, or stands in `EXCEPTIONS` or `ONE_LAW` with its size. There it may shrink; it may not
grow beyond that, and it goes from the table once it fits.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "rolloutdoctor"

RULE, IMPORTER, PICTURE, COMMAND, TRAINER = 180, 200, 120, 350, 720
"""Lines of a rule with its page, of an importer, of a picture; of all files of a command, and of a trainer."""

FUNCTION = 60
"""Lines from `def` to the end, the docstring included. Ruff bounds the branches: C901, `max-complexity`."""

NOT_ALONE = {"__init__.py", "base.py", "boundaries.py", "table.py", "style.py"}
"""Files beside units that are none."""

EXCEPTIONS: dict[str, tuple[int, str]] = {
    "commands/check": (1300, "one run, several, each, a list of places, a baseline: a file for each way of asking"),
    "commands/compare": (1000, "profiles of two runs, their rows and their words are three tables with a file each"),
    "commands/diff": (1930, "fixes, options, parts and left-out rows are four comparisons over one loop"),
    "commands/explain": (1250, "a file for each kind of page: rules, fixes, causes, metrics, terms, trainers"),
    "commands/export": (1300, "tables, tokens and steps of tokens have writers of their own"),
    "commands/follow": (1600, "a file for each source that grows: run files, dumps, journals, logs"),
    "commands/verify": (1600, "stored cases, laws, losses and the test file that is written"),
    "commands/view": (1450, "groups, turns, worst rows and a server beside the page"),
    "commands/why": (1050, "the units of prompts, of turns and of a log alone are split apart by different tables"),
    "trainers/areal": (750, "options and objective of 520 lines; the folder is seven lines above the bound"),
    "trainers/ms_swift": (1100, "options and objective of 459 lines, metrics of 361, and a dump of 168"),
    "trainers/nemo_rl": (900, "options and objective, metrics and dump, none above 430 lines"),
    "trainers/open_instruct": (850, "options and objective, metrics and dump, none above 346 lines"),
    "trainers/prime_rl": (1400, "two dumps, of tokens and of traces with branches"),
    "trainers/skyrl": (850, "options and objective of 464 lines, and a dump of 189"),
    "trainers/slime": (1400, "corrections of the sampler, and a dump of three layouts with gaps"),
    "trainers/trl": (2250, "two trainers, GRPO and RLOO, eight loss types, and metrics of 484 lines"),
    "trainers/verl": (1850, "advantages, policy losses, corrections and releases are files of their own"),
    "importers/mapped.py": (240, "columns, lines and rewards by a mapping of the user, with an error for each"),
    "pictures/advantages.py": (160, "two pictures: the distribution, and by step"),
    "pictures/audit.py": (170, "a title that counts by state, and panels of values and of differences"),
    "pictures/mismatch.py": (190, "four panels: density, by step, by position, by lag"),
    "pictures/ratio.py": (150, "two panels, of ratios with the clip range and of gaps"),
    "rules/advantages/advantage_blow_up.py": (
        310,
        "spreads of groups and of siblings are two faults, with a judgement each",
    ),
    "rules/advantages/dead_groups.py": (
        220,
        "every kind of dead group is told of its own: a page of 37 lines, `judge` of 55, `reduced` of 32",
    ),
    "rules/gradients/policy_not_moving.py": (290, "pairs of contexts of adjacent steps, and of the first and the last"),
    "rules/gradients/reference_moved.py": (310, "equal from a step on or throughout, and falls of the KL: two faults"),
    "rules/gradients/zero_std_kl.py": (320, "gradients by log-prob and by logit, and the logged norm beside them"),
    "rules/integrity/all_truncated.py": (290, "from the rows, or from the log alone: two queries"),
    "rules/integrity/duplicate_responses.py": (
        390,
        "copies in a group, across groups and after a prompt that recurs, each with its own chance",
    ),
    "rules/integrity/logprob_shift.py": (280, "three pairs of columns and the padding, with limits of two kinds"),
    "rules/integrity/mask_leak.py": (300, "six signs of foreign tokens, each with its words, on a page of 40 lines"),
    "rules/integrity/truncation_hidden.py": (
        260,
        "status and length, the logged share, and last tokens: three ways to see it",
    ),
    "rules/metrics/kl_metric_corrupted.py": (
        280,
        "a metric of each step and a column of each token, and the buffer that overwrites either",
    ),
    "rules/off_policy/engine_frozen.py": (
        260,
        "the sampler's contexts against the trainer's and against the reference's",
    ),
    "rules/off_policy/quantized_logprobs.py": (220, "two binary lattices and the decimal digits"),
    "rules/off_policy/ratio_not_one.py": (210, "the first update of a batch, and two passes over it"),
    "rules/off_policy/sampler_mismatch.py": (
        340,
        "a page of 51 lines and 25 measures; four kinds of mismatch have words of their own",
    ),
    "rules/off_policy/stale_policy.py": (360, "stamps, lags, steps and parts of rows: four signs, each with its query"),
    "rules/off_policy/temperature_mismatch.py": (
        300,
        "slopes by row, the logged entropy and what was drawn: three tests",
    ),
}
"""Units of several parts: lines at most, with some room, and why they are one unit."""

ONE_LAW: dict[str, int] = {
    "rules/advantages/advantage_mask_mismatch.py": 220,
    "rules/advantages/float_residue.py": 220,
    "rules/advantages/inert_reward_term.py": 230,
    "rules/advantages/length_starved.py": 230,
    "rules/advantages/rejected_in_baseline.py": 250,
    "rules/advantages/reward_not_a_function.py": 240,
    "rules/advantages/shaped_reward_phantom.py": 200,
    "rules/dynamics/repetition.py": 190,
    "rules/gradients/kl_only_loss.py": 230,
    "rules/gradients/loss_near_zero.py": 270,
    "rules/gradients/reward_free_step.py": 210,
    "rules/integrity/nonfinite_values.py": 200,
    "rules/integrity/retokenized.py": 220,
    "rules/integrity/reward_row_misaligned.py": 220,
    "rules/integrity/version_stamps.py": 250,
    "rules/off_policy/packing_leak.py": 190,
    "rules/off_policy/position_shift.py": 220,
    "rules/off_policy/sampler_mismatch_logged.py": 190,
    "rules/off_policy/sequence_is_length_bias.py": 250,
    "rules/off_policy/stale_prefix_cache.py": 220,
    "rules/off_policy/sync_corrupts.py": 240,
    "rules/off_policy/truncated_support.py": 230,
}
"""Rules of one law whose page, query and judgement are long together: lines at most, with some room."""


def lines_of(path: Path) -> int:
    """Count the lines of a file, or of all Python files of a folder."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def units(root: Path = ROOT) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each unit, its lines and its bound."""
    kinds = [("rules/*/*.py", RULE), ("importers/*.py", IMPORTER), ("importers/logs/*.py", IMPORTER)]
    kinds += [("pictures/*.py", PICTURE), ("commands/*/", COMMAND), ("trainers/*/", TRAINER)]
    for pattern, bound in kinds:
        for path in sorted(root.glob(pattern)):
            shared = path.name in NOT_ALONE or "measures" in path.parts or path.name == "__pycache__"
            if not shared and (path.is_dir() or not pattern.endswith("/")):
                yield path.relative_to(root).as_posix(), lines_of(path), bound
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                name = f"{path.relative_to(root).as_posix()}:{node.name}"
                yield name, node.end_lineno - node.lineno + 1, FUNCTION


def faults(measured: list[tuple[str, int, int]], allowed: dict[str, int] | None = None) -> list[str]:
    """Say what is too large, what grew, and which exception is not needed any more."""
    if allowed is None:
        allowed = {name: lines for name, (lines, _) in EXCEPTIONS.items()} | ONE_LAW
    too_large = {name: (lines, bound) for name, lines, bound in measured if lines > bound}
    found = []
    for name, (lines, bound) in too_large.items():
        if name not in allowed:
            found.append(f"{name}: {lines} lines, the bound is {bound}: split it, or say in EXCEPTIONS why not")
        elif lines > allowed[name]:
            found.append(f"{name}: {lines} lines, {allowed[name]} are allowed: it may shrink, and not grow")
    return found + [f"{name}: fits its bound: take it out of EXCEPTIONS" for name in allowed.keys() - too_large]


if __name__ == "__main__":
    told = faults(list(units()))
    print("\n".join(sorted(told)))
    sys.exit(bool(told))
