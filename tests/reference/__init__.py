"""Transformers in plain NumPy and float64, written from the published definitions.

They share no code with jinfer, so that a mistake has to be made twice to stay unseen. Sequences are
[length, ...] without a batch; weights of linear layers are [out, in], as checkpoints store them.
"""
