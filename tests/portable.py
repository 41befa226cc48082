"""Run the tests as another processor would: `portable.py LEVEL [pytest options]`.

torch, numpy and MKL choose their instructions when they start, and `exp` and sums differ in the last digit between
them. Their switches stand for other processors: `lowest` is what every x86-64 has (and MKL's is what it takes on
processors of other makers), `avx2` is without AVX-512, `native` is this machine as it is. `random-order` is any
processor and any library: the terms of every sum come in a random order (`random_order.py`).
"""

import os
import sys
from pathlib import Path

LEVELS = {
    "lowest": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"},
    "native": {},
    "random-order": {},
}
AVX2 = ("X86_V2", "X86_V3", "AVX2", "FMA3")
"""Names under which numpy lists what a processor with AVX2 has."""


def disabled(level: str) -> str:
    """What numpy found on this machine and is to do without."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    found = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
    return " ".join(name for name in found if level == "lowest" or name not in AVX2)


def main() -> None:
    """Set the switches and become pytest."""
    level, *options = sys.argv[1:]
    environment = os.environ | LEVELS[level]
    if level == "random-order":
        options += ["-p", "random_order"]
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(Path(__file__).parent), environment.get("PYTHONPATH")))
        )
    elif level != "native" and disabled(level):
        environment["NPY_DISABLE_CPU_FEATURES"] = disabled(level)
    chosen = [f"{name}={environment[name]}" for name in sorted(environment.keys() - os.environ)]
    print(f"at {level}: {', '.join(chosen) or 'nothing switched off'}")
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "pytest", *options], environment)


if __name__ == "__main__":
    main()
