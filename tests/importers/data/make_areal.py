"""Make `areal/`: trajectories that `WorkflowExecutor._dump_trajectory` of AReaL wrote.

    python tests/importers/data/make_areal.py CHECKOUT

CHECKOUT is a clone of inclusionAI/AReaL at 4aef98d8d. The method (areal/infra/workflow_executor.py) is the real one;
the batch is random, and what the module imports besides has stand-ins.
"""

import asyncio
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent / "areal"
SIZE = 4


def trajectory(draw, torch, version):
    lengths = torch.randint(4, 7, (SIZE,), generator=draw)
    place = torch.arange(6)
    return {
        "input_ids": torch.randint(5, 90, (SIZE, 6), generator=draw),
        "attention_mask": (place < lengths[:, None]).long(),
        "loss_mask": ((place >= 2) & (place < lengths[:, None])).long(),
        "rewards": torch.randint(0, 2, (SIZE,), generator=draw).float(),
        "versions": torch.tensor([[max(0, version - 1), version]]),
    }


class Opened:
    """`aiofiles.open`, which need not be installed."""

    def __init__(self, path, mode):
        self.file = Path(path).open(mode)  # noqa: SIM115  # closed by __aexit__

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        self.file.close()

    async def write(self, text):
        self.file.write(text)


async def made(path, exist_ok):
    Path(path).mkdir(parents=True, exist_ok=exist_ok)


async def dump(executor, torch):
    draw = torch.Generator().manual_seed(0)
    for version in range(3):
        for task in range(3):
            where = SimpleNamespace(
                config=None,
                inference_engine=None,
                logger=None,
                _get_dump_dir=lambda is_eval: str(HERE / ("eval-rollout" if is_eval else "rollout")),
                _get_tokenizer=lambda: SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids))),
            )
            one = trajectory(draw, torch, version)
            await executor._dump_trajectory(where, one, 3 * version + task, is_eval=version == 2 and task == 2)


if __name__ == "__main__":
    import torch
    from stubs import stub

    sys.path.insert(0, sys.argv[1])
    stub("areal.api", "areal.utils", "areal.infra.async_task_runner", "areal.infra.staleness_manager")
    stub("aiohttp", "areal.experimental", "httpx", "tenacity", "uvloop")
    sys.modules["aiofiles"] = SimpleNamespace(open=Opened, os=SimpleNamespace(makedirs=made))
    sys.modules["aiofiles.os"] = sys.modules["aiofiles"].os
    for name in ("areal", "areal.infra"):
        sys.modules[name] = type(sys)(name)
        sys.modules[name].__path__ = [f"{sys.argv[1]}/{name.replace('.', '/')}"]
    from areal.infra.workflow_executor import WorkflowExecutor

    # The writer appends.
    shutil.rmtree(HERE, ignore_errors=True)
    asyncio.run(dump(WorkflowExecutor, torch))
