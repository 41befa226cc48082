"""Call the functions of older TRL releases and store what they give: `make_trl_releases.py REPOSITORY`.

REPOSITORY is a git directory of TRL with its tags; those of 1.9.1 on hold the files of the wheels. Nothing of a
release is imported: the functions of its trainer are taken out of the source and called with rows instead of a model,
the statements between the rewards and the advantages as they stand.
"""

import ast
import json
import math
import subprocess
import sys
import types
import warnings
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import MethodType, SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from goldens import trl_releases as releases
from goldens.processor import note
from parity.padded import pack, pad, precision
from parity.trl_generation import Processes, evaluation_share
from torch import Tensor, nn

from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS

FILES = {"trl": "grpo", "trl-rloo": "rloo"}
TAKEN = ("scale_rewards", "reward_weights", "epsilon", "epsilon_high", "temperature")


class Release:
    """The functions of one release's trainer."""

    def __init__(self, repository: str, trainer: str, release: str) -> None:
        self.at = parse_version(release)
        self.functions: dict[str, ast.FunctionDef] = {}
        self.names = {"torch": torch, "math": math, "nn": nn, "warnings": warnings, "gather": None}
        self.static: set[str] = set()
        self.detached: set[str] = set()
        self.compiled: dict[tuple[int, ...], types.CodeType] = {}
        for file in ("trl/trainer/utils.py", f"trl/trainer/{FILES[trainer]}_trainer.py"):
            command = ["git", f"--git-dir={repository}", "show", f"v{release}:{file}"]
            tree = ast.parse(subprocess.run(command, capture_output=True, check=True).stdout.decode())
            bodies = [tree.body] + [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
            for function in (node for body in bodies for node in body if isinstance(node, ast.FunctionDef)):
                if any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list):
                    self.static.add(function.name)
                if any("no_grad" in ast.unparse(each) for each in function.decorator_list):
                    self.detached.add(function.name)
                function.decorator_list = []
                self.functions[function.name] = function
        for name, function in self.functions.items():
            if name in ("nanstd", "nanmin", "nanmax", "get_high_entropy_mask", "get_sapo_token_loss"):
                self._define(function)

    def _define(self, function: ast.FunctionDef) -> None:
        future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
        module = ast.fix_missing_locations(ast.Module([future, function], []))
        exec(compile(module, function.name, "exec"), self.names)
        if function.name in self.detached:
            self.names[function.name] = torch.no_grad()(self.names[function.name])

    def method(self, name: str, trainer: SimpleNamespace):
        """A function bound to a trainer."""
        if name not in self.names:
            self._define(self.functions[name])
        found = self.names[name]
        return found if name in self.static else MethodType(found, trainer)

    def statements(self, name: str) -> list[ast.stmt]:
        return self.functions[name].body

    @cache  # noqa: B019 - one release at a time
    def rewards(self, name: str) -> list[ast.stmt]:
        """The statements of a function between the rewards and the end of a generation."""
        return reward_statements(self.statements(name))

    def run(self, statements: list[ast.stmt], given: dict) -> dict:
        """Run statements of a function with these variables, and return all of them."""
        scope, key = {**self.names, **given}, tuple(map(id, statements))
        if key not in self.compiled:
            self.compiled[key] = compile(ast.fix_missing_locations(ast.Module(statements, [])), "statements", "exec")
        exec(self.compiled[key], scope)
        return scope


def assigns(statement: ast.stmt, *names: str) -> bool:
    for node in ast.walk(statement):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            inner = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(inner, ast.Name) and inner.id in names:
                return True
    return False


def reward_statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """From the gathered rewards to the metrics of the generation, without what is about texts."""
    last = max(place for place, statement in enumerate(body) if assigns(statement, "rewards_per_func"))
    # 0.14 goes on to the loss.
    end = next((place for place, one in enumerate(body) if assigns(one, "per_token_loss")), len(body))
    chosen = body[last + 1 : max(end, last + 1)]
    if end < len(body):
        chosen += [one for one in body[end:] if "reward" in ast.unparse(one) or "completion_length" in ast.unparse(one)]
    texts = ("_logs", "log_completions", "_pending", "return ", "output", "warn", "images", "mean_delta")
    return [one for one in chosen if not any(text in ast.unparse(one) for text in texts)]


def nested(body: list[ast.stmt], *names: str) -> ast.stmt:
    """The innermost `if` that assigns a name."""
    found = [
        node for statement in body for node in ast.walk(statement) if isinstance(node, ast.If) and assigns(node, *names)
    ]
    return min(found, key=lambda node: len(ast.unparse(node)))


