import os

import torch
from hypothesis import HealthCheck, settings

settings.register_profile("dev", deadline=None, max_examples=25)
settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Tests run in parallel processes; one thread each is fastest for their small tensors.
torch.set_num_threads(1)
