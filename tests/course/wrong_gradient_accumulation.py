"""Wrong and other right answers of template_gradient_accumulation.py."""

from __future__ import annotations

from wrong import Right, Wrong

CLEARED = "    model.zero_grad()\n    total"
TOTAL = "total = sum(len(inputs) for inputs, _ in micro_batches)"
EACH = "    for inputs, targets in micro_batches:\n        loss = loss_function"
SCALED = "loss = loss_function(model(inputs), targets) * (len(inputs) / total)"
BACK = "        loss.backward()\n        mean += loss.item()\n    return mean"

STEP_CLEARED = "    optimizer.zero_grad()\n    sums"
STEP_BACK = """        loss = summed_token_loss(model, inputs, targets)
        loss.backward()
"""
COUNTED = "(targets != IGNORED).sum().item()"
SUMS = "    dist.all_reduce(sums)\n"
REDUCED = """        dist.all_reduce(param.grad)
        param.grad /= tokens
    optimizer.step()
    return summed / tokens"""

KEPT_STATE = "ctx.random_state = torch.get_rng_state()"
KEPT_INPUT = "ctx.save_for_backward(inputs)"
FORWARD = "        return block(inputs)\n"
AGAIN = """        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.random_state)
            outputs = ctx.block(inputs)
"""
GRADS = "return None, *torch.autograd.grad(outputs, [inputs, *params], grads, allow_unused=True)"
APPLY = "return Recompute.apply(block, inputs, *params)"

SCALE = "return loss * self.current"
UNSCALED = "grad.div_(self.current)"
FLAG = "overflow = torch.tensor(float(any(not grad.isfinite().all() for grad in grads)))"
AGREED = "dist.all_reduce(overflow, op=dist.ReduceOp.MAX)"
HALVED = "            self.current /= 2\n            self.good_steps = 0\n            return False\n"
CLIPPED = "        nn.utils.clip_grad_norm_(parameters, max_norm)\n"
GROWN = """        if self.good_steps == self.growth_interval:
            self.current *= 2
            self.good_steps = 0
"""

TRAINABLE = "self.parameters = [param for param in parameters if param.requires_grad]"
MASTERS = "self.masters = [param.detach().clone().float() for param in self.parameters]"
OPTIMIZER = "self.optimizer = make_optimizer(self.masters)"
NO_GRAD = "            param.grad = None\n"
GIVEN = "master.grad = None if param.grad is None else param.grad.float()"
STEPPED = "        self.optimizer.step()\n        self.copy_to_model()\n"
STATE = 'return {"masters": masters, "optimizer": copy.deepcopy(self.optimizer.state_dict())}'
COPIED = "masters = [master.clone() for master in self.masters]"
LOADED = "            master.copy_(saved)\n"
LOADED_REST = """        self.optimizer.load_state_dict(state["optimizer"])
        self.copy_to_model()
"""