def stub(entry: tuple, processes: Processes, rank: int, training: bool, metrics: dict) -> SimpleNamespace:
    """The attributes of a trainer that its functions read."""
    name, release, _, _, options = entry
    spec = TRAINERS[name]
    at = parse_version(release)
    config = resolve(spec.options, at, [Layer("test", options)], trainer=name)
    known = {option: setting.value for option, setting in config.settings.items()}
    low, high = known["epsilon"], known["epsilon_high"]
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        process_index=rank,
        num_processes=processes.count,
        gather=processes.gather,
        gather_for_metrics=processes.gather,
        reduce=processes.reduce,
        pad_across_processes=lambda value, dim, pad_index: torch.cat(
            [value, value.new_full((4096 - len(value),), pad_index)]
        ),
        sync_gradients=True,
    )
    scale = {"none": False, "group": True}.get(known.get("scale_rewards"))
    return SimpleNamespace(
        **{key: value for key, value in known.items() if key not in TAKEN},
        accelerator=accelerator,
        args=SimpleNamespace(**known | {"scale_rewards": scale if at < (0, 22) else known.get("scale_rewards")}),
        scale_rewards=scale if at < (0, 22) else known.get("scale_rewards"),
        reward_weights=torch.tensor(options.get("reward_weights", [1.0, 1.0]), dtype=torch.get_default_dtype()),
        reward_funcs=[SimpleNamespace(__name__="f0"), SimpleNamespace(__name__="f1")],
        reward_func_names=["f0", "f1"],
        epsilon_low=low,
        epsilon_high=low if high is None else high,
        tools=None,
        aux_loss_enabled=False,
        model=SimpleNamespace(training=training),
        control=SimpleNamespace(should_evaluate=not training),
        state=SimpleNamespace(num_input_tokens_seen=0, global_step=0),
        current_gradient_accumulation_steps=options.get("gradient_accumulation_steps", releases.ACCUMULATION),
        _total_train_tokens=0,
        _entropy_bonus_enabled=known.get("entropy_coef", 0) != 0,
        _metrics=metrics if at >= (0, 16) else metrics["train" if training else "eval"],
        temperature=1.0,
    )


