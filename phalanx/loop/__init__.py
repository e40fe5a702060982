"""The one loop that every launcher x strategy pair runs, and `Formation`, on which it is built.

join the world, lay the model over it, shard the data
restore the newest checkpoint, if asked
for every epoch:
    for every global batch:                         -> StepInfo
        for every micro-batch: forward, backward    (gradients synchronised on the last one only)
        clip, optimizer step, learning rate
        at logging steps: read losses, report, stop on NaN
        at checkpoint steps, or when told to stop: save at the step boundary
        hooks
    evaluate, report, hooks
hand back weights and history
"""
