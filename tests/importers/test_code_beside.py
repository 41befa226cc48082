"""Options that code or a page beside a log states, and commands of notebooks with few of them."""

import json

import pytest

import rolloutdoctor as rd

DICTS = "".join(f"{{'loss': 0.5, 'reward': 0.{n}, 'kl': 0.1, 'epoch': {n / 10}}}\n" for n in range(1, 9))
CALL = "args = GRPOConfig(\n    beta=0.04,\n    num_generations=8,\n    learning_rate=lr,\n    output_dir='x',\n)\n"
BY_NAME = "config = dict(beta=0.04, num_generations=8)\nargs = GRPOConfig(output_dir='x', **config)\n"
FOUND = {"beta": 0.04, "num_generations": 8}


def settings(path):
    return {setting.name: setting.value for setting in rd.check(path).settings}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"train.py": CALL}, FOUND),
        ({"train.py": f"def main():\n    {BY_NAME.replace(chr(10), chr(10) + '    ')}\n"}, FOUND),
        ({"README.md": f"# A run\n```python\n{CALL}```\n"}, FOUND),
        (
            {"README.md": "```bash\npython train.py --beta 0.04 --num_generations 8 --lr 1e-6\n```\n"},
            {**FOUND, "lr": 1e-6},
        ),
        # Two of them, one of another training, and one that is only spoken of.
        ({"train.py": CALL, "other.py": BY_NAME}, {}),
        ({"train.py": CALL + BY_NAME}, {}),
        ({"train.py": CALL.replace("GRPO", "SFT")}, {}),
        ({"README.md": "It takes `GRPOConfig(beta=0.04, num_generations=8)`.\n"}, {}),
        # What files state goes first.
        (
            {"train.py": CALL, "run.yaml": "beta: 0.1\nnum_generations: 4\nlearning_rate: 1.0e-6\n"},
            {"beta": 0.1, "num_generations": 4, "learning_rate": 1e-6},
        ),
    ],
)
def test_the_only_options_of_a_policy_beside_a_log(tmp_path, files, found):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "train.log").write_text(DICTS)
    assert settings(tmp_path / "train.log") == found


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        ([("!python train.py --beta 0.04", DICTS)], {"beta": 0.04}),
        (
            [("!accelerate launch train.py algorithm.kl_coef=0.04 lr=1e-6", DICTS)],
            {"algorithm.kl_coef": 0.04, "lr": 1e-6},
        ),
        ([("%%bash\npython train.py \\\n  --beta 0.04", DICTS)], {"beta": 0.04}),
        # Of another cell a single option may be of anything.
        ([("!python prepare.py --beta 0.04", "done\n"), ("train()", DICTS)], {}),
    ],
)
def test_a_command_above_the_output_of_its_run_may_have_one_option(tmp_path, cells, found):
    body = [
        {
            "cell_type": "code",
            "source": source,
            "outputs": [{"output_type": "stream", "name": "stdout", "text": text}],
            "metadata": {},
        }
        for source, text in cells
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": body, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    assert settings(path) == found