class Call:
    """One entry in one precision."""

    def __init__(self, code: Release, entry: tuple, dtype: torch.dtype) -> None:
        self.code, self.entry, self.dtype = code, entry, dtype
        trainer, release, case, _, options = entry
        self.options = options
        batch = releases.batch_of(trainer, case, release, options)
        self.with_old = releases.has_old(trainer, options)
        self.batch = batch
        self.training = batch.split == "train"
        self.micro_N, self.rank_N = batch.per_row["micro_batch_id"], batch.per_row["rank"]
        self.cells = {name: pad(batch, column, dtype) for name, column in batch.per_token.items()}
        self.cells.setdefault("old_log_probs", self.cells["policy_log_probs"])
        self.mask = pad(batch, batch.column("response_mask"), torch.int64)
        self.before = pad(batch, batch.column("response_mask_pre"), torch.int64)
        self.metrics: dict[str, list[list[float]]] = defaultdict(list)
        self.size = len(batch) // len(batch.groups)

    def _ranks(self, rows_N: Tensor, action, metrics_of: str) -> None:
        """Call `action` on every rank of some rows, twice: the second time all know what the others told."""
        ranks = self.rank_N.unique().tolist()
        processes = Processes(len(ranks))
        self.code.names["gather"] = processes.gather
        for _ in range(2):
            for rank in ranks:
                processes.place = 0
                metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
                trainer = stub(self.entry, processes, rank, self.training, metrics)
                trainer.num_generations = trainer.num_generations_eval = self.size
                trainer.max_completion_length = releases.WIDTH
                trainer.args.steps_per_generation = releases.ACCUMULATION
                action(trainer, rows_N & (self.rank_N == rank), rank)
        # Every rank logs what all of them found.
        for name, values in metrics["train" if self.training else "eval"].items():
            self.metrics[name] += values

    def advantages(self) -> Tensor:
        """Advantages of all rows; the metrics of the generation are kept."""
        found_N = torch.zeros(len(self.batch), dtype=torch.float64)
        by_itself = self.code.at < (0, 17) or not self.training
        parts = [self.micro_N == micro for micro in (0, 1)] if by_itself else [self.micro_N >= 0]
        rewards = torch.stack(list(self.batch.rewards.values()), 1).to(self.dtype)
        host = {14: "compute_loss", 15: "_prepare_inputs"}.get(self.code.at[1] if self.code.at[0] == 0 else 0)
        statements = self.code.rewards(host or "_generate_and_score_completions")
        ended_N = torch.tensor([status == "stop" for status in self.batch.statuses])
        for part_N in parts:

            def action(trainer: SimpleNamespace, here_N: Tensor, rank: int, part_N: Tensor = part_N) -> None:
                lengths = self.before[here_N].sum(1)
                order_N = torch.cat([(part_N & (self.rank_N == each)).nonzero().squeeze(1) for each in (0, 1)])
                given = {
                    "self": trainer,
                    "device": torch.device("cpu"),
                    "mode": "train" if self.training else "eval",
                    "prompts": [""] * int(here_N.sum()),
                    "rewards_per_func": rewards[order_N] if self.code.at >= (0, 15) else rewards[here_N],
                    "completion_mask": self.mask[here_N],
                    "attention_mask": self.mask[here_N],
                    "completion_lengths": lengths,
                    "agg_completion_lengths": self.before[order_N].sum(1),
                    "is_eos": ended_N[here_N][:, None],
                    "old_per_token_logps": self.cells["old_log_probs"][here_N],
                    "ref_per_token_logps": self.cells["ref_log_probs"][here_N],
                    "PreTrainedModel": nn.Module,
                }
                scope = self.code.run(statements, given)
                found_N[here_N] = scope["advantages"].double()

            self._ranks(part_N, action, "generation")
        return found_N

    def sampler(self, metrics: bool) -> None:
        """The weights against the sampler, kept for the loss, and their metrics."""
        body = self.code.statements("_generate_and_score_completions")
        names = ("importance_sampling_ratio", "vllm_importance_sampling_ratio")
        found = [one for one in ast.walk(ast.Module(body, [])) if isinstance(one, ast.If) and assigns(one, *names)]
        weighing = max(found, key=lambda one: len(ast.unparse(one)))
        measuring = next(one for one in body if isinstance(one, ast.If) and assigns(one, "mean_delta"))
        self.ratio = torch.ones_like(self.cells["old_log_probs"])
        by_itself = not self.training
        for part_N in [self.micro_N == micro for micro in (0, 1)] if by_itself else [self.micro_N >= 0]:

            def action(trainer: SimpleNamespace, here_N: Tensor, rank: int) -> None:
                given = {
                    "self": trainer,
                    "device": torch.device("cpu"),
                    "mode": "train" if self.training else "eval",
                    "old_per_token_logps": self.cells["old_log_probs"][here_N],
                    "sampling_per_token_logps": self.cells["rollout_log_probs"][here_N],
                    "completion_mask": self.mask[here_N],
                    "tool_mask": None,
                }
                scope = self.code.run([weighing, measuring], given)
                ratio = next(scope[name] for name in reversed(names) if name in scope)
                self.ratio[here_N] = ratio.expand_as(self.ratio[here_N])
                self.per_row = ratio.shape[1] == 1

            self._ranks(part_N, action, "sampling")

    def loss(self, advantage_N: Tensor) -> tuple[float, Tensor]:
        """Loss of the step and its gradient; the metrics of the update are kept."""
        leaf = self.cells["policy_log_probs"].clone().requires_grad_()
        total = torch.zeros((), dtype=self.dtype)
        at, options = self.code.at, self.options
        scaled = at >= (0, 22) and self.entry[0] == "trl"
        items = self.before if at < (1, 9) else self.mask
        for micro in (0, 1):
            part_N, losses = self.micro_N == micro, []

            def action(trainer: SimpleNamespace, here_N: Tensor, rank: int, part_N=part_N, losses=losses) -> None:
                policy, entropy = leaf[here_N], self.cells["entropy"][here_N]
                outputs = (policy, entropy, None) if at >= (1, 7) else (policy, entropy)
                ref = self.cells["ref_log_probs"][here_N]
                # 0.18 asks for the log-probs of the reference in the loss.
                trainer.ref_model = "reference"
                trainer._get_per_token_logps = lambda model, *_, **__: ref if model == "reference" else policy
                trainer._get_per_token_logps_and_entropies = lambda *_, **__: outputs
                for name in (
                    "get_high_entropy_mask",
                    "get_off_policy_mask",
                    "get_gamma_weights",
                    "get_sapo_token_loss",
                ):
                    if name in self.code.functions:
                        setattr(trainer, name, self.code.method(name, trainer))
                trainer.beta = options["beta"]
                ids = torch.zeros_like(self.mask[here_N])
                old = self.cells["old_log_probs"][here_N]
                inputs = {
                    "prompt_ids": ids[:, :1],
                    "prompt_mask": ids[:, :1] + 1,
                    "completion_ids": ids,
                    "completion_mask": self.mask[here_N],
                    "advantages": advantage_N[here_N].to(self.dtype),
                    "ref_per_token_logps": ref,
                    "num_items_in_batch": items.sum() if self.training else items[part_N].sum(),
                    "old_logps": (old * self.mask[here_N]).sum(1),
                }
                if self.with_old:
                    inputs["old_per_token_logps"] = old
                elif at < (0, 20):
                    inputs["old_per_token_logps"] = None
                if options.get("use_vllm"):
                    ratio = self.ratio[here_N]
                    inputs["importance_sampling_ratio"] = ratio[:, :1] if self.per_row else ratio
                    if at >= (0, 27, 1):
                        inputs["sampling_per_token_logps"] = self.cells["rollout_log_probs"][here_N]
                losses.append(self._call(trainer, inputs, policy))

            self._ranks(part_N, action, "update")
            # The trainer divides by the micro-batches of an optimizer step, or the Trainer below it does.
            # A line of the log is the mean over the optimizer steps of a generation.
            is_step = options.get("gradient_accumulation_steps") == 1
            outside = 1.0 if scaled and not is_step else 1 / releases.ACCUMULATION
            share = outside if self.training else evaluation_share(self.batch, micro)
            # The data-parallel wrapper averages over ranks.
            total = total + sum(losses[len(losses) // 2 :]) / (len(losses) // 2) * share
        total.backward()
        return total.item(), pack(self.batch, leaf.grad)

    def _call(self, trainer: SimpleNamespace, inputs: dict, policy: Tensor) -> Tensor:
        if self.code.at >= (0, 15):
            name = "_compute_loss" if "_compute_loss" in self.code.functions else "compute_loss"
            return self.code.method(name, trainer)(None, inputs)
        body = self.code.statements("compute_loss")
        first = next(place for place, one in enumerate(body) if assigns(one, "per_token_loss"))
        before = [one for one in body if assigns(one, "per_token_kl")]
        after = [one for one in body[first:-1] if "reward" not in ast.unparse(one)]
        given = {
            "self": trainer,
            "per_token_logps": policy,
            "ref_per_token_logps": inputs["ref_per_token_logps"],
            "advantages": inputs["advantages"],
            "completion_mask": inputs["completion_mask"],
        }
        after = [one for one in after if "completion_length" not in ast.unparse(one)]
        return self.code.run(before + after, given)["loss"]


def log_mean(values: list[float], at: tuple[int, ...]) -> float:
    """As the release's `log` averages them."""
    known = [value for value in values if not math.isnan(value)] if at >= (1, 0) else values
    return sum(known) / len(known) if known else math.nan


def results(code: Release, entry: tuple) -> dict[str, list[float]]:
    """Everything that one entry gives, in both precisions."""
    found = {}
    for name, dtype in (("f32", torch.float32), ("f64", torch.float64)):
        with precision(dtype):
            call = Call(code, entry, dtype)
            advantage_N = call.advantages()
            if entry[4].get("use_vllm"):
                call.sampler(metrics=True)
            loss, grad_T = call.loss(advantage_N)
        found[f"{name}/advantages"] = advantage_N.tolist()
        found[f"{name}/loss"] = [loss]
        found[f"{name}/grad"] = [*releases.projections(grad_T).tolist(), float(grad_T.double().abs().sum())]
        names = sorted(set(call.metrics) - {"num_tokens"})
        found[f"{name}/metrics"] = [log_mean(call.metrics[each], code.at) for each in names]
        found["names"] = names
    return found


def store(file: Path, found: dict[str, dict[str, list]]) -> None:
    """Write results by entry; lists of numbers that recur are written once."""
    blocks: dict[str, tuple[int, int]] = {}
    values: list[float] = []
    index: dict[str, dict[str, object]] = {}
    for entry, lists in found.items():
        places = {}
        for name, numbers in lists.items():
            text = json.dumps(numbers)
            if name != "names" and text not in blocks:
                blocks[text] = (len(values), len(numbers))
                values += numbers
            places[name] = numbers if name == "names" else blocks[text]
        index[entry] = places
    text = np.frombuffer(json.dumps(index, separators=(",", ":")).encode(), dtype=np.uint8)
    np.savez_compressed(file, values=np.array(values), index=text)
    note(file)
    print(len(index), "entries,", len(values), "numbers,", file.stat().st_size, "bytes")


def main(repository: str) -> None:
    """Write the file."""
    torch.set_num_threads(1)
    codes: dict[tuple[str, str], Release] = {}
    found = {}
    for entry in releases.entries():
        if entry[:2] not in codes:
            codes[entry[:2]] = Release(repository, *entry[:2])
        found["/".join(entry[:4])] = results(codes[entry[:2]], entry)
    store(releases.FILE, found)


if __name__ == "__main__":
    main(sys.argv[1])
