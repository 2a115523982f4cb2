"""A version of train.py that has slow phases, gives up quickly on failed bucket requests, and uses short leases.

Environment variables, in addition to those of slow.py:

BUCKET_SECONDS  for how long a failed request is retried; the default is 2
DOWNLOADS       the folder for downloaded token files
FAILS           if set, every upload fails with an error that no client library raises
"""

import os
import runpy
from pathlib import Path
from typing import BinaryIO

from common import bucket
from tests.training.supervision.runs import SLOW
from training.checkpoints import bucket_upload
from training.data import locate_tokens

bucket.RETRY_SECONDS = float(os.environ.get("BUCKET_SECONDS", "2"))
bucket.REQUEST_SECONDS = max(bucket.REQUEST_SECONDS, bucket.RETRY_SECONDS)  # the server's machine may be busy
bucket_upload.RENEW_SECONDS, bucket_upload.EXPIRY_SECONDS, bucket_upload.LEASE_POLL_SECONDS = 0.3, 2.0, 0.1
locate_tokens.DOWNLOADS = Path(os.environ.get("DOWNLOADS", locate_tokens.DOWNLOADS))
plain_upload = bucket.Bucket.upload


def upload(self: bucket.Bucket, name: str, file: BinaryIO) -> None:
    if "FAILS" in os.environ:
        raise RuntimeError("no reason")
    plain_upload(self, name, file)


bucket.Bucket.upload = upload  # type: ignore[method-assign]
runpy.run_path(str(SLOW))
