"""Make `verifier_dies.log`: the console output of a real GRPO training of TRL whose verifier dies after 60 steps.

The toy task of `make_run.py` with a reward function that returns 0 for every response from then on, as one does whose
service no longer answers. Only the console output is kept: what people have of a run that nobody recorded.

    python sample_data/make_verifier_dies.py

needs `pip install rolloutdoctor[trl]` and takes less than a minute on one CPU core. Nothing is downloaded.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import contextlib
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from toy_task import exact, make_model, make_tokenizer, problems, warm_up
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

SEED = 5
STEPS = 100
DIES_AFTER = 60
OUTPUT = Path(__file__).parent / "verifier_dies.log"


def verified(completions, answer, trainer_state, **kwargs):
    """Reward one for the right sum, until the verifier dies."""
    return exact(completions, answer) if trainer_state.global_step < DIES_AFTER else [0.0] * len(completions)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    model = make_model()
    warm_up(model, generator)
    data = Dataset.from_dict(dict(zip(("prompt", "answer"), problems(400, generator), strict=True)))
    with tempfile.TemporaryDirectory() as folder:
        # TRL loads the reference model from where the model came from.
        model.save_pretrained(folder)
        trainer = GRPOTrainer(
            model=LlamaForCausalLM.from_pretrained(folder, dtype="float32"),
            reward_funcs=verified,
            args=GRPOConfig(
                output_dir=f"{folder}/trainer",
                max_steps=STEPS,
                learning_rate=1e-4,
                lr_scheduler_type="constant",
                beta=0.01,
                num_generations=8,
                per_device_train_batch_size=64,
                max_completion_length=5,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
                seed=SEED,
            ),
            train_dataset=data,
            processing_class=make_tokenizer(),
        )
        with OUTPUT.open("w") as log, contextlib.redirect_stdout(log):
            trainer.train()


if __name__ == "__main__":
    main()