WRONG = (
    Wrong(
        "accumulate",
        "unscaled",
        ((SCALED, "loss = loss_function(model(inputs), targets)"),),
        says="are summed, not scaled",
        fast=True,
    ),
    Wrong(
        "accumulate",
        "divided by the micro-batches",
        ((SCALED, "loss = loss_function(model(inputs), targets) / len(micro_batches)"),),
        says="every micro-batch counts alike",
        fast=True,
    ),
    Wrong("accumulate", "not cleared", ((CLEARED, "    total"),), says="gradients of the step before are still in it"),
    Wrong(
        "accumulate",
        "cleared in the loop",
        ((SCALED, "model.zero_grad()\n        " + SCALED),),
        says="cleared inside the loop",
    ),
    Wrong(
        "accumulate",
        "last micro-batch lost",
        ((EACH, EACH.replace("in micro_batches", "in micro_batches[:-1]")),),
        says="the last micro-batch is lost",
    ),
    Wrong(
        "accumulate",
        "everything at once",
        (
            (
                TOTAL,
                TOTAL + "\n    micro_batches = [tuple(torch.cat(side) for side in zip(*micro_batches, strict=True))]",
            ),
        ),
        says="the whole batch goes through the model at once",
    ),
    Wrong(
        "accumulate",
        "one backward at the end",
        (
            (SCALED, SCALED.replace("loss = ", "mean = mean + ")),
            (BACK, "    mean.backward()\n    return mean.item()"),
        ),
        says="the graphs of several micro-batches are alive",
    ),
    Wrong(
        "accumulate",
        "graph retained",
        ((BACK, BACK.replace("loss.backward()", "loss.backward(retain_graph=True)")),),
        says="the graphs of several micro-batches are alive",
    ),
    Wrong(
        "accumulate",
        "losses kept with their graphs",
        (
            (EACH, "    kept = []\n" + EACH),
            (BACK, BACK.replace("loss.backward()", "kept.append(loss)\n        loss.backward(retain_graph=True)")),
        ),
        says="the graphs of several micro-batches are alive",
    ),
    Wrong(
        "accumulate",
        "mean of the means returned",
        ((BACK, BACK.replace("loss.item()", "loss.item() * total / len(inputs) / len(micro_batches)")),),
        says="the mean of the means",
    ),
    Wrong("accumulate", "last loss returned", ((BACK, BACK.replace("mean += ", "mean = ")),), says="part of the last"),
    Wrong(
        "accumulate", "tensor returned", ((BACK, BACK.replace("loss.item()", "loss.detach()")),), says="return a float"
    ),
    Wrong(
        "accumulate",
        "sum over the samples",
        ((SCALED, SCALED.replace(" / total", "")),),
        says="this is the sum over the samples",
    ),
    Wrong(
        "accumulate",
        "relative to the first",
        ((TOTAL, "total = len(micro_batches[0][0])"),),
        says="relative to the first micro-batch",
    ),
    Wrong(
        "accumulate",
        "divided twice",
        ((SCALED, SCALED + " / len(micro_batches)"),),
        says="divided by the micro-batches, too",
    ),
    Wrong(
        "accumulate",
        "cleared at the end",
        ((BACK, BACK.replace("    return", "    model.zero_grad(set_to_none=False)\n    return")),),
        says="cleared at the end",
    ),
    # accumulate-over-ranks
    Wrong(
        "accumulate-over-ranks",
        "reduced for each micro-batch",
        (
            (
                STEP_BACK,
                STEP_BACK + "        for param in model.parameters():\n            dist.all_reduce(param.grad)\n",
            ),
            (REDUCED, REDUCED.replace("dist.all_reduce(param.grad)", "pass")),
        ),
        says="no call may depend on that",
        fast=True,
    ),
    Wrong(
        "accumulate-over-ranks",
        "reduced twice",
        (
            (
                REDUCED,
                REDUCED.replace(
                    "dist.all_reduce(param.grad)",
                    "dist.all_reduce(param.grad)\n        param.grad /= dist.get_world_size()\n"
                    "        dist.all_reduce(param.grad)",
                ),
            ),
        ),
        says="they travel 2",
    ),
    Wrong(
        "accumulate-over-ranks",
        "mean of the ranks",
        (
            (SUMS, "    own = max(1.0, sums[1].item())\n" + SUMS),
            (
                REDUCED,
                REDUCED.replace(
                    "        dist.all_reduce", "        param.grad /= own\n        dist.all_reduce"
                ).replace("param.grad /= tokens", "param.grad /= dist.get_world_size()"),
            ),
        ),
        says="every rank counts alike although the tokens differ",
        fast=True,
    ),
    Wrong(
        "accumulate-over-ranks",
        "means of micro-batches",
        (
            (STEP_BACK, STEP_BACK.replace("loss.backward()", f"(loss / max(1, {COUNTED})).backward()")),
            (REDUCED, REDUCED.replace("param.grad /= tokens", "pass")),
        ),
        says="the means of the micro-batches are summed",
    ),
    Wrong(
        "accumulate-over-ranks",
        "own tokens",
        ((SUMS, "    own = sums[1].item()\n" + SUMS), (REDUCED, REDUCED.replace("/= tokens", "/= own"))),
        says="tokens of this rank",
    ),
    Wrong("accumulate-over-ranks", "not cleared", ((STEP_CLEARED, "    sums"),), says="clear them first"),
    Wrong(
        "accumulate-over-ranks",
        "not reduced",
        ((REDUCED, REDUCED.replace("dist.all_reduce(param.grad)", "pass")),),
        says="gradients of this rank only",
    ),
    Wrong(
        "accumulate-over-ranks",
        "update before the reduction",
        (
            (SUMS, "    optimizer.step()\n" + SUMS),
            (REDUCED, REDUCED.replace("    optimizer.step()\n", "")),
        ),
        says="gradients of this rank only",
    ),
    Wrong(
        "accumulate-over-ranks",
        "padding counted",
        ((COUNTED, "targets.numel()"),),
        says="padding positions are counted",
    ),
    Wrong("accumulate-over-ranks", "sequences counted", ((COUNTED, "len(targets)"),), says="divided by the sequences"),
    Wrong("accumulate-over-ranks", "micro-batches counted", ((COUNTED, "1.0"),), says="number of micro-batches"),
    Wrong(
        "accumulate-over-ranks",
        "not divided",
        ((REDUCED, REDUCED.replace("param.grad /= tokens", "pass")),),
        says="not divided by their number",
    ),
    Wrong(
        "accumulate-over-ranks",
        "divided by the ranks, too",
        ((REDUCED, REDUCED.replace("/= tokens", "/= tokens * dist.get_world_size()")),),
        says="only the tokens count",
    ),
    Wrong(
        "accumulate-over-ranks",
        "divided by the ranks only",
        ((REDUCED, REDUCED.replace("/= tokens", "/= dist.get_world_size()")),),
        says="divided by the number of ranks",
    ),
    Wrong(
        "accumulate-over-ranks",
        "divided by no tokens",
        (
            (SUMS, "    own = sums[1].item()\n" + SUMS),
            (REDUCED, "        param.grad *= tokens / tokens * (own / torch.tensor(own))\n" + REDUCED),
        ),
        says="divides by 0",
    ),
    Wrong(
        "accumulate-over-ranks",
        "own loss",
        (
            (SUMS, "    own = sums[0].item() / max(1.0, sums[1].item())\n" + SUMS),
            (REDUCED, REDUCED.replace("summed / tokens", "own")),
        ),
        says="the mean of this rank only",
    ),
    Wrong(
        "accumulate-over-ranks",
        "summed loss",
        ((REDUCED, REDUCED.replace("summed / tokens", "summed")),),
        says="the sum over the tokens",
    ),
    # recompute
    Wrong(
        "recompute",
        "other random numbers",
        (("            torch.set_rng_state(ctx.random_state)\n", ""),),
        says="draws other random numbers",
        fast=True,
    ),
    Wrong("recompute", "no recomputation", ((APPLY, "return block(inputs)"),), says="are still in memory", fast=True),
    Wrong(
        "recompute",
        "state taken too late",
        ((KEPT_STATE, "outputs = block(inputs)\n        " + KEPT_STATE), (FORWARD, "        return outputs\n")),
        says="draws other random numbers",
    ),
    Wrong(
        "recompute",
        "graph kept in forward",
        (
            (
                FORWARD,
                "        with torch.enable_grad():\n            ctx.outputs = block(inputs.detach().requires_grad_())\n"
                "        return ctx.outputs.detach()\n",
            ),
        ),
        says="are still in memory",
    ),
    Wrong(
        "recompute",
        "random state left behind",
        ((AGAIN, AGAIN.replace("torch.random.fork_rng(devices=[]), ", "")),),
        says="leaves another random state behind",
    ),
    Wrong(
        "recompute",
        "parameters not passed",
        (
            (APPLY, "return Recompute.apply(block, inputs)"),
            (
                GRADS,
                "torch.autograd.backward(outputs, grads)\n        return None, inputs.grad",
            ),
        ),
        says="the inputs need no gradient",
    ),
    Wrong(
        "recompute",
        "parameters without gradient",
        ((GRADS, "return None, torch.autograd.grad(outputs, [inputs], grads)[0], *[None] * len(params)"),),
        says="no gradient arrives",
    ),
    Wrong(
        "recompute",
        "inputs without gradient",
        ((GRADS, "return None, None, *torch.autograd.grad(outputs, params, grads)"),),
        says="the inputs: no gradient arrives",
    ),
    Wrong(
        "recompute",
        "gradient of the output ignored",
        ((GRADS, GRADS.replace("grads,", "torch.ones_like(outputs),")),),
        says="multiply with the gradient that it is given",
    ),
    Wrong(
        "recompute",
        "counted twice",
        ((GRADS, "outputs.backward(*grads, retain_graph=True)\n        " + GRADS),),
        says="counted twice",
    ),
    Wrong(
        "recompute",
        "nothing recorded in backward",
        ((AGAIN, AGAIN.replace(", torch.enable_grad()", "")),),
        says="does not require grad",
    ),
    Wrong(
        "recompute",
        "computed twice in backward",
        ((AGAIN, AGAIN + "            outputs = ctx.block(inputs)\n"),),
        says="The block ran 3 times",
    ),
    Wrong(
        "recompute",
        "no graph at all",
        ((APPLY, "with torch.no_grad():\n        return block(inputs)"),),
        says="requires_grad=False",
    ),
    Wrong(
        "recompute",
        "inputs detached",
        ((APPLY, "return Recompute.apply(block, inputs.detach(), *params)"),),
        says="the inputs: no gradient arrives",
    ),
    Wrong(
        "recompute",
        "torch's own",
        (
            (
                APPLY,
                "import torch.utils.checkpoint\n\n"
                "    return torch.utils.checkpoint.checkpoint(block, inputs, use_reentrant=False)",
            ),
        ),
        says="uses torch.utils.checkpoint",
    ),
    # loss-scaling
    Wrong("loss-scaling", "each rank alone", ((AGREED, "pass"),), says="each rank decides alone", fast=True),
    Wrong(
        "loss-scaling",
        "clipped before unscaling",
        (
            (UNSCALED, "pass"),
            (CLIPPED, CLIPPED + "        for grad in grads:\n            grad.div_(self.current)\n"),
        ),
        says="clipped before they are divided",
        fast=True,
    ),
    Wrong(
        "loss-scaling",
        "not unscaled",
        ((UNSCALED, "pass"), (CLIPPED, "        nn.utils.clip_grad_norm_(parameters, max_norm)\n")),
        says="not divided by the scale",
    ),
    Wrong("loss-scaling", "not clipped", ((CLIPPED, ""),), says="not clipped"),
    Wrong(
        "loss-scaling",
        "nan not seen",
        ((FLAG, FLAG.replace("not grad.isfinite().all()", "grad.isinf().any()")),),
        says="a nan is not found",
    ),
    Wrong(
        "loss-scaling",
        "inf not seen",
        ((FLAG, FLAG.replace("not grad.isfinite().all()", "grad.isnan().any()")),),
        says="an inf is not found",
    ),
    Wrong(
        "loss-scaling",
        "updated in spite of the overflow",
        (
            (
                HALVED,
                HALVED.replace(
                    "            return False\n", "            optimizer.step()\n            return False\n"
                ),
            ),
        ),
        says="in spite of the overflow",
    ),
    Wrong(
        "loss-scaling",
        "no backoff",
        ((HALVED, HALVED.replace("            self.current /= 2\n", "")),),
        says="not reduced after an overflow",
    ),
    Wrong("loss-scaling", "backoff grows", ((HALVED, HALVED.replace("/= 2", "*= 2")),), says="it should be halved"),
    Wrong(
        "loss-scaling",
        "halved for each gradient",
        ((HALVED, HALVED.replace("self.current /= 2", "self.current /= 2 ** len(grads)")),),
        says="more than once for one overflow",
    ),
    Wrong("loss-scaling", "no growth", ((GROWN, ""),), says="the scale never grows again"),
    Wrong(
        "loss-scaling",
        "growth in each step",
        ((GROWN, "        self.current *= 2\n"),),
        says="grows after each good step",
    ),
    Wrong(
        "loss-scaling", "growth one late", ((GROWN, GROWN.replace("==", ">")),), says="one later than growth_interval"
    ),
    Wrong(
        "loss-scaling",
        "count not reset after an overflow",
        ((HALVED, HALVED.replace("            self.good_steps = 0\n", "")),),
        says="goes on after an overflow",
    ),
    Wrong(
        "loss-scaling",
        "count not reset after growth",
        ((GROWN, GROWN.replace("==", ">=").replace("            self.good_steps = 0\n", "")),),
        says="does not begin anew after the scale has grown",
    ),
    Wrong("loss-scaling", "loss not scaled", ((SCALE, "return loss"),), says="scale(loss) of a loss of 3.0"),
    Wrong(
        "loss-scaling",
        "loss detached",
        ((SCALE, "return (loss.detach() * self.current).requires_grad_()"),),
        says="its gradient 0.0",
    ),
    Wrong(
        "loss-scaling",
        "only the rank with the overflow calls",
        ((AGREED, f"if overflow.item():\n            {AGREED}"),),
        says="every rank must make the all-reduce of the flag",
    ),
    Wrong(
        "loss-scaling",
        "divided by the new scale",
        (
            (UNSCALED, "pass"),
            (CLIPPED + "        optimizer.step()\n", ""),
            (
                GROWN,
                GROWN
                + "        for grad in grads:\n            grad.div_(self.current)\n"
                + CLIPPED
                + "        optimizer.step()\n",
            ),
        ),
        says="after it has changed",
    ),
    # master-weights
    Wrong(
        "master-weights",
        "no float32",
        ((MASTERS, MASTERS.replace(".float()", "")), (GIVEN, GIVEN.replace(".float()", ""))),
        says="the optimizer got bfloat16 tensors",
        fast=True,
    ),
    Wrong(
        "master-weights",
        "optimizer of the model",
        ((OPTIMIZER, "self.optimizer = make_optimizer(self.parameters)"), (STEPPED, "        self.optimizer.step()\n")),
        says="the optimizer got bfloat16 tensors",
    ),
    Wrong(
        "master-weights",
        "copies made anew",
        ((GIVEN, "master.copy_(param)\n            " + GIVEN),),
        says="made anew from the rounded model",
        fast=True,
    ),
    Wrong(
        "master-weights",
        "not copied back",
        ((STEPPED, "        self.optimizer.step()\n"),),
        says="the model does not move",
    ),
    Wrong(
        "master-weights",
        "model becomes float32",
        (("            param.copy_(master)\n", "            param.data = master.clone()\n"),),
        says="the model stays in bfloat16",
    ),
    Wrong(
        "master-weights",
        "old gradient",
        ((GIVEN, "master.grad = master.grad if param.grad is None else param.grad.float()"),),
        says="moves with an old one",
    ),
    Wrong(
        "master-weights",
        "gradients add up",
        (
            (
                GIVEN,
                "if param.grad is not None:\n"
                "                master.grad = param.grad.float() + (0 if master.grad is None else master.grad)",
            ),
        ),
        says="add up over the steps",
    ),
    Wrong(
        "master-weights",
        "frozen ones too",
        ((TRAINABLE, "self.parameters = list(parameters)"),),
        says="requires_grad=False: leave it out",
    ),
    Wrong(
        "master-weights", "gradients stay", ((NO_GRAD, "            pass\n"),), says="zero_grad() leaves the gradients"
    ),
    Wrong(
        "master-weights",
        "gradients of the masters cleared",
        (("        for param in self.parameters:\n" + NO_GRAD, "        self.optimizer.zero_grad()\n"),),
        says="zero_grad() leaves the gradients",
    ),
    Wrong(
        "master-weights",
        "rounded weights saved",
        (
            (
                COPIED,
                "masters = [param.detach() for param in self.parameters]",
            ),
        ),
        says="the float32 masters and the state of the optimizer",
    ),
    Wrong(
        "master-weights",
        "optimizer not saved",
        ((LOADED_REST, "        self.copy_to_model()\n"),),
        says="the state of the optimizer",
    ),
    Wrong(
        "master-weights",
        "model not loaded",
        ((LOADED_REST, '        self.optimizer.load_state_dict(state["optimizer"])\n'),),
        says="still has other weights",
    ),
    Wrong(
        "master-weights",
        "other tensors than the optimizer's",
        ((LOADED_REST, '        self.masters = [saved.clone() for saved in state["masters"]]\n' + LOADED_REST),),
        says="tensors that the optimizer updates",
    ),
    Wrong("master-weights", "masters not loaded", ((LOADED, "            pass\n"),), says="still has other weights"),
    Wrong(
        "master-weights", "live masters returned", ((COPIED, "masters = self.masters"),), says="return copies of them"
    ),
    Wrong(
        "master-weights",
        "live state of the optimizer returned",
        ((STATE, 'return {"masters": masters, "optimizer": self.optimizer.state_dict()}'),),
        says="use copy.deepcopy",
    ),
    Wrong(
        "master-weights",
        "every parameter has a gradient",
        ((GIVEN, "master.grad = param.grad.float()"),),
        says="A parameter may have no gradient here",
    ),
    Wrong(
        "loss-scaling",
        "every parameter has a gradient",
        (
            (
                "grads = [param.grad for param in parameters if param.grad is not None]",
                "grads = [param.grad for param in parameters]",
            ),
        ),
        says="A parameter may have no gradient here",
    ),
    Wrong(
        "recompute",
        "frozen parameters differentiated",
        (
            (
                "    params = [param for param in block.parameters() if param.requires_grad]",
                "    params = list(block.parameters())",
            ),
            (
                "params = [param for param in ctx.block.parameters() if param.requires_grad]",
                "params = list(ctx.block.parameters())",
            ),
        ),
        says="leave frozen parameters out",
    ),
    Wrong(
        "accumulate",
        "unscaled and one backward at the end",
        (
            (SCALED, "mean = mean + loss_function(model(inputs), targets)"),
            (BACK, "    mean.backward()\n    return mean.item()"),
        ),
        says="are summed, not scaled. Besides, at its peak",
    ),
)

