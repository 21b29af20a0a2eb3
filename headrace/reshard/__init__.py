"""Weights from the training layout to the rollout layout of the same model: exactly the missing slices, in buckets."""
