"""What torchrun starts, and the benchmarks of several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import missing

import bilevel

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
ROOT = Path(bilevel.__file__).parents[1]
SCRIPT = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import bilevel

torch.manual_seed(0)
folder, batch = sys.argv[1], int(sys.argv[2])
os.makedirs(folder, exist_ok=True)
net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
x = torch.randn(41, 3, dtype=torch.float64)
data = TensorDataset(x, (x.sum(1) > 0).long())
train, valid = (DataLoader(torch.utils.data.Subset(data, part), batch) for part in (range(24), range(24, 41)))
result = bilevel.tune(
    net, train, valid, loss=nn.functional.cross_entropy, weight_decay=True, method="implicit_identity", steps=5,
    evaluate_every=1, checkpoint=f"{folder}/run.pt", progress=False, dropout=False,
)
net.load_state_dict(result.best.state_dict)
found = {name: float(value) for name, value in result.hyper.items()}
found |= {"validation_loss": result.best.validation_loss, "weights": sum(float(p.sum()) for p in net.parameters())}
print("|" + json.dumps(found | {"rank": os.environ.get("RANK", "")}) + "|", flush=True)
"""


def command(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_torchrun_goes_on_after_a_death() -> None:
    assert "1 of 1 jobs with 1 deaths" in command("benchmarks/elastic.py", "--jobs", "1", "--deaths", "1")


@pytest.mark.slow
def test_torchrun_goes_on_after_many_deaths() -> None:
    command("benchmarks/elastic.py", "--jobs", "20", "--deaths", "3")


def test_torchrun_takes_the_script_of_one_process(tmp_path: Path) -> None:
    """``tune`` as in one process: one run, one λ, the same in all of them; process 0 alone prints and writes."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    alone = command(str(script), str(tmp_path / "alone"), "12").split("|")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    pair = command(*launch, str(script), str(tmp_path / "pair"), "6").split("|")
    first, second = (json.loads(text) for text in pair if text.startswith("{"))
    (expected,) = (json.loads(text) for text in alone if text.startswith("{"))
    assert {first.pop("rank"), second.pop("rank")} == {"0", "1"}
    assert first == second
    assert len(list((tmp_path / "pair").glob("*.pt"))) == len(list((tmp_path / "alone").glob("*.pt"))) > 0
    for name, value in expected.items():
        if name != "rank":
            assert first[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.slow
def test_traffic_is_at_the_floor() -> None:
    for line in command("benchmarks/scaling.py").splitlines():
        words = line.split()
        if len(words) == 8 and words[1] in ("2", "4"):
            assert 1 <= float(words[4]) < 1.01, line
            assert 0.999 < float(words[7]) < 1.01, line
        if len(words) in (9, 10) and words[1] in ("2", "4"):  # divided weights
            for ratio in words[3::2]:
                assert 0.999 < float(ratio) < 1.01, line
