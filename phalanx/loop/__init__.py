"""The one loop that every launcher x strategy pair runs, and `Formation`, on which it is built.

join the world, lay the model over it, shard the data
restore the newest checkpoint, if asked
for every epoch:
    for every global batch:                         -> StepInfo
        for every micro-batch: forward, backward    (gradients synchronised on the last one only)
        clip, optimizer step, learning rate
        at logging steps: read losses, report, stop on NaN
        step hooks
        at the end of an epoch: evaluate, report, epoch hooks
        at checkpoint steps, or on a stop signal: save at the step boundary
return weights and history
"""
