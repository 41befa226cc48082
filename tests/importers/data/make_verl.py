"""Make `verl/`: rollout dumps that the real `_log_rollout_data` and `_write_generations` of verl 0.9.1 wrote.

    python tests/importers/data/make_verl.py

Both trainers are asked to dump without being built: their tokenizer and, for V1, the TransferQueue are stand-ins, and
packages that only a server needs are stubbed. The rows are random.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch

HERE = Path(__file__).parent / "verl"
SERVERS = {"aiohttp", "fastapi", "openai", "prometheus_client", "sglang", "transfer_queue", "uvicorn", "vllm", "zmq"}
METHODS = (
    "_dump_generations",
    "_init_dump_executor",
    "_log_rollout_data",
    "_shutdown_dump_executor",
    "_write_generations",
)


class Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in SERVERS else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__, module.__file__ = [], spec, spec.name, None
        return module

    def exec_module(self, module):
        pass


class Letters:
    """A tokenizer whose tokens are letters."""

    pad_token_id = 0

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(96 + int(each)) for each in ids if int(each) > 0)

    def batch_decode(self, rows, skip_special_tokens=True):
        return [self.decode(row) for row in rows]


class Nested:
    def __init__(self, values):
        self.values = values

    def to_padded_tensor(self, padding):
        return self.values


class Objects(list):
    def tolist(self):
        return list(self)


def unbuilt(cls, step):
    """An object with the dump methods of a trainer and nothing else."""
    trainer = SimpleNamespace(tokenizer=Letters(), global_steps=step)
    for name in METHODS:
        method = vars(cls)[name]
        is_static = isinstance(method, staticmethod)
        setattr(trainer, name, method.__func__ if is_static else types.MethodType(method, trainer))
    trainer._init_dump_executor()
    return trainer


def rows(step):
    draw = torch.Generator().manual_seed(step)
    prompts = torch.randint(1, 26, (3, 4), generator=draw).repeat_interleave(4, 0)
    responses = torch.randint(1, 26, (12, 6), generator=draw)
    scores = torch.zeros(12, 6)
    scores[:, -1] = (torch.rand(12, generator=draw) < 0.5).float()
    return prompts, responses, scores, torch.randperm(12, generator=draw)


def make_v0():
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    for step in (1, 2, 3):
        trainer = unbuilt(RayPPOTrainer, step)
        prompts, responses, scores, order = rows(step)
        batch = DataProto.from_single_dict(
            {
                "prompts": prompts[order],
                "responses": responses[order],
                "token_level_scores": scores[order],
                "reward_model": np.array([{"ground_truth": "7"}] * 12, dtype=object),
            }
        )
        trainer._log_rollout_data(batch, {"acc": scores.sum(-1)[order].numpy()}, {}, str(HERE / "v0"))
        trainer._shutdown_dump_executor()


def make_v1():
    from verl.trainer.ppo.v1 import trainer_base

    classes = [each for each in vars(trainer_base).values() if isinstance(each, type)]
    cls = next(each for each in classes if "_log_rollout_data" in vars(each))
    for step in (1, 2, 3):
        trainer = unbuilt(cls, step)
        prompts, responses, scores, _ = rows(step)
        keys = [f"p{step}_{row // 4}_{row % 4}_0" for row in range(12)]
        data = {
            "uid": Objects(keys),
            "prompts": Nested(prompts),
            "responses": Nested(responses),
            "rm_scores": scores,
            "reward_model": Objects([{"ground_truth": "7"}] * 12),
        }
        trainer_base.tq = SimpleNamespace(kv_batch_get=lambda keys, partition_id, select_fields, data=data: data)
        trainer._log_rollout_data(SimpleNamespace(keys=keys, partition_id="train"), {}, str(HERE / "v1"))
        trainer._shutdown_dump_executor()


def make_log():
    os.environ["VERL_FILE_LOGGER_PATH"] = str(HERE / "file_logger.jsonl")
    from verl.utils.tracking import FileLogger

    logger = FileLogger("project", "experiment")
    for step in (1, 2, 3):
        logger.log({"actor/kl_loss": 0.125 * step, "actor/pg_loss": 0.0, "critic/score/mean": 0.5}, step)
    logger.finish()


if __name__ == "__main__":
    sys.meta_path.append(Stub())
    for folder in ("v0", "v1"):
        (HERE / folder).mkdir(parents=True, exist_ok=True)
    make_v0()
    make_v1()
    make_log()
