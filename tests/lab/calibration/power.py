"""Measure how often rules accuse clean runs, and how often they find a fault, by its strength.

``python tests/lab/calibration/power.py`` writes ``results.md`` and ``power.svg`` beside itself. It takes some ten
minutes of one core. Every number follows from the seeds.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from calibration.clean import clean_run, real_runs
from calibration.faults import CASES, Case
from calibration.logs import CASES as LOG_CASES
from calibration.logs import LogCase, clean_log, report_of
from rules.checking import outcomes, report_on

from rolloutdoctor.results.findings import Report, Severity
from rolloutdoctor.rules.table import RULES

HERE = Path(__file__).resolve().parent


@dataclass
class Alarms:
    """What rules made of clean runs.

    Attributes:
        runs: how many, by who made them.
        tested: code to runs in which the rule could tell.
        accused: code to runs with a warning or an error.
        seeds: code to the first of these.
    """

    runs: Counter[str] = field(default_factory=Counter)
    tested: Counter[str] = field(default_factory=Counter)
    accused: Counter[str] = field(default_factory=Counter)
    seeds: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, seed: int, report: Report) -> None:
        """Count a run."""
        self.runs[kind] += 1
        self.tested.update(code for code, end in outcomes(report).items() if end in ("found", "clean"))
        for finding in report.findings:
            if finding.severity > Severity.INFO:
                self.accused[finding.code] += 1
                self.seeds.setdefault(finding.code, f"{kind} run {seed}: {finding.headline}")


def false_alarms(runs: int, real: int) -> Alarms:
    """Check clean runs of synthetic models, and of the real trainers where they are installed."""
    found = Alarms()
    for seed in range(runs):
        world, batches = clean_run(seed)
        found.add("synthetic", seed, report_on(batches, trainer=world.trainer, dtype="float32", **world.options))
    for seed, (trainer, options, batches, logged) in enumerate(real_runs(range(real))):
        found.add("real", seed, report_on(batches, trainer=trainer, logged=logged, dtype="float32", **options))
    return found


def power(case: Case, draws: int) -> list[float]:
    """How often a fault is found, by its strength."""
    found = []
    for strength in case.strengths:
        hits = 0
        for seed in range(draws):
            batches = case.make(strength, 10_000 + seed)
            report = report_on(batches, trainer=case.trainer, select=[case.code], dtype="float32", **case.options)
            hits += any(not case.warns or finding.severity > Severity.INFO for finding in report.findings)
        found.append(hits / draws)
    return found


def log_alarms(runs: int) -> Alarms:
    """Check clean logs with the rules over numbers."""
    found = Alarms()
    for seed in range(runs):
        found.add("log", seed, report_of(clean_log(seed)))
    return found


def log_power(case: LogCase, draws: int) -> list[float]:
    """How often a fault in a log is found, by its strength."""
    found = []
    for strength in case.strengths:
        reports = [case.report(strength, 10_000 + seed) for seed in range(draws)]
        least = Severity.WARNING if case.warns else Severity.INFO
        found.append(sum(any(one.severity >= least for one in each.findings) for each in reports) / draws)
    return found


def upper_bound(count: int, runs: int) -> float:
    """The rate at which so few of some runs, or fewer, are seen with probability 0.05 (Clopper and Pearson, 1934).

    >>> round(upper_bound(0, 600), 5), round(upper_bound(1, 100), 4)
    (0.00498, 0.0466)
    """
    if count >= runs:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        chance = sum(comb(runs, k) * rate**k * (1 - rate) ** (runs - k) for k in range(count + 1))
        low, high = (rate, high) if chance > 0.05 else (low, rate)
    return high


def words(alarms: Alarms, curves: Mapping[str, Sequence[float]], draws: int) -> str:
    """The text of results.md."""
    names = {rule.code: rule.name for rule in RULES}
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(alarms.runs.items(), reverse=True))
    lines = [
        "# False alarms, and the weakest fault that each rule finds",
        "",
        "`make calibrate` draws these runs again and writes this file; every number follows from the seeds in",
        "`tests/lab/calibration/`. The runs are small: about 64 rows of some 30 tokens in 4 to 9 steps. In longer runs",
        "the rules detect weaker faults.",
        "",
        "## Clean runs",
        "",
        f"{alarms.runs.total():,} runs ({kinds}) without a fault. The synthetic models add noise of 0.002 to 0.08",
        "to the logits of sampler and trainer, some in bf16; entropies are high, low or collapsed; there are groups",
        "of two, fixed lengths, several turns, policies that drift, rows that are up to two versions old and",
        "corrected, and several updates for one generation. The real runs are made by the code of TRL and verl.",
        "*Tested* counts the runs in which the rule was clean or found something; *upper bound* is the one-sided 95 %",
        "confidence bound of the rate (Clopper-Pearson).",
        "",
        "| rule | name | tested | warnings and errors | rate | upper bound |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for code in sorted(alarms.tested):
        tested, accused = alarms.tested[code], alarms.accused[code]
        lines.append(
            f"| {code} | {names[code]} | {tested:,} | {accused:,} | {accused / tested:.2%} |"
            f" {upper_bound(accused, tested):.2%} |"
        )
    total = sum(alarms.accused.values())
    runs = alarms.runs.total()
    verdicts = alarms.tested.total()
    lines += [
        "",
        f"In all {total:,} warnings and errors in {runs:,} runs and {verdicts:,} verdicts. The rules of",
        "a run read the same rows, so verdicts are not independent: these draws support the bounds of single rules,",
        "and none for all rules together.",
        "",
        "The first 80 synthetic runs decided what counts as clean. One of them changed a rule: RDO002 counts a gap",
        "that grows with lag only from 0.02 nats. Others changed the runs:",
        "",
        "- Collapsed models have no observation tokens, whose log-probs would be lower than those of any real model",
        "  (RDI001), and no responses of fixed length, which would all be equal (RDA011; found in nine later runs).",
        "- Rows sampled with older weights are corrected, because uncorrected ones are a fault (RDO002).",
        "- Equal responses to a prompt have equal rewards, because rewards that do not depend on the response look",
        "  like rewards of other rows (RDI004).",
        "- Rows of the real trainers have no entropies, because those were drawn at random (RDO003).",
        "",
        *[f"- {code}: {seed}" for code, seed in sorted(alarms.seeds.items())],
        "",
        "## Faults",
        "",
        f"Share of {draws:,} runs in which the rule finds the fault, by strength. Warnings and errors count; for rules",
        "marked (i), which describe a property or set the severity by size, information counts too.",
        "",
        "| rule | strength | " + "found at |",
        "| --- | --- | --- |",
    ]
    for case in CASES:
        if case.code in curves:
            cells = ", ".join(
                f"{strength:g}: {share:.0%}" for strength, share in zip(case.strengths, curves[case.code], strict=True)
            )
            mark = "" if case.warns else " (i)"
            lines.append(f"| {case.code} {names[case.code]}{mark} | {case.words} | {cells} |")
    lines += ["", "![Power by strength](power.svg)", "", ""]
    return "\n".join(lines)


LOGS = "## Logs without rollouts"


def log_words(alarms: Alarms, curves: Mapping[str, Sequence[float]], draws: int) -> str:
    """The part of the page about rules over numbers."""
    names = {rule.code: rule.name for rule in RULES}
    lines = [
        LOGS,
        "",
        f"{alarms.runs.total():,} synthetic logs of 40 to 300 steps without a fault, with metric names of TRL or verl:",
        "rewards that rise or stay flat, with autocorrelated noise; entropies that fall by up to two thirds; a KL up",
        "to 0.15 nats; heavy-tailed gradient norms; learning rates with and without warmup, constant or decaying;",
        "lengths that grow by up to 60 %; samplers in bf16; values with all, 4 or 6 digits. `tests/lab/dynamics`",
        "has real trainings.",
        "",
        "Logs changed two rules: RDT005 took autocorrelated noise for a fall of the reward (one of a thousand),",
        "and RDT014 a slope between few quiet lines for a jump of the entropy (four of another thousand).",
        "",
        "| rule | name | tested | warnings and errors | upper bound |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {code} | {names[code]} | {alarms.tested[code]:,} | {alarms.accused[code]:,} |"
        f" {upper_bound(alarms.accused[code], alarms.tested[code]):.2%} |"
        for code in sorted(alarms.tested)
    ]
    lines += ["", *(f"- {code}: {seed}" for code, seed in sorted(alarms.seeds.items()))]
    lines += ["", f"Share of {draws:,} logs in which the rule finds the fault, by strength.", ""]
    lines += ["| rule | strength | found at |", "| --- | --- | --- |"]
    for case in LOG_CASES:
        if case.code in curves:
            shares = zip(case.strengths, curves[case.code], strict=True)
            cells = ", ".join(f"{strength:g}: {share:.0%}" for strength, share in shares)
            lines.append(f"| {case.code} {names[case.code]}{'' if case.warns else ' (i)'} | {case.words} | {cells} |")
    return "\n".join([*lines, ""])


def calibrate_logs(runs: int, draws: int, select: Iterable[str], folder: Path) -> Alarms:
    """Draw logs, and write their part of the page."""
    chosen = set(select)
    alarms = log_alarms(runs)
    curves = {case.code: log_power(case, draws) for case in LOG_CASES if not chosen or case.code in chosen}
    page = folder / "results.md"
    before = page.read_text().partition(LOGS)[0] if page.exists() else ""
    page.write_text(before + log_words(alarms, curves, draws))
    return alarms


def draw(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """One small picture for each rule."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "rolloutdoctor"
    import matplotlib.pyplot as plt

    cases = [case for case in CASES if case.code in curves]
    columns = 4
    rows = -(-len(cases) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(11, 1.9 * rows), sharey=True, layout="constrained")
    for axis, case in zip(axes.flat, cases, strict=False):
        places = range(len(case.strengths))
        axis.plot(places, curves[case.code], marker="o", markersize=4, linewidth=1.5, color="#2a6f97")
        axis.set_title(case.code, fontsize=9, loc="left")
        axis.set_xticks(list(places), [f"{strength:g}" for strength in case.strengths], fontsize=7)
        axis.set_xlabel(case.words, fontsize=7)
        axis.set_ylim(-0.05, 1.05)
        axis.set_yticks([0, 0.5, 1], ["0", "½", "1"], fontsize=7)
        axis.grid(axis="y", linewidth=0.4)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(cases) :]:
        axis.set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def calibrate(runs: int, real: int, draws: int, select: Iterable[str], folder: Path) -> Alarms:
    """Draw everything, and write the page and its picture."""
    chosen = set(select)
    alarms = false_alarms(runs, real)
    curves = {}
    for case in CASES:
        if not chosen or case.code in chosen:
            curves[case.code] = power(case, draws)
            shares = ", ".join(f"{share:.2f}" for share in curves[case.code])
            print(f"{case.code} {case.words}: {shares}", file=sys.stderr, flush=True)
    folder.mkdir(exist_ok=True)
    (folder / "results.md").write_text(words(alarms, curves, draws))
    if curves:
        draw(curves, folder / "power.svg")
    return alarms


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=520, help="clean runs of synthetic models")
    parser.add_argument("--real", type=int, default=30, help="clean runs of the real trainers")
    parser.add_argument("--draws", type=int, default=20, help="runs for each strength of a fault")
    parser.add_argument("--logs", type=int, default=1000, help="clean logs")
    parser.add_argument("--logs-only", action="store_true", help="draw nothing but logs")
    parser.add_argument("--rule", action="append", default=[], help="faults of these rules alone")
    parser.add_argument("--folder", type=Path, default=HERE)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    os.nice(10)
    found = {}
    if not chosen.logs_only:
        found |= calibrate(chosen.runs, chosen.real, chosen.draws, chosen.rule, chosen.folder).seeds
    found |= calibrate_logs(chosen.logs, chosen.draws, chosen.rule, chosen.folder).seeds
    for code, seed in found.items():
        print(f"{code}: {seed}", file=sys.stderr)
