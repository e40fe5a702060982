"""The one loop that every launcher x strategy pair runs, and `Formation`, on which it is built.

join the world, lay the model over it, shard the data
restore the newest checkpoint, if asked
for every epoch:
    for every global batch:                         -> StepInfo
        for every micro-batch: forward, backward    (gradients synchronised on the last one only)
        clip, optimizer step, learning rate
        checks of ranks, if a setting asks for them
        at logging steps: read losses, report, stop on NaN
        step hooks
        at the end of an epoch: evaluate, judge (best checkpoint, early stopping), report, epoch hooks
        on a stop request that all ranks agree on: save and leave
        at checkpoint steps: save at the step boundary
return weights and history
"""
