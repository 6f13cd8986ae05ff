"""A model on several devices: which has what, and how they compute it together."""
