"""train.py with short waits for a bucket: for its answers, and for the end of another job's lease.

SLOW_STEP: seconds by which each step is longer.
"""

import os
import time
from typing import Any

import train
from common import bucket
from training import loop
from training.checkpoints import bucket_lease

bucket.RETRY_SECONDS, bucket.REQUEST_SECONDS = 2.0, 2.0
bucket_lease.RENEW_SECONDS, bucket_lease.EXPIRY_SECONDS, bucket_lease.POLL_SECONDS = 0.5, 3.0, 0.2
plain_step = loop.train_step


def step(*arguments: Any) -> Any:
    time.sleep(float(os.environ.get("SLOW_STEP", "0")))
    return plain_step(*arguments)


loop.train_step = step
train.leave(train.main())
