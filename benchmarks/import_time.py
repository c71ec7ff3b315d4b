"""How much longer than ``import torch`` does ``import bilevel`` take? Fresh processes, interleaved, best of several.

python benchmarks/import_time.py
"""

from __future__ import annotations

import subprocess
import sys
import time

ROUNDS = 5


def seconds(statement: str) -> float:
    """Run a statement in a fresh interpreter."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - started


def main() -> None:
    """Print the best times and their difference."""
    times: dict[str, list[float]] = {"import torch": [], "import torch, bilevel": []}
    for _ in range(ROUNDS):
        for statement, measured in times.items():
            measured.append(seconds(statement))
    torch_only, both = (min(measured) for measured in times.values())
    print(f"import torch {torch_only:.2f} s; with bilevel {both:.2f} s; difference {both - torch_only:.2f} s")


if __name__ == "__main__":
    main()
