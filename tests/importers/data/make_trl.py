"""Make `trl/`: completions directories that the real GRPOTrainer of TRL 1.16.0 wrote with log_completions=True.

    python tests/importers/data/make_trl.py

The model is a random transformer of 32 dimensions; a few seconds on one CPU core, nothing is downloaded.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import shutil
import sys
import tempfile
from contextlib import chdir
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "recorders"))

from trl_runs import digits, make_model, make_tokenizer  # noqa: E402


def every_second(completions, trainer_state, **kwargs):
    return digits(completions) if trainer_state.global_step % 2 else [1.0] * len(completions)


RUNS = {
    # 16 prompts, two answers each: an evaluation fills the file and replaces the training rows
    "overwritten": {"evals": 16, "options": {}},
    # 4 prompts: 8 evaluation rows among 8 training rows
    "mixed": {"evals": 4, "options": {}},
    # every generation is trained on twice, so that its rows are logged twice
    "two_passes": {"steps": 4, "rewards": [digits], "options": {"scale_rewards": "none", "num_iterations": 2}},
    # every second step has equal rewards, which TRL logs as frac_reward_zero_std = 1; its log alone is kept
    "reward_free": {"steps": 6, "rewards": [every_second], "log_alone": True, "options": {"accumulation": 1}},
    "weights": {"steps": 4, "options": {"reward_weights": [1.0, 0.5]}},
    # what a training with checkpoints leaves, without the weights
    "output": {"steps": 12, "options": {"accumulation": 1, "save_strategy": "steps", "save_steps": 6}},
}


def has7(completions, **kwargs):
    return [float("7" in text) for text in completions]


def make(name, folder, *, evals=0, steps=6, rewards=(digits, has7), log_alone=False, options):
    draw = torch.Generator().manual_seed(1)
    prompts = [f"{a}+{b}=" for a, b in torch.randint(0, 100, (60, 2), generator=draw).tolist()]
    evaluation = {"eval_strategy": "steps", "eval_steps": 3} if evals else {}
    trainer = GRPOTrainer(
        model=make_model(folder),
        reward_funcs=list(rewards),
        args=GRPOConfig(
            output_dir="trainer",
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            num_generations=4,
            num_generations_eval=2,
            max_completion_length=5,
            gradient_accumulation_steps=options.pop("accumulation", 2),
            max_steps=steps,
            learning_rate=1e-3,
            beta=0.04,
            logging_steps=1,
            save_strategy=options.pop("save_strategy", "no"),
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            log_completions=True,
            seed=5,
            **evaluation,
            **options,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts[:44]}),
        eval_dataset=Dataset.from_dict({"prompt": prompts[44 : 44 + max(evals, 1)]}),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    trainer.save_state()
    target = HERE / "trl" / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if not log_alone:
        shutil.copytree(folder / "trainer" / "completions", target / "completions")
    checkpoints = [each.relative_to(folder / "trainer") for each in folder.glob("trainer/checkpoint-*")]
    for kept in checkpoints or [Path()]:
        (target / kept).mkdir(exist_ok=True)
        shutil.copy(folder / "trainer" / kept / "trainer_state.json", target / kept)
        if checkpoints:
            shutil.copy(folder / "trainer" / kept / "training_args.bin", target / kept)
            shutil.copy(folder / "trainer" / "README.md", target)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for run, settings in RUNS.items():
        with tempfile.TemporaryDirectory() as scratch, chdir(scratch):
            make(run, Path(scratch), **settings)
