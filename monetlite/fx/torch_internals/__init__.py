"""Every private symbol of torch that monetlite uses; no other package of monetlite may name one.

A file for each subject. Each symbol stands there with its use and with what breaks when it changes; the tests in
`tests/fx/torch_internals` fail when one is missing or behaves in another way, on the oldest and the newest torch
that is supported.

| file | subject |
| --- | --- |
| `patching` | the one lock and context manager for changes of torch's state |
| `torch_dynamo` | settings, errors and logs of TorchDynamo |
| `torch_aot` | AOTAutograd: joint graphs, their descriptors, compiled functions |
| `torch_dispatch` | operators and their schemas, Python kernels, modes, fake tensors, storages |
| `torch_inductor` | Inductor's compiler |
| `torch_auto_sac` | the planner of selective checkpointing |
| `torch_modules` | tensors and hooks that modules hold |
| `torch_ddp` | DistributedDataParallel around a model |
| `torch_cuda` | allocator, workspaces and streams of a GPU |
| `torch_profiler` | allocation events of the CPU profiler |
| `torch_pytree` | nested lists, tuples and dicts |
"""
