"""Make `healthy.parquet` and `healthy.metrics.parquet`: a real GRPO run of TRL in which nothing is wrong.

The toy task of `make_run.py` with other options: two reward functions whose values are exact in binary, four prompts
a step, every generation trained on twice (so that the second pass has a ratio other than one), groups of four in the
evaluation, `loss_type` grpo and a small beta.

    python sample_data/make_healthy.py

needs `pip install rolloutdoctor[trl]` and takes less than a minute on one CPU core. Nothing is downloaded.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from toy_task import exact, make_model, make_tokenizer, problems, warm_up, without_clocks
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rolloutdoctor.io.write.writer import metrics_path
from rolloutdoctor.recorders.trl import record

SEED = 11
STEPS = 100
OUTPUT = Path(__file__).parent / "healthy.parquet"


def digits(completions, answer, **kwargs):
    """A quarter for each digit that is right, counted from the last one, and nothing for a text of another length."""
    found = []
    for text, right in zip(completions, answer, strict=True):
        matches = sum(a == b for a, b in zip(text, right, strict=False)) if len(text) == len(right) else 0
        found.append(0.25 * matches)
    return found


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    model = make_model()
    warm_up(model, generator)
    data = [Dataset.from_dict(dict(zip(("prompt", "answer"), problems(n, generator), strict=True))) for n in (400, 16)]
    with tempfile.TemporaryDirectory() as folder:
        # TRL loads the reference model from where the model came from.
        model.save_pretrained(folder)
        trainer = GRPOTrainer(
            model=LlamaForCausalLM.from_pretrained(folder, dtype="float32"),
            reward_funcs=[exact, digits],
            args=GRPOConfig(
                output_dir=f"{folder}/trainer",
                max_steps=STEPS,
                learning_rate=3e-4,
                lr_scheduler_type="constant",
                loss_type="grpo",
                beta=0.01,
                reward_weights=[1.0, 0.5],
                num_generations=8,
                num_generations_eval=4,
                num_iterations=2,
                per_device_train_batch_size=16,
                per_device_eval_batch_size=16,
                gradient_accumulation_steps=2,
                max_completion_length=5,
                logging_steps=1,
                eval_strategy="steps",
                eval_steps=20,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
                seed=SEED,
            ),
            train_dataset=data[0],
            eval_dataset=data[1],
            processing_class=make_tokenizer(),
        )
        with record(trainer, OUTPUT):
            trainer.train()
    without_clocks(metrics_path(OUTPUT))


if __name__ == "__main__":
    main()
