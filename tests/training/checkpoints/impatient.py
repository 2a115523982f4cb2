"""train.py with short waits for a bucket: before the last retry, and for the end of another job's lease.

SLOW_STEP: seconds by which each step is longer. BUCKET_SECONDS: of retries, 2 by default. DOWNLOADS: folder for token
files. FAILS: set: each upload fails, as no client library should.
"""

import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import train
from common import bucket
from training import loop
from training.checkpoints import bucket_upload
from training.data import locate_tokens

bucket.RETRY_SECONDS = float(os.environ.get("BUCKET_SECONDS", "2"))
bucket.REQUEST_SECONDS = max(bucket.REQUEST_SECONDS, bucket.RETRY_SECONDS)  # the server's machine may be busy
bucket_upload.RENEW_SECONDS, bucket_upload.EXPIRY_SECONDS, bucket_upload.LEASE_POLL_SECONDS = 0.3, 2.0, 0.1
locate_tokens.DOWNLOADS = Path(os.environ.get("DOWNLOADS", locate_tokens.DOWNLOADS))
plain_step, plain_upload = loop.train_step, bucket.Bucket.upload


def step(*arguments: Any) -> Any:
    time.sleep(float(os.environ.get("SLOW_STEP", "0")))
    return plain_step(*arguments)


def upload(self: bucket.Bucket, name: str, file: BinaryIO) -> None:
    if "FAILS" in os.environ:
        raise RuntimeError("no reason")
    plain_upload(self, name, file)


loop.train_step = step
bucket.Bucket.upload = upload  # type: ignore[method-assign]
train.leave(train.main())
