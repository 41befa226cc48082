"""`check` against decoding the same columns of the same file, its memory, and what starting up costs."""

from itertools import pairwise

from generate import write_run
from layouts import LAYOUTS, write_layout
from measure import Row, interleaved, interleaved_cpu, peak_mib, process, ratio

CHECK = ("-m", "rolloutdoctor", "check", "--quiet", "--device", "cpu")
DECODE = """
import sys, pyarrow.parquet as pq
file = pq.ParquetFile(sys.argv[1])
for group in range(file.num_row_groups):
    file.read_row_group(group, columns=sys.argv[2].split(","))
"""


def columns_of(path):
    """The columns that a full check reads of a file, as the file calls them."""
    from rolloutdoctor.engine.check import check
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.io.parquet.files import OpenFile
    from rolloutdoctor.io.run import open_run

    seen = set()
    before = OpenFile._stored

    def spied(self, group, columns):
        seen.update(name for name in columns if name in self.file.columns)
        return before(self, group, columns)

    OpenFile._stored = spied
    try:
        check(open_run([path]), CheckOptions(device="cpu"))
    finally:
        OpenFile._stored = before
    return sorted(seen)


def checks(quick, folder):
    """Full `check`, warm and as a process; a further token; and whether time is linear."""
    import pyarrow.parquet as pq

    from rolloutdoctor.engine.check import check
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.io.run import open_run

    sizes, repeats = ((2_000_000, 8_000_000), 3) if quick else ((15_000_000, 60_000_000), 7)
    measured = []
    for tokens in sizes:
        path = folder / f"{tokens}.parquet"
        exact = write_run(path, tokens=tokens)
        file, columns = pq.ParquetFile(path), columns_of(path)

        def decode(file=file, columns=columns):
            for group in range(file.num_row_groups):
                file.read_row_group(group, columns=columns)

        warm = interleaved(repeats, decode, lambda path=path: check(open_run([path]), CheckOptions(device="cpu")))
        cold = interleaved(
            repeats,
            lambda path=path, columns=columns: process("-c", DECODE, path, ",".join(columns)),
            lambda path=path: process(*CHECK, path),
        )
        measured.append((exact, *cold))
        size = f"{exact / 1e6:.1f} M tokens"
        yield ratio(f"`check`, {size}, warm", "decoding the columns it reads", warm[1] / warm[0], "<= 2.0")
        aim = "<= 3" if tokens == sizes[-1] else ""
        yield ratio(f"`check`, {size}, from the shell", "the same decoding as a process", cold[1] / cold[0], aim)
    (small, decode_small, check_small), (large, decode_large, check_large) = measured
    marginal = (check_large - check_small) / (decode_large - decode_small)
    yield ratio("a further token in `check`", "the same in decoding", marginal, "<= 2.0")
    rate = (large - small) / (check_large - check_small) / 1e6
    yield Row("further tokens a second in `check`", "", f"{rate:.0f} M", "")
    yield from linear(quick, folder)


