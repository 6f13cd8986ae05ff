"""Spec proposals: a first specification for a checkpoint that no family matches."""
