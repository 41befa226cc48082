"""``python -m fuzz SEED COUNT [FIRST] [FIGURES]`` in the folder of the tests: as many examples as one likes.

After each hundred the figures of each kind are written to the file FIGURES: examples, CPU seconds, hangs, other faults.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

from forked import Server
from fuzz.examples import make
from fuzz.harness import complaint

_EVERY = 100


def main(seed, count, first=0, figures=None):
    """Run examples; return how many went wrong."""
    tried, seconds, hangs, wrong = Counter(), Counter(), Counter(), Counter()
    server = Server()

    def write():
        rows = [
            f"{kind:16} {tried[kind]:7,} {seconds[kind]:9,.1f} {hangs[kind]:5} {wrong[kind]:5}"
            for kind in sorted(tried)
        ]
        total = f"{'all':16} {tried.total():7,} {seconds.total():9,.1f} {hangs.total():5} {wrong.total():5}"
        text = "\n".join([f"seed {seed}: kind, examples, CPU seconds, hangs, other faults", *rows, total, ""])
        if figures is None:
            print(text, flush=True)
        else:
            Path(figures).write_text(text)

    for number in range(first, first + count):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "x"
            folder.mkdir()
            try:
                kind, words = make(seed, number, folder)
            except Exception as error:  # a library that writes no such file
                print(f"--- {seed}/{number} is not made: {error!r}", flush=True)
                continue
            if words is None:
                continue
            spent = []
            said = complaint(server.start, words, folder, spent)
            tried[kind] += 1
            seconds[kind] += sum(spent)
            if said is not None:
                (hangs if said.startswith("it h") else wrong)[kind] += 1
                print(f"=== {seed}/{number} {kind}: {[word[:60] for word in words]}\n{said}", flush=True)
        if figures is not None and tried.total() % _EVERY == 0:
            write()
    write()
    server.close()
    return wrong.total() + hangs.total()


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    sys.exit(min(1, main(name, *map(int, numbers[:2]), *numbers[2:])))
