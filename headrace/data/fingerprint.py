"""The identity of a data set: how many rows, and a hash over all that a run reads of them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from headrace.data.loader import Dataset, all_batches

ROWS_AT_ONCE = 1024


def data_fingerprint(dataset: Dataset) -> dict[str, Any]:
    """{"rows": count, "hash": text}: token ids and every column, in order.

    A value that JSON cannot hold (an image, say) counts by its type only.
    """
    digest = hashlib.blake2b(digest_size=16)
    for batch in all_batches(dataset, ROWS_AT_ONCE):
        columns = {**batch.tokens, **batch.rows}
        digest.update(json.dumps(batch.lengths.tolist()).encode())
        for name in sorted(columns):
            values = columns[name]
            plain = values.tolist() if isinstance(values, torch.Tensor) else values
            text = json.dumps(plain, skipkeys=True, default=lambda value: type(value).__name__)
            digest.update(f"{name} {text}\n".encode())
    return {"rows": len(dataset), "hash": digest.hexdigest()}
