"""Replay a tuned schedule in plain PyTorch: nothing here needs bilevel.

result.schedule().save("schedule.json")    # after bilevel.tune or bilevel.solve
replay(net, train_loader, "schedule.json", epochs=50)
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def replay(net: nn.Module, train: Iterable[Any], path: str | Path, epochs: int, lr: float = 0.1) -> None:
    """Train with SGD, with the dropout rates and the weight decay that were tuned."""
    schedule = json.loads(Path(path).read_text(encoding="utf-8"))
    params, groups = dict(net.named_parameters()), []
    for name, weights in schedule["weights"].items():
        groups.append({"params": [params.pop(weight) for weight in weights], "name": name})
    optimizer = torch.optim.SGD([*groups, {"params": [*params.values()], "name": "rest"}], lr=lr)
    batches = [batch for _ in range(epochs) for batch in train]
    net.train()
    for step, (x, y) in enumerate(batches):
        index = step * schedule["rounds"] // len(batches)  # the round whose values count
        now = {name: values[index] for name, values in schedule["values"].items()}
        for group in optimizer.param_groups:
            group["weight_decay"] = 2 * now.get(group["name"], 0.0)  # the penalty has no factor one half
        for name, modules in schedule["modules"].items():
            for module in modules:
                net.get_submodule(module).p = now[name]
        optimizer.zero_grad()
        F.cross_entropy(net(x), y, label_smoothing=now.get("label_smoothing", 0.0)).backward()
        optimizer.step()
