"""Make `run.parquet` and `run.metrics.parquet`: a small real GRPO run of TRL, recorded.

A character-level transformer of 0.2 million parameters learns to add numbers of one and two digits from examples
until about half of its sampled answers are right. Then `trl.GRPOTrainer` goes on from there with a reward of one
for a right answer. Two prompts a step, eight answers each: at times every group of a step has equal rewards.

    python sample_data/make_run.py

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

SEED = 3
STEPS = 100
OUTPUT = Path(__file__).parent / "run.parquet"


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    model = make_model()
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters")
    warm_up(model, generator)
    data = [Dataset.from_dict(dict(zip(("prompt", "answer"), problems(n, generator), strict=True))) for n in (400, 32)]
    with tempfile.TemporaryDirectory() as folder:
        # TRL loads the reference model from where the model came from.
        model.save_pretrained(folder)
        trainer = GRPOTrainer(
            model=LlamaForCausalLM.from_pretrained(folder, dtype="float32"),
            reward_funcs=exact,
            args=GRPOConfig(
                output_dir=f"{folder}/trainer",
                max_steps=STEPS,
                learning_rate=1e-4,
                lr_scheduler_type="constant",
                beta=0.04,
                num_generations=8,
                num_generations_eval=1,
                per_device_train_batch_size=8,
                per_device_eval_batch_size=16,
                gradient_accumulation_steps=2,
                max_completion_length=5,
                logging_steps=1,
                eval_strategy="steps",
                eval_steps=15,
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
