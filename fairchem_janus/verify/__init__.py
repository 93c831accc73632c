"""Is a job trained exactly? The same global batches through the pipeline and through plain fairchem, compared.

`janus_side` runs the job on its D x P x G grid, `reference` runs fairchem's own `MLIPTrainEvalUnit` in one process on
the union of the micro-batches, and `compare` measures loss, gradient norm, every gradient and every parameter.
"""
