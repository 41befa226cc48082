"""Write a verl-like dump of JSON Lines: prompts and responses with code and formulas, `uid`, score and step."""

import argparse
import json
from pathlib import Path

import numpy as np

WORDS = [
    "so",
    "the answer",
    "is",
    "x = 2",
    "\\frac{a}{b}",
    "therefore",
    "\n",
    '"quoted"',
    "f(x)",
    "caf\u00e9",
    "and",
    "then",
]


def write_dump(path, *, megabytes, seed=0, group=8, rows_per_step=512):
    """Write about `megabytes` MB; returns the exact number of bytes."""
    draw = np.random.default_rng(seed)
    pool = " ".join(draw.choice(WORDS, 4_000_000))

    def text():
        start, length = draw.integers(len(pool)), int(draw.lognormal(7.3, 0.7))
        return pool[start : start + length]

    prompt = ""
    size, row = 0, 0
    with Path(path).open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            prompt = prompt if row % group else text()
            body = {
                "input": prompt,
                "output": text(),
                "gts": "42",
                "score": float(draw.random() < 0.5),
                "step": row // rows_per_step,
                "uid": f"p{row // group}_{row % group}_0",
                "acc": 1.0,
            }
            size += file.write(json.dumps(body) + "\n")
            row += 1
    return size


def write_tokens(path, *, megabytes, seed=0, group=8, rows_per_step=512):
    """Write about `megabytes` MB of rollouts with token ids, a mask and two log-probs, under names of their own."""
    draw = np.random.default_rng(seed)
    size, row = 0, 0
    with Path(path).open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            length = int(draw.lognormal(6.2, 0.6)) + 1
            old, ref = (-draw.exponential(0.4, (2, length))).astype(np.float32).tolist()
            body = {
                "train_step": row // rows_per_step,
                "prompt_id": f"p{row // group}",
                "info": {"score": float(draw.random() < 0.5), "why": "x"},
                "ids": draw.integers(0, 150_000, length).tolist(),
                "mask": [1] * length,
                "old": old,
                "ref": ref,
            }
            size += file.write(json.dumps(body) + "\n")
            row += 1
    return size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--megabytes", type=int, default=2000)
    options = parser.parse_args()
    print(write_dump(options.path, megabytes=options.megabytes))
