"""Records a run while a check follows it and is killed again and again: ``killing.py FOLDER STEPS KILLS SEED``.

Everything is imported once, and each process is forked from here, so that a kill comes within milliseconds of work.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import growing
from forked import make_parser

import rolloutdoctor.commands.check.cli
import rolloutdoctor.commands.follow.follower
import rolloutdoctor.rules.table
import rolloutdoctor.views.table  # noqa: F401
from rolloutdoctor.cli import main
from rolloutdoctor.recorders import _background
from rolloutdoctor.recorders.own_loop import StepRecorder


def forked(work):
    process = os.fork()
    if process:
        return process
    try:
        work()
    finally:
        os._exit(9)


def records(steps):
    _background.LONGEST_WAIT = 600  # a machine that stops for a while is no slow disk
    recorder = StepRecorder("run.parquet", trainer="trl", version="1.16.0", config=growing.CONFIG)
    for step in range(1, steps + 1):
        growing.record(recorder, step, fault_from=steps // 2)
        time.sleep(0.02)
    # Closing it would make a run file of the journal.
    recorder._writer._queue.join()
    # The recorder is killed as well: its journal stays.
    os._exit(0)


def follows(*more):
    sys.argv = ["rolloutdoctor", "check", "run.parquet", "--follow", "--every", "0.02", "--state", "state.json"]
    sys.argv += ["--on-finding", "tee -a events.jsonl", "--format", "concise", *more]
    with Path("out.txt").open("a") as out:
        os.dup2(out.fileno(), 1)
        sys.stdout = out
        try:
            main()
        except SystemExit as end:
            out.flush()
            os._exit(end.code or 0)


def run(folder, steps, kills, seed):
    os.chdir(folder)
    draw = random.Random(seed)
    recording = forked(lambda: records(steps))
    for _ in range(kills):
        process = forked(follows)
        time.sleep(draw.uniform(0.05, 0.9))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    os.waitpid(recording, 0)
    process = forked(lambda: follows("--until-idle", "0.2", "--save-state", "end.json"))
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


if __name__ == "__main__":
    words = sys.argv[1:]
    make_parser()
    run(words[0], *map(int, words[1:]))