RIGHT = (
    Right(
        "accumulate",
        "sums and a division at the end",
        """
def accumulate(model, loss_function, micro_batches):
    for param in model.parameters():
        param.grad = None
    summed, samples = 0.0, 0
    for inputs, targets in micro_batches:
        loss = loss_function(model(inputs), targets) * inputs.shape[0]
        loss.backward()
        summed, samples = summed + loss.item(), samples + inputs.shape[0]
    for param in model.parameters():
        param.grad /= samples
    return summed / samples
""",
    ),
    Right(
        "accumulate",
        "autograd.grad",
        """
def accumulate(model, loss_function, micro_batches):
    params = list(model.parameters())
    total = sum(map(len, (inputs for inputs, _ in micro_batches)))
    grads, mean = [torch.zeros_like(param) for param in params], 0.0
    for inputs, targets in micro_batches:
        loss = loss_function(model(inputs), targets)
        share = len(inputs) / total
        for grad, new in zip(grads, torch.autograd.grad(loss, params)):
            grad.add_(new, alpha=share)
        mean += share * float(loss)
    for param, grad in zip(params, grads):
        param.grad = grad
    return mean
""",
    ),
    Right(
        "accumulate-over-ranks",
        "one flat buffer with the sums in it",
        """
def accumulation_step(model, optimizer, micro_batches):
    optimizer.zero_grad(set_to_none=False)
    numbers = [0.0, 0.0]
    for inputs, targets in micro_batches:
        loss = summed_token_loss(model, inputs, targets)
        loss.backward()
        numbers[0] += loss.item()
        numbers[1] += float(targets.ne(IGNORED).sum())
    params = list(model.parameters())
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    flat = torch.cat([*[param.grad.flatten() for param in params], torch.tensor(numbers, dtype=params[0].dtype)])
    dist.all_reduce(flat)
    for param, piece in zip(params, flat.split([*[param.numel() for param in params], 2])):
        param.grad.copy_(piece.view_as(param) / flat[-1])
    optimizer.step()
    return (flat[-2] / flat[-1]).item()
""",
    ),
    Right(
        "accumulate-over-ranks",
        "tokens counted first",
        """
def accumulation_step(model, optimizer, micro_batches):
    micro_batches = list(micro_batches)
    tokens = torch.tensor(float(sum((targets != IGNORED).sum() for _, targets in micro_batches)))
    dist.all_reduce(tokens)
    optimizer.zero_grad()
    mean = torch.zeros((), dtype=torch.float64)
    for inputs, targets in micro_batches:
        loss = summed_token_loss(model, inputs, targets) / tokens
        loss.backward()
        mean += loss.detach()
    works = [dist.all_reduce(mean, async_op=True)]
    for param in model.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        works.append(dist.all_reduce(param.grad, async_op=True))
    for work in works:
        work.wait()
    optimizer.step()
    return float(mean)
""",
    ),
    Right(
        "recompute",
        "backward into the parameters",
        """
def recompute(block, inputs):
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, inputs):
            ctx.state = torch.random.get_rng_state()
            ctx.save_for_backward(inputs)
            return block(inputs)

        @staticmethod
        def backward(ctx, grad):
            now = torch.random.get_rng_state()
            torch.random.set_rng_state(ctx.state)
            inputs = ctx.saved_tensors[0].detach()
            inputs.requires_grad_(True)
            with torch.enable_grad():
                outputs = block(inputs)
            torch.random.set_rng_state(now)
            torch.autograd.backward(outputs, grad)
            return None, inputs.grad

    return Again.apply(torch.zeros(1, requires_grad=True), inputs)
""",
    ),
    Right(
        "recompute",
        "parameters by name",
        """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, names, inputs, *values):
        ctx.run, ctx.names, ctx.state = run, names, torch.get_rng_state()
        ctx.save_for_backward(inputs, *values)
        return run(dict(zip(names, values)), inputs)

    @staticmethod
    def backward(ctx, grad):
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        before = torch.get_rng_state()
        try:
            torch.set_rng_state(ctx.state)
            with torch.enable_grad():
                outputs = ctx.run(dict(zip(ctx.names, leaves[1:])), leaves[0])
        finally:
            torch.set_rng_state(before)
        return None, None, *torch.autograd.grad(outputs, leaves, grad, allow_unused=True)


def recompute(block, inputs):
    named = {name: param for name, param in block.named_parameters() if param.requires_grad}
    return Recompute.apply(
        lambda values, inputs: torch.func.functional_call(block, values, (inputs,)),
        list(named),
        inputs,
        *named.values(),
    )
""",
    ),
    Right(
        "loss-scaling",
        "sum of the flags and multiplication",
        """
class LossScaler:
    def __init__(self, scale=2.0**16, *, growth_interval=2000):
        self.current, self.interval, self.in_a_row = scale, growth_interval, 0

    def scale(self, loss):
        return self.current * loss

    def step(self, optimizer, parameters, *, max_norm):
        bad = torch.zeros(1)
        for param in parameters:
            if param.grad is not None:
                param.grad *= 1 / self.current
                bad += (~torch.isfinite(param.grad)).sum()
        dist.all_reduce(bad)
        if bad > 0:
            self.current, self.in_a_row = self.current * 0.5, 0
            return False
        torch.nn.utils.clip_grad_norm_(parameters, max_norm=max_norm)
        optimizer.step()
        self.in_a_row += 1
        if self.in_a_row % self.interval == 0:
            self.current *= 2.0
        return True
""",
    ),
    Right(
        "loss-scaling",
        "norm as the flag, clipping by hand",
        """
class LossScaler:
    def __init__(self, scale=2.0**16, *, growth_interval=2000):
        self.current, self.growth_interval, self.left = scale, growth_interval, growth_interval

    def scale(self, loss):
        return loss.mul(self.current)

    def step(self, optimizer, parameters, *, max_norm):
        grads = [param.grad for param in parameters if param.grad is not None]
        for grad in grads:
            grad.copy_(grad / self.current)
        norm = torch.sqrt(sum((grad.double() ** 2).sum() for grad in grads))
        fine = torch.tensor([1.0 if torch.isfinite(norm) else 0.0])
        dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        if not fine.item():
            self.current /= 2
            self.left = self.growth_interval
            return False
        if norm > max_norm:
            for grad in grads:
                grad.mul_(max_norm / norm)
        optimizer.step()
        self.left -= 1
        if not self.left:
            self.current, self.left = self.current * 2, self.growth_interval
        return True
""",
    ),
    Right(
        "master-weights",
        "pairs",
        """
class MasterWeights:
    def __init__(self, parameters, make_optimizer):
        self.pairs = [(param, param.detach().to(torch.float32)) for param in parameters if param.requires_grad]
        self.optimizer = make_optimizer([master for _, master in self.pairs])

    def zero_grad(self):
        for param, _ in self.pairs:
            if param.grad is not None:
                param.grad.zero_()

    def step(self):
        for param, master in self.pairs:
            master.grad = param.grad.to(torch.float32) if param.grad is not None else None
        self.optimizer.step()
        for param, master in self.pairs:
            param.data.copy_(master)

    def state_dict(self):
        return copy.deepcopy({"weights": [master for _, master in self.pairs], "state": self.optimizer.state_dict()})

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["state"])
        for (param, master), weight in zip(self.pairs, state["weights"]):
            master.copy_(weight)
            param.data.copy_(weight)
""",
    ),
    Right(
        "master-weights",
        "the optimizer's groups",
        """
class MasterWeights:
    def __init__(self, parameters, make_optimizer):
        self.model = [param for param in parameters if param.requires_grad]
        self.optimizer = make_optimizer([nn.Parameter(param.detach().float()) for param in self.model])

    def _masters(self):
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def zero_grad(self):
        for param in [*self.model, *self._masters()]:
            param.grad = None

    @torch.no_grad()
    def step(self):
        masters = self._masters()
        for param, master in zip(self.model, masters):
            master.grad = None
            if param.grad is not None:
                master.grad = param.grad.detach().clone().float()
        self.optimizer.step()
        torch._foreach_copy_(self.model, masters)

    def state_dict(self):
        values = torch.cat([master.detach().flatten() for master in self._masters()])
        return {"optimizer": copy.deepcopy(self.optimizer.state_dict()), "values": values}

    @torch.no_grad()
    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
        masters = self._masters()
        for master, param, value in zip(masters, self.model, state["values"].split([m.numel() for m in masters])):
            master.copy_(value.view_as(master))
            param.copy_(master)
""",
    ),
)
