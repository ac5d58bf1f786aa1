"""Load what DeepSpeed compiles for two ranks of ZeRO with offload.

python tests/distributed/loading_operators.py
"""

import os

from indictune.config.plan import Launch
from indictune.distributed import zero

if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    zero.load_operators(Launch("zero2_offload", 2, deepspeed=offload))
