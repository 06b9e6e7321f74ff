"""Trains DFlash drafters for speculative decoding, with target threads and drafter threads of one process.

``python -m examples.dflash --help`` lists the commands. README.md beside this file has the picture.
"""

import os

# Inductor's own launcher holds the GIL while it loads and launches kernels. A drafter whose device waits for another
# one in a collective would keep the other's thread from ever coming to it; Triton's launcher lets other threads run.
# To be set before torch._inductor is imported.
os.environ.setdefault("TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER", "0")
