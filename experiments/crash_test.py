"""Kill -9 a real batch job at random moments, start it again, and count: every request exactly once.

    python -m experiments.crash_test MODEL [--kills 20] [--requests 200] [flags of flexrun batch]

Runs the job once in peace for the expected texts, then starts it over and over on one output file, each time
killing it at a moment drawn over the whole run: while loading, prefilling, decoding, writing. The moment is a
share of the requests that were left, so that kills fall on all stages whatever the machine's speed. After the
last kill the job runs to its end.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.texts import random_words


def make_input(path: Path, n_requests: int, seed: int, vocab: int | None) -> None:
    """Prompts of 3 to 60 words (of token ids below `vocab`), answers of 1 to 40 tokens, greedy and sampled.

    One line in fifty is broken.
    """
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as stream:
        for i in range(n_requests):
            if i % 50 == 25:
                stream.write('{"broken": \n')
                continue
            length = rng.randrange(3, 60)
            if vocab is None:
                prompt: str | list[int] = random_words(rng, length)
            else:
                prompt = [rng.randrange(vocab) for _ in range(length)]
            line = {
                "custom_id": f"request-{i}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {
                    "prompt": prompt,
                    "max_tokens": rng.randrange(1, 40),
                    "temperature": rng.choice([0.0, 0.8]),
                },
            }
            stream.write(json.dumps(line) + "\n")


def command(args: argparse.Namespace, extra: list[str], source: Path, target: Path) -> list[str]:
    base = [sys.executable, "-m", "flexrun", "batch", "-m", args.model, "-i", str(source), "-o", str(target)]
    return [*base, "--json", *extra]


def n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def read_results(path: Path) -> dict[str, dict]:
    """Records by id. SystemExit if a line is broken or an id is there twice."""
    results: dict[str, dict] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError:
            raise SystemExit(f"FAILED: line {number} of the output is broken: {line[:80]!r}") from None
        if record["custom_id"] in results:
            raise SystemExit(f"FAILED: {record['custom_id']} is there twice")
        results[record["custom_id"]] = record
    return results


def answers(results: dict[str, dict]) -> dict[str, object]:
    return {
        name: None
        if record["error"]
        else record["response"]["body"]["choices"][0].get("token_ids")
        or record["response"]["body"]["choices"][0]["text"]
        for name, record in results.items()
    }


def sampled_ids(source: Path) -> set[str]:
    """Ids of the requests that draw."""
    found = set()
    for line in source.read_text().splitlines():
        if not line.startswith('{"broken"'):
            request = json.loads(line)
            if request["body"]["temperature"] > 0:
                found.add(request["custom_id"])
    return found


def kill_once(
    words: list[str], target: Path, wanted_lines: int, log: Path, rng: random.Random
) -> tuple[str, int]:
    """Start the job and kill it a little after the output has `wanted_lines`. (stage, lines then)."""
    before = n_lines(target)
    with log.open("ab") as stream:
        child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=stream)
        while child.poll() is None and n_lines(target) < wanted_lines:
            time.sleep(0.01)
        # With nothing to wait for, the kill falls on start-up, loading or the first passes.
        time.sleep(rng.uniform(0.0, 0.3) if wanted_lines > before else rng.uniform(0.0, 6.0))
        alive = child.poll() is None
        child.send_signal(signal.SIGKILL)
        child.wait()
    after = n_lines(target)
    stage = "ended before the kill" if not alive else "before any result" if after == before else "writing"
    return stage, after


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--vocab", type=int, help="prompts of token ids, for a model without a tokenizer")
    parser.add_argument("--random-seed", type=int, default=1)
    args, extra = parser.parse_known_args()
    rng = random.Random(args.random_seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, log = folder / "in.jsonl", folder / "log.txt"
        make_input(source, args.requests, args.random_seed, args.vocab)
        began = time.monotonic()
        peaceful = folder / "peaceful.jsonl"
        # The last word on success is the count below; some requests are meant to fail (status 1).
        done = subprocess.run(
            command(args, extra, source, peaceful), capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 1):
            raise SystemExit(f"the undisturbed run failed:\n{done.stderr}")
        undisturbed_seconds = time.monotonic() - began
        expected = answers(read_results(peaceful))
        print(f"undisturbed: {len(expected)} results in {undisturbed_seconds:.1f} s")

        target = folder / "out.jsonl"
        words = command(args, extra, source, target)
        stages: dict[str, int] = {}
        n_torn = 0
        for kill in range(1, args.kills + 1):
            have = n_lines(target)
            # One kill in five comes before any result of its run; the others leave work for those after them.
            share = 0.0 if kill % 5 == 1 else rng.uniform(0.0, 1.0 / (args.kills - kill + 2))
            wanted = have if share == 0.0 else have + max(1, int(share * (args.requests - have)))
            stage, after = kill_once(words, target, wanted, log, rng)
            torn = target.exists() and not target.read_bytes().endswith(b"\n") and target.stat().st_size > 0
            n_torn += torn
            stages[stage] = stages.get(stage, 0) + 1
            print(f"kill {kill:2}: {stage}, {after} lines{', the last one torn' if torn else ''}")
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"FAILED: the last run ended with {done.returncode}:\n{done.stderr}")
        results = read_results(target)
        summary = json.loads(done.stdout.splitlines()[-1])
        found = answers(results)
        missing, foreign = expected.keys() - found.keys(), found.keys() - expected.keys()
        unlike = [name for name in expected if name in found and found[name] != expected[name]]
        # A resumed run batches requests differently, which changes sums in the last bits. Greedy answers do not
        # notice; a draw among tokens of tiny probability may fall on the next one.
        sampled = sampled_ids(source)
        different = [name for name in unlike if name not in sampled]
        verdict = "passed" if not (missing or foreign or different) else "FAILED"
        print(f"{verdict}: {len(found)} of {len(expected)} requests, each once; {len(missing)} missing,"
              f" {len(foreign)} foreign, {len(different)} greedy and {len(unlike) - len(different)} sampled texts"
              " unlike the undisturbed run's")  # fmt: skip
        print(
            json.dumps(
                {
                    "experiment": "crash_test",
                    "verdict": verdict,
                    "kills": args.kills,
                    "stages": stages,
                    "torn_lines": n_torn,
                    "requests": len(expected),
                    "resumed_by_last_run": summary["resumed"],
                    "missing": len(missing),
                    "different_greedy_texts": len(different),
                    "different_sampled_texts": len(unlike) - len(different),
                    "undisturbed_seconds": round(undisturbed_seconds, 2),
                }
            )
        )
        if verdict == "FAILED":
            raise SystemExit(1)


if __name__ == "__main__":
    main()
