"""Repeat the tables of this folder that are kept as numbers, and compare them with the last record.

python benchmarks/record.py            # what make bench does: measure, and print new / old
python benchmarks/record.py --keep     # and make what was measured the new record

A record is a JSON file in docs/results with the numbers, the versions and the machine. Times are shares of a plain step
that is measured in the same turns, so that records of different machines can be compared with care.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "results"
TABLES = {"hypergradients": ["--rounds", "9"], "overhead": ["--repeats", "5"]}
"""The benchmarks that keep records, and what they are called with here."""
PACKAGES = ("numpy", "betty-ml", "boat-torch", "higher", "torchopt", "jax", "jaxopt")
NOISE = 1.15
"""Ratios above this, or below its inverse, are marked."""


def save(path: Path, numbers: Mapping[str, float]) -> None:
    """Write a record.

    Args:
        path: Of the JSON file.
        numbers: By names such as ``"mlp / bilevel CG / time"``.
    """
    record = {"made": time.strftime("%Y-%m-%d"), "machine": machine(), "versions": versions(), "numbers": dict(numbers)}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    found = Path("/proc/cpuinfo")
    models = [line for line in found.read_text().splitlines() if "model name" in line] if found.exists() else []
    model = models[0].split(":")[1].strip() if models else platform.processor()
    return {"processor": model, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}


def versions() -> dict[str, str]:
    """Of everything that takes part; the commit of bilevel if there is a repository."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found | ({"bilevel": commit} if commit else {})


def compared(old: Mapping[str, float], new: Mapping[str, float]) -> list[str]:
    """Lines of new over old, for all numbers that both have; what differs by more than noise is marked."""
    lines = []
    for name in [name for name in old if name in new]:
        if "error" in name or old[name] == 0:
            continue
        ratio = new[name] / old[name]
        mark = "  slower" if ratio > NOISE else "  faster" if ratio < 1 / NOISE else ""
        lines.append(f"{name:60} {old[name]:9.2f} -> {new[name]:9.2f}   {ratio:5.2f}{mark}")
    return lines


def main() -> None:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="make what is measured the new record")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    options = parser.parse_args()
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            path, kept = Path(folder, "new.json"), RESULTS / f"{name}.json"
            command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(path), *TABLES[name]]
            started = time.perf_counter()
            subprocess.run(command, check=True)
            print(f"{name}: {(time.perf_counter() - started) / 60:.1f} minutes")
            new = json.loads(path.read_text(encoding="utf-8"))
            if kept.exists():
                old = json.loads(kept.read_text(encoding="utf-8"))
                print(f"\n{name}: new over old, of {old['made']}, {old['machine']['processor']}")
                print("\n".join(compared(old["numbers"], new["numbers"])) + "\n")
            else:
                print(f"{name}: no record to compare with; --keep makes this one")
            if options.keep:
                kept.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    main()
