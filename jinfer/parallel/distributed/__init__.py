"""Distributed inference: one model on several hosts, one process on each.

Rank 0, the coordinator, runs the scheduler and answers requests; the other ranks are workers
(`worker`). `initialize` is the rendezvous, `process_group` the messages between ranks,
`distributed_pipeline` a call's work on every rank.
"""