def linear(quick, folder):
    """Seconds of a check in a warm process per row, 1 to 16 times the rows."""
    from rolloutdoctor.engine.check import check
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.io.run import open_run

    tokens, repeats = (500_000, 3) if quick else (2_000_000, 5)
    paths = []
    for steps in (2, 8, 32):
        paths.append(folder / f"linear{steps}.parquet")
        write_run(paths[-1], tokens=tokens * steps // 2, steps=steps)
    works = [lambda path=path: check(open_run([path]), CheckOptions(device="cpu")) for path in paths]
    seconds = interleaved(repeats, *works)
    slowest = max(after / before / 4 for before, after in pairwise(seconds))
    yield ratio("time of `check`, 1 to 4 to 16 times the rows", "linear", slowest, "<= 1.05")


TOKEN_RULES = (
    *(f"RDO{number:03}" for number in (1, 2, 3, 4, 5, 7, 8, 9, 10, 11)),
    *(f"RDI{number:03}" for number in range(5, 14)),
    *("RDA011", "RDA012", "RDA013", "RDG011"),
)
"""Rules that came with the second look at the tokens."""


def rules(quick, folder):
    """What a step of 16 rows costs, and a check with the rules on tokens against one without; processor time."""
    from rolloutdoctor.engine.check import check
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.io.run import open_run
    from rolloutdoctor.rules.table import pick

    repeats, path, steps = (3 if quick else 7), folder / "small.parquet", 100 if quick else 2_500
    write_run(path, tokens=steps * 16 * 835, steps=steps, ids=True)
    seconds = interleaved_cpu(repeats, lambda: check(open_run([path]), CheckOptions(device="cpu")))[0]
    what = "ms of processor time a step of 16 rows, with ids and prompts, warm"
    yield Row(what, "", f"{1e3 * seconds / steps:.1f} ms", "<= 3 ms")
    without = pick([], TOKEN_RULES)
    for size, ids in ((250_000, False), (1_000_000, False), (1_000_000, True)):
        path = folder / f"rules{size}{ids}.parquet"
        write_run(path, tokens=size * (4 if quick else 16), steps=4 if quick else 16, ids=ids)
        some, every = interleaved_cpu(
            2 * repeats + 1,
            lambda path=path: check(open_run([path]), CheckOptions(device="cpu", rules=without)),
            lambda path=path: check(open_run([path]), CheckOptions(device="cpu")),
        )
        what = f"`check`, steps of {size:,} tokens{', with ids and prompts' if ids else ''}"
        yield ratio(what, "without the rules on tokens", every / some, "<= 1.25")


def memory(quick, folder):
    """Peak memory by number of steps, and against the decoded bytes of a step."""
    tokens = 500_000 if quick else 4_000_000
    peaks = {}
    for steps in (1, 4, 16):
        path = folder / f"{steps}steps.parquet"
        exact = write_run(path, tokens=tokens * steps, steps=steps)
        peaks[steps] = peak_mib(*CHECK, path)
    yield ratio("peak memory of `check`, 16 steps", "1 step", peaks[16] / peaks[1], "<= 1.15")
    tiny = folder / "tiny.parquet"
    write_run(tiny, tokens=1_000, steps=1)
    decoded = exact / 16 * (4 * 4 + 1) / 2**20
    beyond = (peaks[16] - peak_mib(*CHECK, tiny)) / decoded
    what = f"peak memory beyond start-up, steps of {exact / 16e6:.1f} M tokens"
    yield ratio(what, "decoded bytes of a step", beyond, "<= 2")
    large = folder / "large.parquet"
    exact = write_run(large, tokens=tokens * 4 * 3, steps=3)
    beyond = (peak_mib(*CHECK, large) - peak_mib(*CHECK, tiny)) / (exact / 3 * (4 * 4 + 1) / 2**20)
    what = f"peak memory beyond start-up, steps of {exact / 3e6:.1f} M tokens"
    yield ratio(what, "decoded bytes of a step", beyond, "<= 2")


def layouts(quick, folder):
    """Rows in other places than step by step: is memory flat, and what it and time are against the sorted file."""
    tokens, steps, repeats = (4_000_000, 8, 1) if quick else (32_000_000, 16, 3)
    run, quarter = folder / "sorted.parquet", folder / "quarter.parquet"
    write_run(run, tokens=tokens, steps=steps)
    write_run(quarter, tokens=tokens // 4, steps=steps // 4)
    peak = peak_mib(*CHECK, run)
    for number, name in enumerate(LAYOUTS):
        elsewhere, fewer = folder / str(number), folder / f"{number}-quarter"
        write_layout(name, run, elsewhere)
        write_layout(name, quarter, fewer)
        seconds = interleaved(repeats, lambda: process(*CHECK, run), lambda to=elsewhere: process(*CHECK, to))
        most = peak_mib(*CHECK, elsewhere)
        flat = most / peak_mib(*CHECK, fewer)
        yield ratio(f"peak memory, {name}, {steps} steps", f"{steps // 4} steps", flat, "<= 1.15")
        yield ratio(f"peak memory, {name}", "rows in step order", most / peak, "")
        yield ratio(f"time from the shell, {name}", "rows in step order", seconds[1] / seconds[0], "")


def start(quick, folder):
    """What a command costs that reads no run."""
    typer = ("-c", "import typer")
    for words in (["--help"], ["explain", "RDG001"], ["--version"]):
        mine, bare = interleaved(
            11, lambda words=words: process("-m", "rolloutdoctor", *words), lambda: process(*typer)
        )
        yield Row(f"`{' '.join(words)}`", "`import typer`", f"{mine - bare:+.2f} s", "<= +0.1 s")
