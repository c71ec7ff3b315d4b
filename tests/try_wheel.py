"""Run the Python of the README with the package that is installed: ``python tests/try_wheel.py README.md``.

It needs nothing but that package, so that a wheel can be tried in an environment of its own.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bilevel


def script():
    """What a reader of the README has already: a network, data and a loss.

    Returns:
        Names for the README's code.
    """
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    y = (x[:, :10] + 2 * torch.randn(64, 10)).argmax(1)
    net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))
    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "bilevel": bilevel,
        "net": net,
        "optimizer": torch.optim.AdamW(net.parameters(), weight_decay=0.0),
        "train_loader": DataLoader(TensorDataset(x[:32], y[:32]), batch_size=16, shuffle=True),
        "valid_loader": DataLoader(TensorDataset(x[32:], y[32:]), batch_size=32),
    }


def run_readme(readme):
    """Run every block of Python, in order, in an empty folder.

    Returns:
        The names that are left.
    """
    names = script()
    blocks = re.findall(r"```python\n(.*?)```", Path(readme).read_text(encoding="utf-8"), re.DOTALL)
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for block in blocks:
                exec(compile(block, str(readme), "exec"), names)
        finally:
            os.chdir(here)
    return names


if __name__ == "__main__":
    os.environ["CI"] = "1"  # no progress bars
    clone = Path(sys.argv[1]).resolve().parent
    package = Path(bilevel.__file__).resolve()
    if (clone / "bilevel") in package.parents:
        sys.exit(f"bilevel is that of the clone, {package}: run this from another folder.")
    left = run_readme(Path(sys.argv[1]).resolve())
    print(f"bilevel {bilevel.__version__} with torch {torch.__version__}: the README's code runs.")
    print({name: round(float(value.float().mean()), 6) for name, value in left["result"].hyper.items()})
