"""A week's worth of small steps, followed as they come: time, memory and size of the state by thousands of steps.

    PYTHONPATH=. python tests/lab/benchmarks/following.py [STEPS] [STEPS_A_LOOK] [RULE...]

A journal gets some steps, and the follower looks, again and again; each look judges, and keeps the state. Times are
those of the processor.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import growing

from rolloutdoctor.commands.follow.follower import Follower
from rolloutdoctor.commands.follow.opening import Followed
from rolloutdoctor.commands.follow.saved_state import Kept
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.write.journal import JournalWriter
from rolloutdoctor.io.write.run_table import run_table
from rolloutdoctor.io.write.writer import metrics_table
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.rules.table import pick

EVERY = 1000


def table(step):
    """Rows with all that most rules read, made from those of the tests."""
    own = {name: list(cells) for name, cells in growing.columns(step).items()}
    draw = np.random.default_rng(step)
    rows, tokens = growing.ROWS, growing.TOKENS
    own["rollout_log_probs"] = [
        (cells + 0.01 * draw.standard_normal(tokens)).astype(np.float32) for cells in own["policy_log_probs"]
    ]
    own["old_log_probs"] = own["policy_log_probs"]
    own["response_ids"] = list(draw.integers(2, 1000, (rows, tokens), np.int32))
    own["prompt_ids"] = [np.array([step % 500, int(group)], np.int32) for group in own["group_id"]]
    own["status"] = ["stop"] * rows
    own["policy_version_min"] = own["policy_version_max"] = [step] * rows
    return run_table(own | {"step": [step] * rows, "split": ["train"] * rows}, where="here")


def resident():
    """Memory of this process now, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(steps, at_once, *rules):
    """Print a line for every thousand steps."""
    folder = Path(tempfile.mkdtemp())
    journal = JournalWriter(folder / "run.parquet", growing.METADATA)
    state = folder / "doctor.state"
    spent = {"keep": 0.0, "bytes": 0}

    def keep(kept):
        begin = time.process_time()
        content = kept.content()
        state.write_bytes(content)
        spent["bytes"] = len(content)
        spent["keep"] += time.process_time() - begin

    followed = Followed([str(folder / "run.parquet.journal")], None, ConvertOptions(), print)
    lines = []
    follower = Follower(
        followed,
        CheckOptions(rules=pick(rules, [])),
        Kept(),
        keep=keep,
        tell=print,
        say=lambda change: lines.append(change.line),
    )
    print("steps   ms per step   of it keeping   MB resident   MB state   findings said", flush=True)
    begin, before = 0.0, 0
    for step in range(1, steps + 1):
        journal.append(table(step))
        logs = {"reward": growing.logged(step)["reward"], "learning_rate": 1e-6}
        journal.append(metrics_table(step, "train", logs))
        if step % at_once == 0:
            start = time.process_time()
            follower.look()
            follower.count()
            begin += time.process_time() - start
        if step % EVERY == 0:
            each, kept = 1000 * begin / (step - before), 1000 * spent["keep"] / (step - before)
            size = spent["bytes"] / 1e6
            print(f"{step:6,} {each:12.1f} {kept:14.1f} {resident():13.0f} {size:10.2f} {len(lines):10}", flush=True)
            begin, before, spent["keep"] = 0.0, step, 0.0


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:3]]
    main(*numbers, *[20_000, 100][len(numbers) :], *sys.argv[3:])
