"""A tiny transformers model that is trained by real updates, and an engine of its own that samples from it.

The engine is `generate` of transformers on a copy of the weights, with a cache of keys and values; the trainer scores
the rows in float32 in one forward pass, and takes a step of Adam up the policy gradient.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from rolloutdoctor.recorders.own_loop import StepRecorder

VOCABULARY, RESPONSE = 48, 16
CACHED, SHORT = 136, 24
"""Tokens of prompts that an engine keeps the keys and values of, and of such that it does not."""
GROUPS, SIZE, POOL = 6, 4, 14

Model = LlamaForCausalLM


def tiny_model(seed: int = 0) -> Model:
    """A random model with distributions of about a nat."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # Logits are sums over 32 dimensions of a normalised state: their spread is this times its root.
        model.lm_head.weight.normal_(std=2.5 / 32**0.5)
    return model


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What the engine does; the defaults are those of a healthy one.

    Attributes:
        dtype: of its weights.
        temperature: that it samples at.
        behind: step to how many updates its weights are behind.
        keeps_cache: keys and values of a prompt stay as they were when it first came.
        rounds: log-probs are rounded to bfloat16.
    """

    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    behind: Callable[[int], int] = lambda step: 0
    keeps_cache: bool = False
    rounds: bool = False


def record(path: Path, engine: Engine, *, steps: int = 12, prompt: int = CACHED, seed: int = 0) -> Path:
    """Sample, score, record and update for some steps, with prompts of so many tokens."""
    model = tiny_model(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    draw = np.random.default_rng(seed)
    prompts = torch.from_numpy(draw.integers(0, VOCABULARY, (POOL, prompt)))
    past: list[Model] = []
    first_seen: dict[int, Model] = {}
    with StepRecorder(path) as recorder:
        for step in range(steps):
            past.append(deepcopy(model))
            weights = deepcopy(past[max(0, step - engine.behind(step))]).to(engine.dtype)
            chosen = np.sort(draw.choice(POOL, GROUPS, replace=False)).repeat(SIZE)
            for each in set(chosen.tolist()):
                first_seen.setdefault(each, weights)
            torch.manual_seed(1000 * seed + step)
            ids, sampler = _sampled(engine, weights, prompts[chosen], [first_seen[each] for each in chosen.tolist()])
            trainer = _scores(model, prompts[chosen], ids)
            reward = (ids < VOCABULARY // 4).double().mean(1)
            recorder.record_step(
                step,
                group_id=chosen,
                reward=reward,
                lengths=[RESPONSE] * len(chosen),
                prompt_ids=prompts[chosen].tolist(),
                response_ids=ids,
                rollout_log_probs=sampler,
                old_log_probs=trainer,
            )
            advantage = reward - reward.reshape(-1, SIZE).mean(1).repeat_interleave(SIZE)
            optimizer.zero_grad()
            (-(advantage[:, None] * trainer).mean()).backward()
            optimizer.step()
    return recorder.path


@torch.no_grad()
def _sampled(engine: Engine, weights: Model, prompts: Tensor, first: list[Model]) -> tuple[Tensor, Tensor]:
    """Response ids and the engine's log-probs of them, ``[N, RESPONSE]``."""
    cache = None
    if engine.keeps_cache:
        cache = _kept(prompts, first)
    made = weights.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        past_key_values=cache,
        do_sample=True,
        temperature=engine.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=RESPONSE,
        output_scores=True,
        return_dict_in_generate=True,
    )
    ids = made.sequences[:, prompts.shape[1] :]
    logs = torch.stack(made.scores, 1).float().log_softmax(-1).gather(2, ids[:, :, None])[:, :, 0]
    return ids, logs.bfloat16().float() if engine.rounds else logs


def _kept(prompts: Tensor, first: list[Model]) -> DynamicCache:
    """Keys and values of all but the last token of each prompt, by the weights that first served it."""
    layers: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(first[0].config.num_hidden_layers)]
    for prompt, weights in zip(prompts, first, strict=True):
        own = weights(prompt[None, :-1], use_cache=True).past_key_values
        for (keys, values), layer in zip(layers, own.layers, strict=True):
            keys.append(layer.keys)
            values.append(layer.values)
    cache = DynamicCache()
    for place, (keys, values) in enumerate(layers):
        cache.update(torch.cat(keys), torch.cat(values), place)
    return cache


def _scores(model: Model, prompts: Tensor, ids: Tensor) -> Tensor:
    """The trainer's log-probs, ``[N, RESPONSE]`` float32, with their graph."""
    logits = model(torch.cat([prompts, ids], 1)).logits[:, prompts.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(2, ids[:, :, None])[:, :, 0]
