"""The proof table: what is computed, compared with what, within what, and the worst error measured.

``python tests/proof/table.py`` (``make parity``) runs every test that is marked with `covers` and prints the table;
arguments are those of pytest. It fails if a test fails, or if a bound is stated in a precision that no test compared.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from proof.claims import ONLY_DOUBLE
from proof.plugin import COLLECTED, SEEN

ROOT = Path(__file__).parents[2]
FOLDERS = [f"tests/{name}" for name in ("parity", "goldens", "formulas/losses", "formulas/advantages", "trainers")]
WORDS = {
    "package": "the real function",
    "golden": "stored results of the real function",
    "autograd": "autograd of the loss written a second time",
    "loop": "a slow loop",
    "log": "what the real trainer logged",
}
HEADS = {"package": "real function", "golden": "its stored results", "autograd": "autograd", "loop": "slow loop"}
TRAINERS = {
    "trl": "TRL GRPO",
    "trl-rloo": "TRL RLOO",
    "verl": "verl",
    "slime": "slime",
    "prime-rl": "prime-rl",
    "nemo-rl": "NeMo-RL",
    "ms-swift": "ms-swift",
    "skyrl": "SkyRL",
    "miles": "miles",
    "openrlhf": "OpenRLHF",
    "unsloth": "Unsloth",
    "open-instruct": "open-instruct",
    "areal": "AReaL",
}


def proof_of(*arguments: str) -> tuple[int, dict[str, list[dict]]]:
    """Run pytest; its exit code, and the claims and errors that the plugin wrote."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "proof.json"
        command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", f"--proof={target}", *arguments]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output="--collect-only" in arguments)
        return done.returncode, json.loads(target.read_text(encoding="utf-8"))


@cache
def collected() -> tuple[int, list[dict]]:
    """Collect the tests once, unless all of them are in this session; the exit code, and every claim."""
    if SEEN.issuperset(path for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py")):
        return 0, [claim.plain() for claim in COLLECTED]
    code, proof = proof_of("--collect-only", *FOLDERS)
    return code, proof["claims"]


def claimed() -> list[dict]:
    """Every claim of the tests, without running them."""
    code, claims = collected()
    assert code == 0, f"tests could not be collected: pytest --collect-only {' '.join(FOLDERS)}"
    return claims


def number(value: float | None) -> str:
    """A bound in a cell."""
    return "" if value is None else f"{value:.0e}".replace("e-0", "e-")


def key_of(claim: Mapping) -> tuple:
    """What the claims of one row have in common."""
    plain = {name: claim[name] for name in ("trainer", "option", "against", "bound", "others")}
    return tuple(json.dumps(part) for part in plain.values())


def rows_of(claims: Sequence[Mapping]) -> list[tuple[Mapping, list[str]]]:
    """A claim and all values, for every row of the table, in a fixed order."""
    rows: dict[tuple, tuple[Mapping, set[str]]] = {}
    for claim in claims:
        rows.setdefault(key_of(claim), (claim, set()))[1].add(claim["value"])
    order = list(TRAINERS), list(WORDS)

    def place(row: tuple[Mapping, list[str]]) -> tuple:
        claim, values = row
        return order[0].index(claim["trainer"]), claim["option"], order[1].index(claim["against"]), values

    return sorted(((claim, sorted(values)) for claim, values in rows.values()), key=place)


def reasons(claim: Mapping) -> str:
    """Why a bound is wide, and which quantities have their own."""
    parts = [claim["bound"]["why"]] if claim["bound"]["why"] else []
    for name, bound in claim["others"]:
        sizes = " / ".join(filter(None, (number(bound["single"]), number(bound["double"]))))
        parts.append(f"{name.replace('_', ' ')} {sizes}: {bound['why']}" if bound["why"] else f"{name} {sizes}")
    return "; ".join(parts)


def markdown(claims: Sequence[Mapping]) -> str:
    """The table of tests/proof/results.md: a row for each option, a column for each thing that it is compared with.

    Options that take a number have no row; the command lists them too.
    """
    notes: dict[str, int] = {}
    table: dict[tuple[str, str], list[tuple[Mapping, list[str]]]] = {}
    for claim, values in rows_of(claims):
        if not any(value.lstrip("(-")[:1].isdigit() for value in values):
            table.setdefault((claim["trainer"], claim["option"]), []).append((claim, values))
    rows = [f"| trainer | option | values | {' | '.join(HEADS.values())} |", "| --- " * (3 + len(HEADS)) + "|"]
    for (trainer, option), found in table.items():
        everything = sorted({value for _, values in found for value in values})
        cells = [TRAINERS[trainer], f"`{option}`", quoted(everything)]
        for against in HEADS:
            parts = [
                bounds(claim, notes)
                + ("" if values == everything else f" ({', '.join(f'`{each}`' for each in values)})")
                for claim, values in found
                if claim["against"] == against
            ]
            cells.append("; ".join(parts))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "", *(f"{position}. {note}" for note, position in notes.items())])


def quoted(values: Sequence[str]) -> str:
    """Values in a cell."""
    return ", ".join(f"`{value}`" for value in values)


def bounds(claim: Mapping, notes: dict[str, int]) -> str:
    """Both bounds, and the number of the note that says why."""
    pair = " / ".join(number(claim["bound"][name]) or "-" for name in ("single", "double"))
    why = "" if claim["bound"]["why"] == ONLY_DOUBLE.why else reasons(claim)
    return f"{pair} [{notes.setdefault(why, len(notes) + 1)}]" if why else pair


def worst(errors: Sequence[Mapping], claim: Mapping, precision: str) -> tuple[float, float, str] | None:
    """Largest error of a row, the largest share of what is allowed, and the quantity of the latter."""
    found = [
        (each["error"], each["used"], each["what"])
        for each in errors
        if key_of(each["claim"]) == key_of(claim) and each["precision"] == precision
    ]
    if not found:
        return None
    most = max(found, key=lambda each: each[1])
    return max(each[0] for each in found), most[1], most[2]


def report(proof: Mapping[str, Sequence[Mapping]]) -> list[str]:
    """Print the table with what was measured; bounds that nothing was compared with."""
    idle = []
    for claim, values in rows_of(proof["claims"]):
        print(f"{TRAINERS[claim['trainer']]}  {claim['option']} = {', '.join(values)}")
        print(f"  against {WORDS[claim['against']]}")
        for precision, name in (("float32", "single"), ("float64", "double")):
            bounds = [claim["bound"][name], *(bound[name] for _, bound in claim["others"])]
            found = worst(proof["errors"], claim, precision)
            if found is None:
                if any(bound is not None for bound in bounds):
                    idle.append(
                        f"{claim['trainer']} {claim['option']} against {claim['against']}: nothing in {precision}"
                    )
                continue
            error, used, what = found
            quantity = f" ({what})" if what else ""
            allowed = number(bounds[0]) or "-"
            print(f"  {precision}: allowed {allowed}, worst {error:.1e}, {used:.0%} of what is allowed{quantity}")
        if reasons(claim):
            print(f"  {reasons(claim)}")
    return idle


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and say with the exit code whether all of it holds."""
    code, proof = proof_of("-m", "covers", *(arguments or FOLDERS))
    idle = report(proof)
    for line in idle:
        print(f"not measured: {line}", file=sys.stderr)
    return code or int(bool(idle))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
