"""Measure gradients in three spaces over some sixty trainings, and write tests/lab/gradients/results.md.

``python tests/lab/gradients [FOLDER] [--only NAME] [--page]``: what is in the folder is not measured again.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TORCHDYNAMO_DISABLE"] = "1"
HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parents[0]), str(HERE.parents[1])]
if not os.environ.get("PYTHONPATH"):
    sys.path.insert(2, str(HERE.parents[2]))


def main() -> None:
    """Measure what is missing; write the page."""
    parser = argparse.ArgumentParser(prog="python tests/lab/gradients", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=HERE / "runs")
    parser.add_argument("--only", default="", help="trainings whose name holds this")
    parser.add_argument("--kept", action="store_true", help="measure nothing; use what is in the folder")
    parser.add_argument("--page", action="store_true", help="write tests/lab/gradients/results.md and its pictures")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    given.folder.mkdir(parents=True, exist_ok=True)
    if not given.kept:
        from gradients.trainings import measured, studied

        for one in studied():
            path = given.folder / f"{one.name}.json"
            if path.exists() or given.only not in one.name:
                continue
            began = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()):
                steps = measured(one, given.folder / f"{one.name}.parquet")
            path.write_text(json.dumps(steps))
            print(f"{one.name}: {len(steps)} steps, {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    if given.page:
        from gradients.page import write

        write(given.folder, HERE)


if __name__ == "__main__":
    main()
