"""Break trainings, check them, and write docs/gallery.md with its pictures: ``python tests/lab/gallery.py [NAME...]``.

Each is a real training of TRL of some seconds with one fault, from `dynamics` or `labelled`, or a sample run. The page
has the first sentence of the report as it is printed; `test_gallery` trains again and compares. Logs are kept: the last
digit of a processor becomes another course of a diverging training, so a training of today need not say the same.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[0]))

import torch
from fuzz.harness import run

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "tests" / "data" / "gallery"
PAGE, IMAGES = ROOT / "docs" / "gallery.md", ROOT / "docs" / "images" / "gallery"
COLUMNS, COLORS = 80, 64

INTRODUCTION = """\
# Gallery of broken trainings

Each section shows a run with one fault and the first sentence of its report. The first ten are real trainings of a
tiny model, the last two are sample runs. `make gallery` trains, checks and draws them again and writes this page; a
test repeats the trainings. Where only `trainer_state.json` was checked, no rollouts were recorded.
"""


@dataclass(frozen=True)
class Broken:
    """A broken training.

    Attributes:
        name: of its picture.
        title: what is wrong, in a few words.
        fault: what was done to the training.
        do: what to change.
        codes: of the rules that may come first when it is made again, that of the page first.
        given: what was checked, in words.
        make: writes it into a folder, and returns what to check.
        picture: arguments of `plot` before the run.
        more: arguments of `plot` after it.
    """

    name: str
    title: str
    fault: str
    do: str
    codes: tuple[str, ...]
    given: str
    make: Callable[[Path], Path]
    picture: str = "overview"
    more: Sequence[str] = ()


LOG, ROLLOUTS = "trainer_state.json alone", "a recorded run"


def _log(kind: str) -> Callable[[Path], Path]:
    """Train with a fault of the dynamics, and keep the log."""

    def make(folder: Path) -> Path:
        from dynamics.trainings import planted, train

        train(next(one for one in planted(0) if one.name == kind), folder)
        return folder / "trainer_state.json"

    return make


def _rollouts(kind: str, strength: int, **options: object) -> Callable[[Path], Path]:
    """Train with an edit of TRL's source, and record the run."""

    def make(folder: Path) -> Path:
        from dataclasses import replace

        from labelled.kinds import KINDS
        from labelled.trl_training import train

        found = next(one for one in KINDS if one.name == kind)
        training = found.training(found.strengths[strength])
        train(replace(training, options={**training.options, **options}), folder / "run.parquet")
        return folder / "run.parquet"

    return make


def _sample(name: str) -> Callable[[Path], Path]:
    return lambda folder: ROOT / "sample_data" / name


BROKEN = (
    Broken(
        "verifier-dies",
        "The verifier dies",
        "From step 31 on, the reward function returns 0 for every response, as if the service behind it timed out.",
        "Make the reward function raise an error or return None when its service does not answer. Resume from a "
        "checkpoint before that step.",
        ("RDT002",),
        LOG,
        _log("verifier-dies"),
    ),
    Broken(
        "reward-flips",
        "The reward changes its sign",
        "From step 31 on, the reward is multiplied by -1.",
        "Find out what changed at that step: the data, the judge model or the version of the reward function.",
        ("RDT005",),
        LOG,
        _log("reward-flips"),
    ),
    Broken(
        "lr-huge",
        "The learning rate is too high",
        "The learning rate is 0.1, with a KL coefficient of 0.1.",
        "Lower the learning rate by a factor of ten or more, and add a warmup. The collapse is a consequence: within "
        "twenty updates the policy puts all probability on one response to each prompt.",
        ("RDT003", "RDT001", "RDT004", "RDT006"),
        LOG,
        _log("lr-huge"),
    ),
    Broken(
        "length-bonus",
        "The reward pays for length",
        "The reward is the length of the completion.",
        "Remove length from the reward, or penalize truncated completions.",
        ("RDT019",),
        LOG,
        _log("length-bonus"),
    ),
    Broken(
        "sampler-frozen",
        "The sampler never gets the new weights",
        "The inference engine keeps the weights of the first step while the trainer updates its own.",
        "Check that the weight sync is called, and that it reaches every engine.",
        ("RDO012",),
        LOG,
        _log("sampler-frozen"),
    ),
    Broken(
        "other-reference",
        "The reference is another checkpoint",
        "The reference model is not the model that the training starts from.",
        "Load the reference from the same checkpoint as the policy.",
        ("RDG012",),
        LOG,
        _log("other-reference"),
    ),
    Broken(
        "rewards-of-the-row-before",
        "Each response gets its neighbour's reward",
        "Rewards are shifted by one row before the baseline is subtracted. Every curve looks normal.",
        "Join rewards to responses by id, not by position.",
        ("RDI004",),
        ROLLOUTS,
        _rollouts("rewards of the row before", 2),
        "advantages",
    ),
    Broken(
        "groups-tiled",
        "The baseline mixes prompts",
        "The batch is ordered prompt by prompt, but the baseline is computed as if the list of prompts were repeated.",
        "Repeat each prompt `num_generations` times in a row, as `view(-1, num_generations)` in the trainer expects.",
        ("RDI003",),
        ROLLOUTS,
        _rollouts("groups read as tiled", 2),
        "advantages",
    ),
    Broken(
        "sampler-temperature",
        "The sampler uses another temperature",
        "The engine samples at temperature 0.6, and the trainer computes log-probs at temperature 1.",
        "Set the same temperature in sampler and trainer, and let the engine return log-probs after temperature "
        "scaling.",
        ("RDO003",),
        ROLLOUTS,
        _rollouts("sampler at another temperature", 2),
        "mismatch",
    ),
    Broken(
        "dropout",
        "Dropout is on in the update",
        "The model has an attention dropout of 0.2 and is in training mode, so two forward passes give different "
        "log-probs.",
        "Set the dropout of the model to 0, or compute the old log-probs and the loss in the same mode.",
        ("RDO006",),
        ROLLOUTS,
        _rollouts("dropout in training", 2),
        "ratio",
    ),
    Broken(
        "rejected-in-baseline",
        "Rejected responses shift the baseline",
        "verl rejects responses after computing rewards, but they still count in the mean and std of their group.",
        "Exclude them from the group statistics. The picture shows the advantages with and without that fix.",
        ("RDA001",),
        "`sample_data/verl_rejected.parquet`",
        _sample("verl_rejected.parquet"),
        "advantages",
        ("--fix", "rejected-rows"),
    ),
    Broken(
        "kl-overwritten",
        "The logged KL is overwritten",
        "slime up to 0.3.1 writes the rewards of its ppo estimator into the tensor that holds the KL, and logs the "
        "mean of that tensor as `rollout/kl`.",
        "Use the recomputed curve, and log a copy of the tensor.",
        ("RDM001",),
        "`sample_data/slime_ppo.parquet`",
        _sample("slime_ppo.parquet"),
        "kl",
    ),
)


