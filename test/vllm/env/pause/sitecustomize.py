"""Lets the processes of one vLLM wait for each other asleep, where there are more of them than cores.

vLLM's processes look for work without rest for a second behind each step and give up only their time slice meanwhile
(vllm/distributed/utils.py, sched_yield). Nine of them on two cores leave everybody else without a turn for seconds.
"""

import os
import time


def _pause() -> None:
    time.sleep(0.0005)


os.sched_yield = _pause
