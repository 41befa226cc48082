"""``python -m fuzz.kills KILLS SIGNALS [SEED]`` in the folder of the tests: end every command at random moments.

Each command runs on small inputs and is killed, or gets SIGINT or SIGTERM, and then: what it writes is absent, the old
one, or the whole new one; no input has changed; no process of it is left; after a signal it ends within a second, with
its code and one sentence. The next run that succeeds leaves nothing temporary, and writes what an undisturbed one does.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import growing
import pyarrow.parquet as pq
from forked import ROOT, Server

MARK = "ROLLOUTDOCTOR_KILLS"
"""Variable of the environment by which processes of a command are found, whatever their session."""
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
SECOND = 1.0
GONE = 20.0
"""Seconds in which workers notice that their parent was killed; on a busy machine they may be importing."""
OLD = b"what was there before"


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        words: of it.
        out: the file or folder that it writes, empty if none.
        share: of the trials, beside 1 for the others: real starts take long.
        is_server: it never ends by itself.
        is_folder: `out` is a folder of files.
        gone: seconds in which its processes notice that it was killed.
    """

    words: str
    out: str = ""
    share: float = 1.0
    is_server: bool = False
    is_folder: bool = False
    gone: float = GONE


COMMANDS = {
    "check": Command("check run.parquet --exit-zero --format json --output-file out/a.json", "a.json"),
    "check --save-state": Command("check run.parquet --exit-zero -q --save-state out/a.state", "a.state"),
    "check --workers": Command(
        "check run.parquet --exit-zero --workers 2 --format json --output-file out/a.json", "a.json", 0.3
    ),
    "check --follow": Command(
        "check run.parquet --exit-zero -q --follow --every 0.02 --until-idle 0.1 --state out/a.json", "a.json"
    ),
    "diff": Command("diff run.parquet --all-fixes --output-file out/a.txt", "a.txt"),
    "compare": Command("compare run.parquet other.parquet --output-file out/a.txt", "a.txt"),
    "why": Command("why run.parquet --metric reward --output-file out/a.txt", "a.txt"),
    "identify": Command("identify run.parquet --steps :5 --output-file out/a.txt", "a.txt"),
    "info": Command("info run.parquet --output-file out/a.txt", "a.txt"),
    "recompute": Command("export --what tokens run.parquet -q -o out/a.parquet", "a.parquet"),
    "measure": Command("export run.parquet -o out/tables", "tables", 1.5, False, True),
    "convert": Command("export --what run rows.jsonl --map reward=score -q -o out/a.parquet", "a.parquet", 1.5),
    "report": Command("report run.parquet -o out/a.html", "a.html"),
    "plot": Command("plot rewards run.parquet -o out/a.png", "a.png"),
    "merge": Command("merge one.state two.state --exit-zero --output-file out/a.txt", "a.txt"),
    "view": Command("view run.parquet --no-browser", "", 0.6, True),
    # Agents of Ray that begin as the rest of it ends wait a minute for it, 75 s at most that were seen, and end.
    "check --state-dir": Command(
        "check run.parquet --exit-zero --engine ray=local --state-dir out/parts --steps :4",
        "parts",
        0.15,
        is_folder=True,
        gone=120.0,
    ),
}
RECORDER = "a recorder's journal"
_LOOP = """
import sys, growing
from pathlib import Path
from rolloutdoctor.recorders.own_loop import StepRecorder
recorder = StepRecorder("out/run.parquet", trainer="trl", version="1.16.0", config=growing.CONFIG)
for step in range(1, 31):
    growing.record(recorder, step)
    recorder._writer._queue.join()
    print(step, flush=True)
recorder.close()
"""


def hashed(path):
    """Digest of a file, or of each file of a folder by its name, hidden ones apart; None if nothing is there."""
    if path.is_dir():
        return {each.name: hashed(each) for each in sorted(path.iterdir()) if not each.name.startswith(".")}
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def listed(folder):
    """Names in a folder; none where there is none."""
    return {each.name for each in folder.iterdir()} if folder.is_dir() else set()


def marked(mark):
    """Processes that were started by a command, and by what these started."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


def group(pid):
    """True while a process of the group is there that is no zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == pid and fields[0] != "Z":
                return True
    return False


def ticks(pid):
    """CPU seconds of a process so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def catches(pid):
    """True once signals are the program's affair, or it is over."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True
    masks = [line for line in lines if line.startswith("SigCgt")]
    return not masks or bool(int(masks[0].split()[1], 16) >> (signal.SIGHUP - 1) & 1)


