"""Model parallelism: tensor and pipeline parallelism, offload to host memory, and their planning.

A model is divided by layers into pipeline stages (`layer_plan`, `placement`, `pipeline`)
and each stage's matrices among the devices of a tensor-parallel group (`sharding_rules`,
`shard_params`, `device_groups`). Micro-batches keep all stages busy (`microbatches`). Weights
(`weight_offload`) and KV cache blocks (`host_kv_cache`) may stay in host memory.
"""
