"""`python launch.py …`: sglang.launch_server on a CPU torch, for tests.

PyPI's torchvision cannot load its C++ part beside a CPU torch, and its Python part then fails while it registers fakes
for two operators. Declaring the two is all that it needs. Spawned children run this file again, which is intended.
"""

import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if __name__ == "__main__":
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__")
