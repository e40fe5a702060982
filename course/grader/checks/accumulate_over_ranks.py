"""Grade accumulation_step() of template_gradient_accumulation.py: update, loss, bytes on the wire."""

from __future__ import annotations

import math
import random
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks.all_reduce import HANG_SECONDS, check_waited
from grader.checks.gradients import Guess, Pair, first_match
from grader.exercise import Attempt, Mistake
from grader.ranks import Answer

OVER_RANKS = "Accumulate over micro-batches and ranks"
IGNORED = -1


VOCABULARY, LENGTH, RATE = 7, 6, 0.5


def make_language_model(seed: int) -> nn.Module:
    """Return a model that gives logits for each token, in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)).double()


def make_tokens(seed: int, shares: list[list[tuple[int, int]]]) -> list[list[Pair]]:
    """Draw micro-batches by rank; each is given as (sequences, tokens that count)."""
    generator = torch.Generator().manual_seed(seed)

    def micro_batch(sequences: int, tokens: int) -> Pair:
        inputs = torch.randint(VOCABULARY, (sequences, LENGTH), generator=generator)
        targets = torch.randint(VOCABULARY, (sequences, LENGTH), generator=generator)
        targets.view(-1)[tokens:] = IGNORED
        return inputs, targets

    return [[micro_batch(*share) for share in of_rank] for of_rank in shares]


def rank_accumulate(
    module: ModuleType, rank: int, world: int, seed: int, shares: list[list[tuple[int, int]]]
) -> dict[str, Any]:
    """Make one update; return the weights before and after, and the loss."""
    model = make_language_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = torch.cat([param.detach().flatten().clone() for param in model.parameters()])
    loss = module.accumulation_step(model, optimizer, iter(make_tokens(seed, shares)[rank]))
    after = torch.cat([param.detach().flatten() for param in model.parameters()])
    return {"update": (before - after) / RATE, "loss": float(loss)}


def grade_over_ranks(attempt: Attempt) -> None:
    """Check the update and the bytes for ranks with different numbers of tokens, with none, with no micro-batch."""
    draw = random.Random(attempt.seed())
    for shares in (
        [[(3, 17), (2, draw.randint(3, 5)), (1, 6)], [(2, draw.randint(7, 9))]],
        [[(2, 9), (2, 0), (2, 11)], [(2, 0)], [(1, draw.randint(2, 5))]],
        draw.sample([[(1, draw.randint(1, 6)) for _ in range(9)], [], [(2, 0), (2, draw.randint(7, 12))]], 3),
    ):
        seed = attempt.seed()
        where = f"Tokens by rank and micro-batch {[[tokens for _, tokens in of_rank] for of_rank in shares]}"
        try:
            answers = attempt.run(rank_accumulate, len(shares), (seed, shares), timeout=HANG_SECONDS)
        except Mistake as mistake:
            if "waits in" not in str(mistake) and "ended (" not in str(mistake):
                raise
            raise Mistake(
                f"{where}: the ranks make different numbers of collective calls. They have different numbers of "
                f"micro-batches, and one of them may have none, so that its parameters have no gradient: no call may "
                f"depend on that. {mistake}",
                see=OVER_RANKS,
            ) from mistake
        check_waited(answers)
        check_update(where, seed, shares, answers)


def check_update(where: str, seed: int, shares: list[list[tuple[int, int]]], answers: list[Answer]) -> None:
    """Raise a Mistake unless update, loss and bytes are right on all ranks."""
    sums = [[sum_gradient(seed, pair) for pair in of_rank] for of_rank in make_tokens(seed, shares)]
    empty = torch.zeros_like(next(grad for of_rank in sums for _, grad in of_rank))
    gradient_bytes = 8 * empty.numel()
    tokens = [sum(count for _, count in of_rank) for of_rank in shares]
    rank_sums = [torch.stack([empty, *(grad for _, grad in of_rank)]).sum(0) for of_rank in sums]
    total = torch.stack(rank_sums).sum(0)
    right = total / sum(tokens)
    for rank, answer in enumerate(answers):
        found = answer.value["update"]
        if not found.isfinite().all():
            raise Mistake(
                f"{where}: the weights of rank {rank} are nan or inf: a rank or micro-batch without tokens divides by "
                "0. Divide once, by the tokens of all ranks.",
                see=OVER_RANKS,
            )
        if not torch.allclose(found, right, rtol=1e-9, atol=1e-11):
            guesses = update_guesses(rank, shares, sums, rank_sums)
            text = first_match(found, guesses) or f"the update differs by {float((found - right).abs().max()):.2g}"
            raise Mistake(f"{where}: rank {rank}: {text}.", see=OVER_RANKS)
        carried = sum(call.bytes for call in answer.calls)
        if carried > gradient_bytes + 64:
            raise Mistake(
                f"{where}: rank {rank} reduces {carried} bytes in {len(answer.calls)} calls, the gradients have "
                f"{gradient_bytes}: they travel {carried / gradient_bytes:.1f} times. Reduce once, after the last "
                "micro-batch.",
                see=OVER_RANKS,
            )
        check_token_loss(where, rank, answer.value["loss"], tokens, [[loss for loss, _ in part] for part in sums])


def sum_gradient(seed: int, pair: Pair) -> tuple[float, Tensor]:
    """Return the summed loss of a micro-batch and its gradient."""
    model = make_language_model(seed)
    logits = model(pair[0])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), pair[1].flatten(), ignore_index=IGNORED, reduction="sum")
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([grad.flatten() for grad in grads])


def update_guesses(
    rank: int, shares: list[list[tuple[int, int]]], sums: list[list[tuple[float, Tensor]]], rank_sums: list[Tensor]
) -> list[Guess]:
    """Return the gradients that typical mistakes give, with a text for each."""
    world, total = len(shares), torch.stack(rank_sums).sum(0)
    tokens = [sum(count for _, count in of_rank) for of_rank in shares]
    sequences = sum(rows for of_rank in shares for rows, _ in of_rank)
    pieces = [
        grad / max(1, count)
        for of_rank, part in zip(shares, sums, strict=True)
        for (_, count), (_, grad) in zip(of_rank, part, strict=True)
    ]
    of_ranks = [
        [grad / max(1, count) for (_, count), (_, grad) in zip(of_rank, part, strict=True)]
        for of_rank, part in zip(shares, sums, strict=True)
    ]
    means = [grad / max(1, count) for grad, count in zip(rank_sums, tokens, strict=True)]
    right = total / sum(tokens)
    return [
        (right + world / sum(tokens), "the gradients of the step before are still in it: clear them first"),
        (right + 1, "the gradients of the step before are still in it: clear them first"),
        (torch.ones_like(total), "the update uses the gradients of the step before: step() comes too early"),
        (means[rank], "the update uses the gradients of this rank only: reduce them before step()"),
        (rank_sums[rank], "the update uses the gradients of this rank only: reduce and divide them before step()"),
        (rank_sums[rank] / sum(tokens), "the update uses the gradients of this rank only: reduce them before step()"),
        (torch.stack(means).mean(0), "every rank counts alike although the tokens differ: divide by all tokens"),
        (torch.stack(pieces).mean(0), "every micro-batch counts alike although the tokens differ"),
        (torch.stack(pieces).sum(0), "the means of the micro-batches are summed"),
        (
            torch.stack(pieces).sum(0) / sum(tokens),
            "each micro-batch's loss is divided by its own tokens, and the sum by all tokens again: leave the sums as "
            "they are, and divide once at the end",
        ),
        (
            torch.stack(pieces).sum(0) / world,
            "each micro-batch's loss is divided by its own tokens, and the sum by the ranks: divide the sums once at "
            "the end, by the tokens of all ranks",
        ),
        (
            sum(torch.stack(part).mean(0) for part in of_ranks if part) / world,
            "the mean over the ranks of the means over their micro-batches: a micro-batch of few tokens counts as much "
            "as one of many. Divide the sums once at the end, by the tokens of all ranks",
        ),
        (total, "the sum over the tokens is not divided by their number"),
        (total / tokens[rank], "the sum is divided by the tokens of this rank: reduce the number of tokens, too"),
        (right / world, "the gradient is divided by the tokens and by the ranks: only the tokens count"),
        (total / world, "the sum is divided by the number of ranks: divide by the tokens of all ranks"),
        (total / sequences, "the gradient is divided by the sequences: they have different numbers of tokens"),
        (total / (sequences * LENGTH), "padding positions are counted as tokens: leave out targets that are IGNORED"),
        (total / len(pieces), "the sum is divided by the number of micro-batches: divide by the tokens"),
        (total / tokens[0] if tokens[0] else total, "the sum is divided by the tokens of rank 0"),
    ]


def check_token_loss(where: str, rank: int, found: float, tokens: list[int], losses: list[list[float]]) -> None:
    """Raise a Mistake unless the loss is the mean over all tokens."""
    sums = [sum(part) for part in losses]
    right = sum(sums) / sum(tokens)
    if math.isclose(found, right, rel_tol=1e-6):
        return
    own = sums[rank] / max(1, tokens[rank])
    texts = {
        own: "it is the mean of this rank only",
        sum(sums): "it is the sum over the tokens",
        sums[rank]: "it is the sum over the tokens of this rank",
        sums[rank] / sum(tokens): "the loss of this rank only is divided by all tokens",
        sum(part / max(1, count) for part, count in zip(sums, tokens, strict=True)) / len(sums): "ranks count alike",
    }
    if losses[rank]:
        texts[losses[rank][-1]] = "it is the loss of the last micro-batch"
    text = next((text for value, text in texts.items() if math.isclose(found, value, rel_tol=1e-6)), "")
    raise Mistake(f"{where}: rank {rank} returned the loss {found:.4f}, expected {right:.4f}: {text}.", see=OVER_RANKS)
