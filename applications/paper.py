"""The numbers of the paper's tables, and the names of its columns."""

from __future__ import annotations

from collections.abc import Mapping

# Rows are tasks, columns are methods. The paper's Bayesian optimization used Gaussian processes.
COLUMNS = {
    "fixed": "fixed",
    "fixed_noise": "fixed, noise",
    "grid_search": "grid",
    "random_search": "RS",
    "gp": "BO (GP)",
    "tpe": "BO (TPE)",
    "cmaes": "CMA-ES",
    "stn": "STN",
    "centered_stn": "Centered STN",
    "delta_stn_paper": "Δ-STN (paper)",
    "delta_stn": "Δ-STN",
}
_TABLE = ("random_search", "gp", "stn", "centered_stn", "delta_stn_paper")
Pair = tuple[float, float]
# Validation and test losses; perplexities for text.
PAPER: Mapping[str, tuple[str, Mapping[str, Pair]]] = {
    name: ("tab:classification", dict(zip(_TABLE, pairs, strict=True)))
    for name, pairs in {
        "mnist": ((0.043, 0.042), (0.042, 0.043), (0.043, 0.041), (0.041, 0.039), (0.040, 0.038)),
        "fashion": ((0.206, 0.214), (0.217, 0.215), (0.196, 0.218), (0.191, 0.212), (0.189, 0.209)),
        "alexnet": ((0.631, 0.671), (0.594, 0.598), (0.474, 0.488), (0.431, 0.450), (0.425, 0.446)),
        "vgg16": ((0.566, 0.595), (0.421, 0.446), (0.330, 0.354), (0.286, 0.321), (0.272, 0.296)),
        "resnet18": ((0.264, 0.298), (0.230, 0.267), (0.266, 0.312), (0.222, 0.258), (0.204, 0.238)),
        "ptb": ((84.81, 81.46), (72.13, 69.29), (70.67, 67.78), (69.40, 66.67), (68.63, 66.26)),
    }.items()
} | {
    "mnist, input dropout only": (
        "tab:dropout-rate",
        {
            "fixed": (0.059, 0.054),
            "fixed_noise": (0.057, 0.059),
            "stn": (0.058, 0.058),
            "delta_stn_paper": (0.053, 0.054),
        },
    )
}
# In percent.
PAPER_ACCURACY: Mapping[str, tuple[str, Mapping[str, Pair]]] = {
    "alexnet": ("tab:acc", {"stn": (83.96, 83.38), "delta_stn_paper": (85.63, 85.19)}),
    "vgg16": ("tab:acc", {"stn": (89.22, 88.66), "delta_stn_paper": (90.96, 90.26)}),
    "resnet18": ("tab:acc", {"stn": (91.51, 90.16), "delta_stn_paper": (93.46, 92.55)}),
}