def kept(one: Broken) -> Path:
    """Return the log that the page is about."""
    return KEPT / one.name / "trainer_state.json"


def keep(one: Broken, path: Path) -> Path:
    """Keep what was logged, a step a line."""
    history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
    kept(one).parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(row) for row in history)
    kept(one).write_text(f'{{"log_history": [\n{rows}\n]}}\n', encoding="utf-8")
    return kept(one)


def first_sentence(path: Path) -> tuple[str, str]:
    """Return the code of the first finding of a run and the first paragraph of its report."""
    import rolloutdoctor

    report = rolloutdoctor.check(path, device="cpu")
    _, printed, _, _ = run(["check", str(path), "-q", "--device", "cpu"], ROOT, COLUMNS)
    return report.findings[0].code, printed.rsplit("\n", 2)[0].partition(" rules tested:")[0].rpartition("\n")[0]


def section(one: Broken, sentence: str) -> str:
    """Return the part of the page about a training."""
    parts = (
        f"## {one.title}",
        one.fault,
        f"Checked: {one.given}.",
        f"```text\n{sentence}\n```",
        f"![{one.title}](images/gallery/{one.name}.png)",
        f"**What to do.** {one.do}",
    )
    return "\n\n".join(parts)


def shrink(path: Path) -> None:
    """Make a picture smaller, in few colours."""
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").resize([side * 5 // 8 for side in image.size], Image.Resampling.LANCZOS)
        small.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


def draw(one: Broken, path: Path) -> None:
    """Write the picture."""
    target = IMAGES / f"{one.name}.png"
    target.parent.mkdir(exist_ok=True)
    code, _, said, _ = run(["plot", one.picture, str(path), *one.more, "-o", str(target), "--device", "cpu"], ROOT)
    assert code == 0, said
    shrink(target)


def without_digits(text: str) -> str:
    """Return a text without its line breaks and numbers, which other processors round otherwise."""
    return re.sub(r"\d[\d.,e+-]*", "#", " ".join(text.split()))


def sections_of(page: str) -> dict[str, str]:
    """Return the first sentence of each training, by its title."""
    return dict(re.findall(r"^## (.*?)\n.*?```text\n(.*?)\n```", page, re.MULTILINE | re.DOTALL))


def main() -> None:
    """Make the named ones again, or all, and write the page and their pictures."""
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or [one.name for one in BROKEN]
    sentences = sections_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    for one in (one for one in BROKEN if one.name in wanted):
        with tempfile.TemporaryDirectory() as folder:
            path = one.make(Path(folder))
            path = keep(one, path) if one.given == LOG else path
            code, sentences[one.title] = first_sentence(path)
            print(one.name, code, sentences[one.title], sep="\n", flush=True)
            assert code == one.codes[0], f"{one.codes[0]} was expected"
            draw(one, path)
    parts = [INTRODUCTION, *(f"{section(one, sentences[one.title])}\n" for one in BROKEN)]
    PAGE.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
