"""The toy task of the recorded runs: a small transformer that adds two numbers, character by character.

A model of 0.2 million parameters learns sums of numbers of one and two digits from examples until a wanted share of
its sampled answers is right. Nothing is downloaded.
"""

import polars as pl
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rolloutdoctor.io.write.writer import write_metrics

SYMBOLS = ["<pad>", "<eos>", *"0123456789+="]
INDEX = {symbol: index for index, symbol in enumerate(SYMBOLS)}
PAD, EOS = 0, 1


def make_tokenizer():
    tokenizer = Tokenizer(models.WordLevel(INDEX, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model():
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def problems(count, generator):
    """Prompts and answers; half of the numbers have one digit, so that some sums are easy and some are not."""
    numbers = torch.randint(0, 100, (count, 2), generator=generator)
    short = torch.rand(count, 2, generator=generator) < 0.5
    numbers = torch.where(short, numbers % 10, numbers).tolist()
    return [f"{a}+{b}=" for a, b in numbers], [str(a + b) for a, b in numbers]


def encode(texts, side):
    width = max(len(text) for text in texts)
    ids = torch.full((len(texts), width), PAD)
    for row, text in enumerate(texts):
        start = width - len(text) if side == "left" else 0
        ids[row, start : start + len(text)] = torch.tensor([INDEX[character] for character in text])
    return ids


def sampled_accuracy(model, generator):
    prompts, answers = problems(300, generator)
    ids = encode(prompts, "left")
    with torch.no_grad():
        output = model.generate(ids, attention_mask=(ids != PAD).long(), max_new_tokens=5, do_sample=True, top_k=0)
    texts = ["".join(SYMBOLS[i] for i in row if i > EOS) for row in output[:, ids.shape[1] :].tolist()]
    return sum(text == answer for text, answer in zip(texts, answers, strict=True)) / len(answers)


def warm_up(model, generator, goal=0.5):
    """Supervised training until the share of right sampled answers reaches `goal`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, 5001):
        prompts, answers = problems(128, generator)
        ids = encode([p + a for p, a in zip(prompts, answers, strict=True)], "right")
        ids = torch.cat([ids, torch.full((len(ids), 1), PAD)], 1)
        ends = (ids != PAD).sum(1)
        ids[torch.arange(len(ids)), ends] = EOS
        labels = ids.clone()
        for row, prompt in enumerate(prompts):
            labels[row, : len(prompt)] = -100
        labels[ids == PAD] = -100
        loss = model(input_ids=ids, labels=labels, attention_mask=(ids != PAD).long()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            model.eval()
            accuracy = sampled_accuracy(model, generator)
            model.train()
            print(f"warm-up step {step}: loss {loss.item():.3f}, {accuracy:.0%} of the sampled answers are right")
            if accuracy >= goal:
                return
    raise SystemExit("the warm-up did not reach its goal")


def exact(completions, answer, **kwargs):
    """Reward one for the right sum, zero for any other text."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def without_clocks(path):
    """Drop the logged timings, which differ each time."""
    metrics = pl.read_parquet(path).filter(~pl.col("name").str.contains("time|per_second"))
    write_metrics(path, list(metrics.iter_rows()))
