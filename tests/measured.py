"""The table of docs/how-we-know.md: totals of the results that the makers keep beside their tests."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent


def results(maker: str) -> str:
    """Return what a maker wrote last."""
    return (HERE / maker / "results.md").read_text(encoding="utf-8")


def cells(text: str, title: str) -> list[str]:
    """Return the cells of the rows that begin with a title, without it, row after row."""
    return [cell for row in re.findall(rf"^\| {title} \| (.+) \|$", text, re.MULTILINE) for cell in row.split(" | ")]


def parity() -> str:
    """Return how many options are compared with the functions of how many trainers."""
    table = results("proof").partition("<!-- parity: begin -->")[2].partition("<!-- parity: end -->")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (.+) \|$", table, re.MULTILINE)[2:]]
    trainers = {row[0] for row in rows}
    return f"| options compared with the trainers' own functions | {len(rows)} of {len(trainers)} trainers |"


def labelled() -> list[str]:
    """Return what became of the runs with a planted fault, and of the clean runs beside them."""
    text = results("lab/labelled")
    head = cells(text, "runs")[: len(cells(text, "faults"))]
    of = dict(zip(head, map(int, cells(text, "faults")), strict=True))
    no_outcome = ("runs", "named first", "clean beside an unnamed cause")
    others = ", ".join(f"{count} {name}" for name, count in of.items() if count and name not in no_outcome)
    clean = [cells(text, trainer)[:4] for trainer in ("trl", "verl", "slime")]
    runs, silent = (sum(int(one[place]) for one in clean) for place in (0, 1))
    return [
        f"| planted faults | {of['named first']} of {of['runs']} named first; {others} |",
        f"| clean runs of the same trainers | {silent} of {runs} without a warning or an error |",
    ]


def calibration() -> list[str]:
    """Return the false alarms over drawn clean runs and logs."""
    text = results("lab/calibration")
    alarms, runs, verdicts = re.findall(r"In all ([\d,]+) warnings and errors in ([\d,]+) runs and ([\d,]+)", text)[0]
    of_runs, _, of_logs = text.partition("## Logs without rollouts")
    logs = re.findall(r"^([\d,]+) synthetic logs", of_logs, re.MULTILINE)[0]
    false = sum(int(count) for count in re.findall(r"^\| RD\w+ \| \S+ \| [\d,]+ \| (\d+) \|", of_logs, re.MULTILINE))
    all_runs = f"{runs} clean runs, {verdicts} verdicts"
    return [
        f"| warnings and errors in {all_runs} | {alarms}; at most {least(of_runs)} a rule |",
        f"| warnings and errors in {logs} clean logs | {false}; at most {least(of_logs)} a rule |",
    ]


def least(text: str) -> str:
    """Return the bound of the rules that were tested most."""
    bounds = re.findall(r"^\| RD\w+ \| .*\| ([\d.]+)% \|$", text, re.MULTILINE)
    return f"{min(map(float, bounds)):.2f} %"


def measured() -> str:
    """Return the table."""
    return "\n".join(["| what | result |", "| --- | --- |", parity(), *labelled(), *calibration()])
