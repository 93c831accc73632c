"""What the scripts `bench_schedules.py`, `bench_memory.py` and `gpu_check.py` measure, and on what.

`workload` makes UMA-shaped models and micro-batches, `live` counts the bytes of live tensors, `one_process` runs all
stages of a pipeline in one process, phase by phase; `schedules` and `memory` hold what the ranks of a benchmark do.
"""
