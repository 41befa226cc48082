"""The kernel without a GPU: its numbers in Triton's interpreter, and its machine code for two GPUs."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from evaluation.cases import objective_of, with_fixes, with_pi
from evaluation.interpreter import run_tests

from rolloutdoctor.evaluation import tokens
from rolloutdoctor.evaluation.evaluate import evaluate_all
from rolloutdoctor.testing import random_batch

triton = pytest.importorskip("triton", reason="Triton is not installed")

compiles = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing (TRITON_INTERPRET=1)"
)


def test_in_the_interpreter():
    """Its sums, and what a simulated GPU evaluates with it."""
    run_tests(*(Path(__file__).parents[1] / room / "interpreted.py" for room in ("evaluation", "simulated")))


class Absent:
    """A GPU of some capability that is not there: Triton compiles for it, and launches nothing."""

    def __init__(self, capability):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Gives the machine code of every launch that an evaluation makes, as it would be on a GPU of some capability."""
    from rolloutdoctor.evaluation.cuda import kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens.fused, "is_taken", lambda batch, kernel: kernel == "triton")
    original = kernel.token_sums

    def of(batch, objectives, dtype, capability):
        found = []

        class Launches:
            def __getitem__(self, grid):
                return lambda *given, **options: found.append(original.warmup(*given, grid=grid, **options))

        monkeypatch.setattr(kernel, "token_sums", Launches())
        original.device_caches.clear()
        monkeypatch.setattr(triton.runtime.driver, "_active", Absent(capability))
        evaluate_all(batch, objectives, dtype=dtype, kernel="triton")
        return [each.asm for each in found]

    return of


def resources(cubin, folder):
    """Registers of a thread, and the bytes of memory that it spills to."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (folder / "kernel.cubin").write_bytes(cubin)
    words = [cuobjdump, "--dump-resource-usage", folder / "kernel.cubin"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK", "LOCAL"))


@compiles
@pytest.mark.parametrize(
    ("run", "dtype", "capability"),
    # The GPUs by turns: each gets every run and both types.
    [
        (run, dtype, (80, 90)[(place + double) % 2])
        for place, run in enumerate(["trl", "trl bnpo, delta", "verl low_var_kl"])
        for double, dtype in enumerate([torch.float32, torch.float64])
    ],
)
def test_it_compiles_without_spills(run, dtype, capability, compiled, tmp_path):
    objective, batch = objective_of(run), random_batch(0, dtype=dtype)
    for objectives, columns in (({"": objective}, batch), (with_fixes(objective), with_pi(batch))):
        launches = compiled(columns, objectives, dtype, capability)
        assert launches
        for asm in launches:
            assert f".target sm_{capability}" in asm["ptx"]
            assert asm["cubin"][:4] == b"\x7fELF"
            registers, *spilled = resources(asm["cubin"], tmp_path)
            assert 16 < registers < 256
            assert spilled == [0, 0]


@compiles
@pytest.mark.parametrize("columns", [torch.float16, torch.bfloat16, torch.float64])
def test_columns_of_other_types_compile(columns, compiled):
    """In a step of one row, where Triton makes a constant of it."""
    batch = random_batch(0, sizes=(1,), empty=0.0, dtype=columns)
    assert len(compiled(batch, with_fixes(objective_of("trl kl")), torch.float32, 90)) == 1
