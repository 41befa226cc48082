"""A small inference engine in the place of TRL's vLLM: samples from weights of its own, and reports log-probs."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from labelled.in_trainer import drawn

transformers = pytest.importorskip("transformers")


class Engine:
    """What TRL makes where `use_vllm` is set; takes the arguments of `VLLMGeneration`.

    Args:
        model: the policy.
        planted: what is wrong with it, by name; nothing: a healthy engine.
            dtype: of its weights, "float32" or "bfloat16";
            temperature, top_p, top_k: of its sampling, instead of the trainer's;
            raw: log-probs are those of the model, not of the distribution that is sampled from;
            synced: number of a weight sync to the number of the one whose weights it has, counted from 0;
            noise: standard deviation of what is added to every logit;
            decimals: digits to which log-probs are rounded; "bfloat16": rounded to that;
            filled: share of tokens whose log-prob is 0.0;
            late: share of rows whose log-probs are one token late;
            greedy: share of rows whose log-probs are those of the most likely tokens;
            swapped: share of rows with the log-probs of the next row of their length.
        **given: TRL's settings.
    """

    def __init__(self, model: Any, planted: dict[str, Any], **given: Any) -> None:
        self.source, self.planted, self.given = model, planted, given
        self.weights: list[dict[str, torch.Tensor]] = []
        config = deepcopy(model.config)
        with torch.random.fork_rng():
            self.model = type(model)(config).eval().to(getattr(torch, planted.get("dtype", "float32")))

    def sync_weights(self) -> None:
        """Take the policy's weights, or those of an earlier sync."""
        self.weights.append({name: each.detach().clone() for name, each in self.source.state_dict().items()})
        number = len(self.weights) - 1
        at = self.planted.get("synced", lambda number: number)(number)
        self.model.load_state_dict(self.weights[max(0, at)])

    def generate(self, prompts: list[list[int]], images=None, num_generations=1, profiler=None, tokens=None):
        """Return what TRL expects: the prompts, the responses, a list of log-probs for each token, and their ids."""
        planted, given = self.planted, self.given
        ids, chosen, best = self._sampled(prompts, tokens or given["max_completion_length"])
        logps = [row.copy() for row in chosen]
        seed = len(self.weights), len(prompts)
        for row in np.flatnonzero(drawn(len(ids), planted.get("greedy", 0.0), (seed, 1))):
            logps[row] = best[row].copy()
        for row in np.flatnonzero(drawn(len(ids), planted.get("late", 0.0), (seed, 2))):
            logps[row][1:] = logps[row][:-1].copy()
        for row in np.flatnonzero(drawn(len(ids), planted.get("swapped", 0.0), (seed, 3))):
            others = [each for each in range(len(ids)) if each != row and len(ids[each]) == len(ids[row])]
            if others:
                logps[row] = chosen[others[0]].copy()
        if "decimals" in planted:
            places = planted["decimals"]
            short = (
                (lambda x: x.bfloat16()) if places == "bfloat16" else (lambda x: x.double().round(decimals=int(places)))
            )
            logps = [short(torch.from_numpy(row)).float().numpy() for row in logps]
        for number, row in enumerate(logps):
            row[drawn(len(row), planted.get("filled", 0.0), (seed, 4, number))] = 0.0
        return prompts, ids, [[[float(each)] for each in row] for row in logps], None

    @torch.no_grad()
    def _sampled(self, prompts: list[list[int]], tokens: int):
        """Responses, the log-probs of their tokens and those of the most likely ones."""
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
        settings = {name: self.planted.get(name, self.given[name]) for name in ("temperature", "top_p", "top_k")}
        config = transformers.GenerationConfig(
            do_sample=True, max_new_tokens=tokens, pad_token_id=0, eos_token_id=1, disable_compile=True, **settings
        )
        processors = []
        if self.planted.get("noise"):
            processors = [lambda _, logits: logits + self.planted["noise"] * torch.randn_like(logits)]
        made = self.model.generate(
            padded,
            attention_mask=mask,
            generation_config=config,
            logits_processor=processors,
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = made.sequences[:, width:]
        scores = torch.stack(made.logits if self.planted.get("raw") else made.scores, 1).float().log_softmax(-1)
        chosen = scores.gather(2, ids[:, :, None])[:, :, 0]
        is_end = (ids == 1).int()
        lengths = torch.where(is_end.any(1), is_end.argmax(1) + 1, ids.shape[1]).tolist()

        def cut(table):
            return [row[:length].numpy() for row, length in zip(table, lengths, strict=True)]

        return [row.tolist() for row in cut(ids)], cut(chosen), cut(scores.amax(2))


def rollout_with_tools(prompts: list[str], trainer: Any, trained: float) -> dict[str, list]:
    """Responses in two turns: after the first, unfinished ones get three tokens of a tool, which are masked.

    Args:
        prompts: texts.
        trainer: whose engine samples.
        trained: share of rows whose mask does not leave the tokens of the tool out.
    """
    engine = trainer.vllm_generation
    prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
    _, ids, logps, _ = engine.generate(prompt_ids, tokens=6)
    ids, logps = [list(row) for row in ids], [[one[0] for one in row] for row in logps]
    masks: list[list[int]] = [[1] * len(row) for row in ids]
    goes_on = [row for row, its in enumerate(ids) if its[-1] != 1]
    leaks = drawn(len(ids), trained, (trainer.state.global_step, 5))
    for row in goes_on:
        ids[row] += [2 + (row + place) % 10 for place in range(3)]
        logps[row] += [None] * 3
        masks[row] += [int(leaks[row])] * 3
    left = max(6, trainer.max_completion_length - 10)
    _, more, its, _ = engine.generate([prompt_ids[row] + ids[row] for row in goes_on], tokens=left)
    for row, tail, values in zip(goes_on, more, its, strict=True):
        ids[row] += tail
        logps[row] += [one[0] for one in values]
        masks[row] += [1] * len(tail)
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logps, "env_mask": masks}
