"""The kernel without a GPU: its numbers in Triton's interpreter, and its machine code for two GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rolloutdoctor.fused import sums as fused
from rolloutdoctor.objective import KlTerm, Surrogate

triton = pytest.importorskip("triton", reason="Triton is not installed")

DUAL = Surrogate(kind="ppo_dual_clip", clip_low=0.2, clip_high=0.2, cap=3.0, log_ratio_bound=20.0)
DELTA = Surrogate(kind="ppo_delta_clip", clip_low=0.2, clip_high=0.2, cap=2)
TERMS = {
    "verl": (DUAL, KlTerm(estimator="k3_clamped", coef=0.1)),
    "trl": (DELTA, KlTerm(estimator="k3", coef=0.1, ratio_weighted=True)),
    "no kl": (DELTA, None),
}
POINTERS = ("policy_ptr", "old_ptr", "ref_ptr", "kl_ptr", "pi_ptr", "values_ptr")
OFFSETS = ("rows_ptr", "chunks_ptr", "row_of_ptr")


def test_the_sums_in_the_interpreter():
    """Triton is told to interpret before it is imported, so this is a process of its own."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / "interpreted.py")]
    given = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=given)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def machine_code(rule, term, dtype, others, has_pi, capability):
    """The kernel as it is compiled for a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rolloutdoctor.fused import kernel

    given = {
        **fused.constants(rule, term, dtype),
        **{"ON_POLICY": False, "HAS_PI": has_pi, "KL_COLUMN": "policy", "OTHERS": others},
        **{"CHUNK": fused.CHUNK_TOKENS, "BLOCK": fused.tile(others)},
    }
    signature = {
        **dict.fromkeys(POINTERS, "*fp64" if dtype == torch.float64 else "*fp32"),
        **dict.fromkeys(OFFSETS, "*i64"),
        **{"mask_ptr": "*u8", "out_ptr": "*fp64", "rows": "i32", "objectives": "i32", "width": "i32"},
        **dict.fromkeys(given, "constexpr"),
    }
    ordered = {name: signature[name] for name in kernel.token_sums.arg_names}
    source = ASTSource(kernel.token_sums, ordered, given)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kernel.OPTIONS).asm


def resources(cubin, folder):
    """Registers of a thread, and the bytes of memory that it spills to."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (folder / "kernel.cubin").write_bytes(cubin)
    words = [cuobjdump, "--dump-resource-usage", folder / "kernel.cubin"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK", "LOCAL"))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", fused.TOGETHER)
@pytest.mark.parametrize("name", TERMS)
def test_it_compiles_without_spills(name, dtype, capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for others, has_pi in ((0, False), (fused.TOGETHER[dtype], True)):
        asm = machine_code(*TERMS[name], dtype, others, has_pi, capability)
        assert f".target sm_{capability}" in asm["ptx"]
        assert asm["cubin"][:4] == b"\x7fELF"
        registers, *spilled = resources(asm["cubin"], tmp_path)
        assert 16 < registers < 256
        assert spilled == [0, 0], (others, has_pi)
