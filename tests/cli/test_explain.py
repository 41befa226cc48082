"""`explain`: what a name means, whatever it names, and the lists of all names."""

import json
import re

import pytest

from rolloutdoctor import packs
from rolloutdoctor.commands.explain import book, causes, fixes, rules

HEADS = {
    "RDG001": "RDG001 zero-std-kl (gradients and KL)",
    "rdg001": "RDG001 zero-std-kl (gradients and KL)",
    "zero-std-kl": "RDG001 zero-std-kl (gradients and KL)",
    "zero-var": "RDT001 zero-variance-share (dynamics of the training)",
    "zero-std": "zero-std  (upstream: closed, not merged; contested)",
    "zero-std:pr5640": "zero-std  (upstream: closed, not merged; contested)",
    "missing-reward-as-zero": "missing-reward-as-zero (cause that RDA005 reward-missing-as-zero reports)",
    "missing-rew": "missing-reward-as-zero (cause that RDA005 reward-missing-as-zero reports)",
    "trl": "trl (trainer: TRL)",
    "trl@1.9.0": "trl (trainer: TRL)",
    "roll": "roll (trainer: its log alone is read)",
    "frac_reward_zero_std": "frac_reward_zero_std (metric)",
    "rewards/accuracy/mean": "rewards/accuracy/mean (metric)",
    "grad_norm": "grad_norm (quantity)",
    "sum_pi_squared": "sum_pi_squared (column of a run file)",
    "scale_rewards": "scale_rewards (option)",
    "norm_adv_by_std_in_grpo": "norm_adv_by_std_in_grpo (option)",
    "zero-variance group": "zero-variance group (term)",
    "Sampler Gap": "train-inference mismatch, sampler gap (term)",
    "column entropy": "entropy (column of a run file)",
    "rule kl-of-rejected": "RDG016 kl-of-rejected (gradients and KL)",
    "fix kl-of": "kl-of-rejected  (upstream: no thread upstream; contested)",
    "no-baseline": "no-baseline (cause that RDI014 options-refuted reports)",
}


@pytest.mark.parametrize("name", HEADS)
def test_a_name_is_explained(rolloutdoctor, name):
    found = rolloutdoctor("explain", *name.split())
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines()[0] == HEADS[name]
    assert len(found.stdout.splitlines()) > 2


def test_a_name_of_several_kinds_is_explained_for_each(rolloutdoctor):
    text = rolloutdoctor("explain", "entropy").stdout
    assert text.startswith("entropy (quantity)\n")
    assert "\n\nentropy (column of a run file)\n" in text
    of_metric, of_column = json.loads(rolloutdoctor("explain", "entropy", "--format", "json").stdout)
    assert of_metric["quantities"][0]["unit"] == "nats"
    assert of_column["type"] == "list<float32>"


def test_a_beginning_of_codes_lists_them(rolloutdoctor):
    lines = rolloutdoctor("explain", "RDM00").stdout.splitlines()
    assert [line[:6] for line in lines if line.startswith("RD")] == [f"RDM00{at}" for at in range(1, 9)]
    assert len(json.loads(rolloutdoctor("explain", "rdm00", "--format", "json").stdout)) == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["zero-std-kll"], "nothing is called 'zero-std-kll'; did you mean 'zero-std-kl' or "),
        (["frac_reward_zero_sdt"], "nothing is called 'frac_reward_zero_sdt'; did you mean 'frac_reward_zero_std'"),
        (["RDG091"], "nothing is called 'RDG091'"),
        (["kl"[:1]], "'k' is the beginning of "),
        (["reward-"], "'reward-' is the beginning of "),
        (["fix", "zero-stdd"], "no fix 'zero-stdd'; did you mean 'zero-std'"),
        (["column", "rewardd"], "no column 'rewardd'; did you mean 'reward'"),
        (["trl@x"], "'x' is not a version"),
        (["schema", "chek"], "no output 'chek'"),
    ],
)
def test_an_unknown_name_is_one_sentence_with_the_nearest(rolloutdoctor, words, said):
    found = rolloutdoctor("explain", *words)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("rolloutdoctor: ")
    assert said in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize("width", ["60", "100"])
def test_everything_is_a_line_each_and_no_kind_more_than_a_screen(rolloutdoctor, width):
    text = rolloutdoctor("explain", env={"COLUMNS": width}).stdout
    assert all(len(line) <= int(width) for line in text.splitlines() if line.startswith("  "))
    for group in text.split("\n\n"):
        assert len(group.splitlines()) <= book.MOST + 2
    for name in (*rules.codes(), *fixes.names(), "trl", "llama-factory", "reward", "step", "kappa"):
        assert f"  {name} " in text
    assert re.search(r"and \d+ more: `rolloutdoctor explain metrics`", text)


@pytest.mark.slow
def test_a_trainer_is_a_page_to_read(rolloutdoctor):
    """`trainers trl` was 1,191 words long, and `trainers` 11,088."""
    for name in ("trl", "verl", "slime"):
        text = rolloutdoctor("explain", name).stdout
        assert len(text.split()) < 500
        for title in ("Read ", "Record ", "Dump ", "Log ", "Faults ", "Options "):
            assert any(line.startswith(title) for line in text.splitlines()), (name, title)
    assert "beta=0.0," in rolloutdoctor("explain", "trl").stdout
    assert "beta=0.04," in rolloutdoctor("explain", "trl@0.18.0").stdout
    assert len(rolloutdoctor("explain", "trl", "-v").stdout.split()) > 1000


def test_no_cause_has_the_name_of_something_else():
    """Causes take long to import, so that they are asked last."""
    for name in causes.lines():
        assert not [kind for kind, one in book.KINDS.items() if kind != "causes" and one.is_known(name)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["rule"], ["rules"]),
        (["rule", "RDA001"], ["RDA001"]),
        (["rule", "RDA001", "--format", "json"], ["RDA001", "--format", "json"]),
        (["causes", "RDA005"], ["causes", "RDA005"]),
        (["fixes"], ["fixes", "-v"]),
        (["fixes", "--format", "json"], ["fixes", "--format", "json"]),
        (["trainers", "trl@1.9.0"], ["trl@1.9.0", "-v"]),
        (["metrics", "verl"], ["metrics", "verl"]),
        (["schema"], ["schemas"]),
        (["schema", "check"], ["schema", "check"]),
    ],
    ids=" ".join,
)
def test_an_old_name_does_what_the_new_one_does_and_says_so(rolloutdoctor, old, new):
    before, now = rolloutdoctor(*old), rolloutdoctor("explain", *new)
    assert before.stdout == now.stdout
    assert before.returncode == 0
    assert before.stderr.count("\n") == 1
    assert before.stderr.startswith(f"rolloutdoctor: {old[0]} is now `rolloutdoctor explain ")


def test_a_trainer_under_the_old_name_is_a_list_for_programs(rolloutdoctor):
    (one,) = json.loads(rolloutdoctor("trainers", "trl@1.9.0", "--format", "json").stdout)
    assert one == json.loads(rolloutdoctor("explain", "trl@1.9.0", "--format", "json").stdout)


def test_no_old_name_is_in_the_help(rolloutdoctor):
    text = rolloutdoctor("--help").stdout
    assert not [name for name in (*packs.RENAMED, "merge") if f"\n  {name} " in text]
    assert [name for names in packs.COMMAND_GROUPS.values() for name in names if f"\n  {name} " not in text] == []
