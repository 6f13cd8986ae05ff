"""Model parallelism: tensor and pipeline parallelism, offload to host memory, and their planning.

`layer_plan` and `placement` divide a model by layers into pipeline stages; `sharding_rules` and
`shard_params` divide each stage's matrices among the devices of a group. `pipeline` runs an
engine's steps on the stages. `host_offload` keeps weights and KV cache blocks in host memory.
"""
