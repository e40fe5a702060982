"""How fast a language model generates: with the cache of keys and values, without it, and transformers' generate.

    python benchmarks/generation.py                                  # gpt --preset small, 1 and 8 rows, 128 tokens
    python benchmarks/generation.py --preset gpt2 --rows 1 --tokens 32 --rounds 3
    python benchmarks/generation.py clients --clients 1 4 16         # a TextService asked by many at once

All generate greedily from the same prompts with the same weights (written as a Hugging Face folder, which transformers
reads), in turns, `--rounds` times; the fastest round counts, and the tokens must be equal. `clients`: the time of N
requests that come together, in times of one request.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

import torch
from torch import Tensor

from phalanx.zoo.models import build, save_pretrained
from phalanx.zoo.models.generation import Sampling

PROMPT = 16


def make_model(preset: str, device: str) -> torch.nn.Module:
    """Return a GPT whose texts vary: as initialised, it would repeat one token."""
    torch.manual_seed(0)
    model = build("gpt", preset=preset)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model.to(device).eval()


def transformers_generate(model: torch.nn.Module, device: str) -> Callable[[Tensor, int], Tensor] | None:
    """Return transformers' generate with the same weights; None where it is not installed."""
    try:
        from transformers import GPT2LMHeadModel
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        theirs = GPT2LMHeadModel.from_pretrained(folder).to(device).eval()

    def generate(prompt: Tensor, count: int) -> Tensor:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return theirs.generate(prompt, attention_mask=torch.ones_like(prompt), eos_token_id=None, **options)

    return generate


def seconds(generate: Callable[[Tensor, int], Tensor], prompt: Tensor, count: int) -> tuple[float, Tensor]:
    began = time.perf_counter()
    made = generate(prompt, count)
    if prompt.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began, made


def compare(args: argparse.Namespace) -> None:
    model = make_model(args.preset, args.device)
    ways = {
        "cached": lambda prompt, count: model.generate(prompt, count, temperature=0),
        "recomputed": lambda prompt, count: model.generate(prompt, count, temperature=0, cached=False),
        "transformers": transformers_generate(model, args.device),
    }
    ways = {name: way for name, way in ways.items() if way is not None}
    print(f"{'rows':>4} {'':<12} {'tokens/s':>9}  x of cached")
    for rows in args.rows:
        prompt = torch.randint(256, (rows, PROMPT), device=args.device)
        best = dict.fromkeys(ways, float("inf"))
        for way in ways.values():
            way(prompt, 4)
        for _ in range(args.rounds):
            made = {}
            for name, way in ways.items():
                taken, made[name] = seconds(way, prompt, args.tokens)
                best[name] = min(best[name], taken)
            for name, tokens in made.items():
                equal = (tokens == made["cached"]).float().mean().item()
                assert equal > 0.9, f"{name}: only {equal:.0%} of the tokens are those of the cache"
        for name, taken in best.items():
            print(f"{rows:>4} {name:<12} {rows * args.tokens / taken:>9.1f}  {best['cached'] / taken:.2f}")


def clients(args: argparse.Namespace) -> None:
    from phalanx.tools.serve.service import TextRequest, TextService
    from phalanx.zoo.recipe import TextCode
    from phalanx.zoo.text_model import TextModel

    text = TextModel(name="gpt", model=make_model(args.preset, args.device), code=TextCode(None))
    service = TextService(text, device=args.device, max_batch=max(args.clients))

    def asked(count: int) -> float:
        done = threading.Semaphore(0)
        began = time.perf_counter()
        for number in range(count):
            request = TextRequest(prompt=[number] * PROMPT, max_tokens=args.tokens, sampling=Sampling(temperature=0))
            request.emit = lambda piece: done.release() if piece.finish else None
            service.submit(request)
        for _ in range(count):
            done.acquire()
        return time.perf_counter() - began

    asked(max(args.clients))
    best = {count: float("inf") for count in args.clients}
    for _ in range(args.rounds):
        for count in args.clients:
            best[count] = min(best[count], asked(count))
    service.close()
    print(f"{'clients':>7} {'seconds':>8} {'tokens/s':>9}  x of one")
    for count, taken in best.items():
        print(f"{count:>7} {taken:>8.2f} {count * args.tokens / taken:>9.1f}  {taken / best[args.clients[0]]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("subject", nargs="?", choices=("compare", "clients"), default="compare")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    (clients if args.subject == "clients" else compare)(args)


if __name__ == "__main__":
    main()
