"""``python -m fuzz SEED COUNT [FIRST]`` in the folder of the tests: as many examples as one likes."""

import sys
import tempfile
from collections import Counter
from pathlib import Path

from fuzz.examples import make
from fuzz.harness import complaint


def main(seed, count, first=0):
    """Run examples; return how many went wrong."""
    tried, wrong = Counter(), Counter()
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory() as scratch:
            kind, words = make(seed, number, Path(scratch))
            if words is None:
                continue
            tried[kind] += 1
            said = complaint(words, scratch)
            if said is not None:
                wrong[kind] += 1
                print(f"=== {seed}/{number} {kind}: {[word[:60] for word in words]}\n{said}", flush=True)
    print(f"seed {seed}: {sum(tried.values()):,} examples, {sum(wrong.values())} wrong; {dict(tried)}", flush=True)
    return sum(wrong.values())


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1], *map(int, sys.argv[2:]))))