class Trials:
    """Ends commands in a folder of inputs, and counts what went wrong."""

    def __init__(self, start, folder, seed, say=print):
        self._start, self.folder, self.draw, self.say = start, folder, random.Random(seed), say
        self.figures, self.waits, self.busy = Counter(), [], []
        self.out, self.scratch = folder / "out", folder / "tmp"
        self.whole, self.length = {}, {}
        for each in (self.out, self.scratch):
            each.mkdir()
        self._make_inputs()
        self.inputs = hashed(folder)

    def _make_inputs(self):
        growing.write(self.folder / "run.parquet", range(1, 13), fault_from=5)
        growing.write(self.folder / "other.parquet", range(1, 13), seed=1)
        for name, steps in (("one", ":6"), ("two", "6:")):
            words = ("check", "run.parquet", "--exit-zero", "-q", "--steps", steps, "--save-state", f"{name}.state")
            assert self.end_of(self.start("states", words)) == 0
        cells = ({"step": n // 8, "group_id": n // 4, "score": n % 3, "text": "x" * 99} for n in range(2000))
        (self.folder / "rows.jsonl").write_text("\n".join(map(json.dumps, cells)))

    def start(self, mark, words):
        """Start a command line in the folder."""
        # Sockets of Ray have short paths alone.
        scratch = tempfile.gettempdir() if "ray=local" in words else str(self.scratch)
        more = {"TMPDIR": scratch, MARK: mark, "PYTHONWARNINGS": "ignore"}
        return self._start(*words, cwd=self.folder, env=more)

    def end_of(self, program):
        """Let a command end: its exit code."""
        self.said = program.communicate(timeout=300)
        return program.returncode

    def wrong(self, kind, what):
        """Count and print a fault."""
        self.figures[kind] += 1
        self.say(f"{kind}: {what}")

    def content(self, command):
        """What is at the place of the output."""
        return hashed(self.out / command.out) if command.out else None

    def learn(self, name):
        """Run a command undisturbed: how long it takes, and what it writes."""
        command = COMMANDS[name]
        if name in self.whole:
            return
        self.clear()
        program = self.start("learn", command.words.split())
        begun = time.monotonic()
        if command.is_server:
            self.whole[name], self.length[name] = None, 4.0
            time.sleep(4.0)
            program.send_signal(signal.SIGINT)
            self.end_of(program)
            return
        code = self.end_of(program)
        assert code in (0, 1), (name, code, self.said)
        self.length[name] = time.monotonic() - begun
        self.whole[name] = self.content(command)
        assert self.whole[name], name

    def clear(self):
        """Empty the output folder."""
        shutil.rmtree(self.out)
        self.out.mkdir()

    def put_old(self, command):
        """Half of the time something is there already; returns its digest."""
        if not command.out or command.is_folder or "--state " in command.words or self.draw.random() < 0.5:
            return self.content(command)
        (self.out / command.out).write_bytes(OLD)
        return self.content(command)

    def begin(self, command, old, mark):
        """Start, and wait for a random moment: of all, or just after something appears in the output folder."""
        name = next(each for each, one in COMMANDS.items() if one is command)
        before = listed(self.out)
        program = self.start(mark, command.words.split())
        while not catches(program.pid):
            time.sleep(0.001)
        end = time.monotonic() + self.draw.random() * 1.05 * self.length[name]
        if command.out and self.draw.random() < 0.5:
            end = time.monotonic() + 30 * self.length[name]
            places = {self.out, self.out / command.out} if command.is_folder else {self.out}
            known = {place: listed(place) for place in places} | {self.out: before}
            while time.monotonic() < end and ticks(program.pid) is not None:
                if any(listed(place) - known[place] for place in places):
                    end = time.monotonic() + self.draw.random() ** 2 * 0.05
                    break
        while time.monotonic() < end and ticks(program.pid) is not None:
            time.sleep(0.001)
        return program

    def leaves_no_process(self, program, mark, gone, what):
        """Wait for the processes of a command."""
        begun = time.monotonic()
        while group(program.pid) or marked(mark):
            if time.monotonic() - begun > gone:
                self.wrong("processes left", f"{what}: {marked(mark)}")
                for each in marked(mark):
                    with suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
                return
            time.sleep(0.02)

    def is_whole(self, name, old, what):
        """The output is absent, old, or new; returns whether it is new."""
        command = COMMANDS[name]
        now, new = self.content(command), self.whole[name]
        if now == new:
            return True
        if command.is_folder:
            # Each file is whole; a folder of tables without its manifest is none, and each state of parts is a result.
            files = now or {}
            strange = {each for each, digest in files.items() if new.get(each) != digest}
            if strange or (old and not files):
                self.wrong("half-written", f"{what}: {sorted(strange)}")
            if name == "measure" and old == new and "_measured.json" not in files:
                self.figures["between two names"] += 1
        elif "--state" in command.words.split():
            # The progress after any step; the next run goes on from there.
            pass
        elif now != old:
            self.wrong("lost" if now is None else "half-written", what)
        return False

    def kill(self, name):
        """Kill a command."""
        command = COMMANDS[name]
        self.learn(name)
        old, mark = self.put_old(command), f"kill-{self.draw.random()}"
        program = self.begin(command, old, mark)
        is_over = ticks(program.pid) is None
        program.send_signal(signal.SIGKILL)
        program.communicate()
        self.figures["kills"] += 1
        self.figures["kills after the end"] += is_over
        what = f"{name}, killed"
        self.leaves_no_process(program, mark, command.gone, what)
        self.is_whole(name, old, what)
        self.same_inputs(what)

    def signal(self, name, number):
        """Send a signal to a command."""
        command = COMMANDS[name]
        self.learn(name)
        old, mark = self.put_old(command), f"signal-{self.draw.random()}"
        before = listed(self.out)
        program = self.begin(command, old, mark)
        what = f"{name}, {number.name}"
        first = last = ticks(program.pid)
        sent = time.monotonic()
        program.send_signal(number)
        while (now := ticks(program.pid)) is not None:
            last = now
            time.sleep(0.005)
            if time.monotonic() - sent > 120:
                program.send_signal(signal.SIGKILL)
        self.waits.append(time.monotonic() - sent)
        self.busy.append(0.0 if first is None else last - first)
        _, err = program.communicate()
        self.figures["signals"] += 1
        if self.busy[-1] >= SECOND or self.waits[-1] > 10 * SECOND:
            self.wrong("slow", f"{what}: {self.waits[-1]:.1f} s, {self.busy[-1]:.1f} s of CPU")
        self.leaves_no_process(program, mark, command.gone, what)
        is_new = self.is_whole(name, old, what)
        self.same_inputs(what)
        code = program.returncode
        if "Traceback" in err or "internal error" in err:
            self.wrong("traceback", f"{what}: {err[-900:]}")
        elif code == CODES[number]:
            lines = [line for line in err.splitlines() if line.startswith("rolloutdoctor: ")]
            says = lines[-1] if lines else err
            if not lines or not any(word in says for word in ("interrupted", "terminated")):
                self.wrong("without a sentence", f"{what}: {err[-300:]!r}")
            elif (
                command.out
                and old != self.whole[name]
                and (self.content(command) != old) == ("nothing was written" in says)
            ):
                self.wrong("says what is not so", f"{what}: {says}")
        elif not (code in (0, 1) or (code == -number and (is_new or not command.out))):
            self.wrong("code", f"{what}: {code}, {err[-300:]}")
        parts = {each for each in listed(self.out) - before if each.startswith(".")}
        if parts or listed(self.scratch):
            self.wrong("left by a signal", f"{what}: {sorted(parts)}, {listed(self.scratch)}")
            self.sweep()

    def sweep(self):
        """Empty the folder of temporary files."""
        for each in self.scratch.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()

    def same_inputs(self, what):
        """No input was changed, and nothing is beside it."""
        now = {each: digest for each, digest in hashed(self.folder).items() if each not in ("out", "tmp")}
        if now != {each: digest for each, digest in self.inputs.items() if each not in ("out", "tmp")}:
            self.wrong("inputs", what)

    def next_run(self, name):
        """The next run succeeds, writes what an undisturbed one does, and leaves nothing temporary."""
        command = COMMANDS[name]
        if command.is_server:
            program = self.start("next", ["info", "run.parquet"])
        else:
            program = self.start("next", command.words.split())
        code = self.end_of(program)
        if code not in (0, 1):
            self.wrong("next run", f"{name}: {code}, {self.said[1][-500:]}")
        elif command.out and self.content(command) != self.whole[name] and "--state" not in command.words.split():
            self.wrong("next run", f"{name}: another result")
        places = [self.out, self.out / command.out] if command.is_folder else [self.out]
        stale = [str(each) for place in places for each in place.iterdir() if each.name.startswith(".")]
        if not command.is_server:
            stale += [each.name for each in self.out.iterdir() if each.name not in (command.out, *stale)]
            stale += [each.name for each in self.scratch.iterdir()] if "--what run" in command.words else []
        if stale:
            self.wrong("stale", f"{name}: {stale}")

    def record(self):
        """Kill a recorder: its journal has every step that was written; the next one leaves it, and nothing else."""
        begun = time.monotonic()
        words = [sys.executable, "-c", _LOOP]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TMPDIR": str(self.scratch)}
        with subprocess.Popen(
            words, cwd=self.folder, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as loop:
            last, wanted = 0, self.draw.randrange(1, 31)
            for line in loop.stdout:
                last = int(line)
                if last == wanted:
                    break
            time.sleep(self.draw.random() * 0.05)
            loop.kill()
            last = max([last, *map(int, loop.stdout.read().split())])
        self.figures["kills"] += 1
        self.figures["recorder seconds"] += int(time.monotonic() - begun)
        runs = sorted(self.out.glob("run*.parquet")) + sorted(self.out.glob("*.journal"))
        runs = [each for each in runs if not each.name.endswith(".metrics.parquet")]
        target = self.folder / "tmp" / "read.parquet"
        newest = max(runs, key=lambda each: each.stat().st_mtime)
        if self.end_of(self.start("read", ["export", "--what", "run", newest, "-q", "-o", target])) != 0:
            self.wrong("lost", f"{RECORDER}: {self.said[1][-500:]}")
        else:
            steps = set(pq.read_table(target, columns=["step"])["step"].to_pylist())
            if not set(range(1, last + 1)) <= steps:
                self.wrong("lost", f"{RECORDER}: {last} steps were written, {len(steps)} are there")
        for each in self.scratch.iterdir():
            each.unlink() if each.is_file() else None
        hidden = [each.name for each in self.out.iterdir() if each.name.startswith(".")]
        if hidden:
            self.figures["hidden after a kill"] += 1

    def summary(self):
        """The figures in a few lines."""
        faults = ("lost", "half-written", "stale", "left by a signal", "processes left", "inputs", "traceback", "code")
        faults += ("without a sentence", "says what is not so", "next run", "slow")
        waits = sorted(self.waits) or [0.0]
        return "\n".join(
            [
                f"{self.figures['kills']} kills ({self.figures['kills after the end']} after the end), "
                f"{self.figures['signals']} signals",
                f"seconds to the end after a signal: median {waits[len(waits) // 2]:.2f}, longest {waits[-1]:.2f}; "
                f"over {SECOND:.0f}: {sum(each > SECOND for each in waits)}; CPU {max(self.busy, default=0):.2f}",
                *(f"{each}: {self.figures[each]}" for each in faults),
                f"killed between two names of a folder: {self.figures['between two names']}",
            ]
        )

    @property
    def faults(self):
        """How much went wrong."""
        counts = {"kills", "signals", "kills after the end", "recorder seconds", "hidden after a kill"}
        return sum(count for kind, count in self.figures.items() if kind not in counts | {"between two names"})


def shares(count, names):
    """Distribute trials over commands by their shares."""
    weights = [COMMANDS[name].share for name in names]
    exact = [count * weight / sum(weights) for weight in weights]
    whole = [max(1, int(each)) for each in exact] if count >= len(names) else [int(each) for each in exact]
    for place in sorted(range(len(names)), key=lambda place: whole[place] - exact[place])[: max(0, count - sum(whole))]:
        whole[place] += 1
    return dict(zip(names, whole, strict=True))


def run(start, folder, kills, signals, seed, names=(), say=print):
    """End commands so often, started by `forked.Server.start`; return the trials with their figures."""
    trials = Trials(start, Path(folder), seed, say)
    names = list(names or [*COMMANDS, RECORDER])
    recorded = kills // 20 if RECORDER in names else 0
    names = [name for name in names if name != RECORDER]
    killed, stopped = shares(kills - recorded, names), shares(signals, names)
    for name in names:
        begun = time.monotonic()
        trials.learn(name)
        trials.clear()
        for _ in range(killed[name]):
            trials.kill(name)
        for _ in range(stopped[name]):
            trials.signal(name, trials.draw.choice(list(CODES)))
        trials.next_run(name)
        say(f"{name}: {killed[name]} kills, {stopped[name]} signals, {time.monotonic() - begun:.0f} s")
    trials.clear()
    for _ in range(recorded):
        trials.record()
    return trials


def main(kills, signals, seed="suite", *names):
    """Run all, and print the figures."""
    server = Server()
    with tempfile.TemporaryDirectory() as folder:
        say = partial(print, flush=True)
        trials = run(server.start, folder, int(kills), int(signals), seed, names, say)
        say(trials.summary())
    server.close()
    return min(1, trials.faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
