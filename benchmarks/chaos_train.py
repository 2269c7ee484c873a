"""A training job is struck at random moments, and must end as if nothing had happened.

    python -m benchmarks.chaos_train [--kills 100] [--moves 20] [--only rank,save] [--seed 0] [--json FILE]
    python -m benchmarks.chaos_train --elastic [--events 100] [--torchruns 5] [--seed 0] [--json FILE]

A small CNN learns digits on two ranks, in a few steps, with a checkpoint every few of them (`chaos_worker.py`). It
runs once undisturbed. Then it runs many times from the beginning, and is struck each time:

rank      one of the two ranks is killed, at a random moment
launcher  ddp-launch is killed
all       everything is killed at once: launcher, MPI, agents, ranks
stop      a rank is stopped (SIGSTOP) for a while, and then killed
save      a rank is killed in the middle of a save: at, or just after, any operation on a file
load      a rank is killed at any step, and then one in the middle of the load from disk: at, or just after, any
          operation on a file
memory    a rank is killed at any step, with the state held in memory after each step: at most one step may be repeated,
          and the seconds from the kill to the end of the next step are measured
full      a rank can write no more to its disk (a limit on the size of files), until it is restarted
asked     a rank gets SIGTERM: all ranks save their state, and exit with 75

About half of the jobs save in the background. ddp-launch restarts the job; if ddp-launch itself was killed, or the job
has exited with 75, the same command is started again. The final weights must be those of the undisturbed run, bit by
bit, and so must every random number drawn in a step that counts; no sample may be lost or come twice.

Then the number of ranks changes: two ranks are killed or asked to stop, then one rank is, then four ranks end the job.
No sample may be lost or come twice, and the loss of every step must be that of the undisturbed run, up to rounding in
float64.

--elastic is another test: jobs that lose ranks, agents and hosts, and become more and fewer (`chaos_elastic.py`).

A job that hangs is killed after a minute; that, and processes that a job leaves behind, are failures. Needs Linux, and
takes a few seconds per kill.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import chaos_elastic, harness
from benchmarks.chaos_jobs import Case, Ended, run, write_digits
from benchmarks.chaos_worker import EVERY, SAMPLES, Strike
from benchmarks.jobs import repeated, that_count

KINDS = ("save", "rank", "launcher", "load", "all", "stop", "full", "asked", "memory")
RESTARTS = 5  # of the launcher
STARTS = 4  # of the same command
MOVE = "2 -> 1 -> 4"
ROUNDING = 1e-9  # of a loss
Note = dict[str, Any]


class Undisturbed(NamedTuple):
    """The run that all others must equal.

    seconds: that it took; saving: what each rank did to files, counted
    sha256: of its weights; steps: notes of all ranks by step
    """

    seconds: float
    saving: list[int]
    sha256: str
    steps: Mapping[int, list[Note]]


# -- what strikes a job


def cases(count: int, kinds: Sequence[str], undisturbed: Undisturbed, chance: random.Random) -> list[Case]:
    """Strikes for so many jobs, each kind in turn."""
    return [_case(kinds[number % len(kinds)], undisturbed, chance) for number in range(count)]


def _case(kind: str, undisturbed: Undisturbed, chance: random.Random) -> Case:
    rank = chance.randrange(2)
    case = Case(kind, (2,) * STARTS, RESTARTS, background=chance.random() < 0.5, rank=rank)
    # Half of them at the event itself, half within what follows it: in the middle of a write, say.
    delay = chance.choice((0.0, chance.uniform(1e-5, 5e-3)))
    if kind == "save":
        return case._replace(strikes=(Strike(0, rank, "save", chance.randrange(undisturbed.saving[rank]), delay),))
    if kind == "full":
        return case._replace(strikes=(Strike(0, rank, "full", chance.randrange(20)),))
    if kind == "load":
        first = Strike(0, chance.randrange(2), "step", EVERY + chance.randrange(10))
        second = Strike(1, rank, "load", chance.randrange(9), delay)
        return case._replace(strikes=(first, second), memory="never")
    if kind == "memory":
        return case._replace(strikes=(Strike(0, rank, "step", 2 + chance.randrange(15)),), memory="1")
    return case._replace(moment=chance.uniform(0.2, 0.95) * undisturbed.seconds)


def move(chance: random.Random) -> Case:
    """A job on two ranks, then on one, then on four: strikes end the first two."""
    strikes = []
    for number, ranks in enumerate((2, 1)):
        during = chance.choice(("step", "save", "asked"))
        event = chance.randrange(4, 25) if during == "save" else chance.randrange(1, 7)
        strikes.append(Strike(100 * number, 0 if during == "save" else chance.randrange(ranks), during, event))
    return Case(MOVE, (2, 1, 4), strikes=tuple(strikes))


# -- what must come of it


def recovery(notes: Sequence[Note]) -> float | None:
    """Seconds from the first strike of a rank at itself to the end of the next step of all ranks; None: there is none.

    >>> recovery([{"struck": 2.0, "start": 0}, *({"step": 7, "start": 1, "time": time} for time in (2.75, 2.5))])
    0.75
    """
    struck = min(((note["struck"], note["start"]) for note in notes if "struck" in note), default=None)
    later = [note for note in notes if struck and "step" in note and note["start"] > struck[1]]
    if struck is None or not later:
        return None
    first = min(note["step"] for note in later)
    return float(max(note["time"] for note in later if note["step"] == first) - struck[0])


def _samples(notes: list[Note]) -> list[int]:
    return sorted(sample for note in notes for sample in note["ids"])


def samples_wrong(steps: Mapping[int, list[Note]], undisturbed: Mapping[int, list[Note]]) -> str:
    """Which samples were lost, or read twice, or elsewhere than in the undisturbed run; "" if none."""
    if sorted(steps) != sorted(undisturbed):
        return f"steps {sorted(steps)}, expected {sorted(undisturbed)}"
    epochs: dict[int, Counter[int]] = {}
    for step, notes in sorted(steps.items()):
        if len(notes) != notes[0]["size"]:
            return f"step {step} was noted by {len(notes)} of {notes[0]['size']} ranks"
        ids = _samples(notes)
        expected = _samples(undisturbed[step])
        if ids != expected:
            return f"step {step} had samples {ids}, expected {expected}"
        epochs.setdefault(notes[0]["epoch"], Counter()).update(ids)
    for epoch, seen in epochs.items():
        if seen != Counter(range(SAMPLES)):
            return f"epoch {epoch} lost {sorted({*range(SAMPLES)} - {*seen})}, and had others twice"
    return ""


def loss_difference(steps: Mapping[int, list[Note]], undisturbed: Mapping[int, list[Note]]) -> float:
    """By how much the loss of a step differs at most, relatively."""
    return max(
        abs(sum(note["loss"] for note in notes) / sum(note["loss"] for note in undisturbed[step]) - 1)
        for step, notes in steps.items()
    )


def evaluate(ended: Ended, undisturbed: Undisturbed, exactly: bool) -> tuple[str, int, float]:
    """What is wrong with a job that has come to its end, the steps that it made again, and how far its losses are off.

    exactly: it ran on as many ranks, so that all bits must be the same
    """
    steps = that_count(ended.notes)
    again = repeated(ended.notes)
    if wrong := samples_wrong(steps, undisturbed.steps):
        return wrong, again, float("nan")
    difference = loss_difference(steps, undisturbed.steps)
    digests = {result["sha256"] for result in ended.results}
    if exactly and digests != {undisturbed.sha256}:
        return f"other weights: {sorted(digests)}, expected {undisturbed.sha256}", again, difference
    for step, notes in steps.items() if exactly else ():
        if sorted(note["draws"] for note in notes) != sorted(note["draws"] for note in undisturbed.steps[step]):
            return f"step {step} drew other random numbers", again, difference
    if len(digests) > 1:
        return f"the ranks' weights differ: {sorted(digests)}", again, difference
    return "" if difference <= ROUNDING else f"a loss differs by {difference:.1e}", again, difference


# -- the test


def undisturbed(folder: Path) -> Undisturbed:
    """Raises: SystemExit if even that goes wrong."""
    ended = run(folder, Case("undisturbed", (2,)))
    steps = that_count(ended.notes)
    if wrong := ended.wrong or samples_wrong(steps, steps):
        raise SystemExit(f"the undisturbed run: {wrong}\n{ended.output}")
    saving = [result["events"]["save"] for result in ended.results]
    return Undisturbed(ended.seconds, saving, ended.results[0]["sha256"], steps)


def strike(folder: Path, case: Case, reference: Undisturbed) -> tuple[dict[str, Any], str]:
    """Strikes a job; its row of the results, and its output. It may have come to its end before."""
    ended = run(folder, case)
    wrong = ended.wrong
    again = 0
    difference = 0.0
    if not wrong:
        wrong, again, difference = evaluate(ended, reference, case.kind != MOVE)
    if not wrong and case.kind == "memory" and again > 1:
        wrong = f"{again} steps were made again"
    struck = ended.struck and (case.kind != MOVE or ended.starts == len(case.sizes))
    row = {"case": str(case), "wrong": wrong, "struck": struck, "restarts": ended.restarts, "starts": ended.starts}
    return {**row, "repeated": again, "loss": difference, "recovery": recovery(ended.notes)}, ended.output


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A row for each kind: restarts by the launcher, starts of the command, repeated steps."""
    titles = ("struck", "restarts", "starts", "repeated", "loss off by", "recovery, s", "same")
    rows = [harness.row("job", titles, 14)]
    for kind, rows_of_kind in results.items():
        if rows_of_kind:
            sums = (sum(one[key] for one in rows_of_kind) for key in ("struck", "restarts", "starts", "repeated"))
            difference = max(one["loss"] for one in rows_of_kind)
            same = sum(not one["wrong"] for one in rows_of_kind)
            seconds = [one["recovery"] for one in rows_of_kind if one["recovery"] is not None]
            median = f"{statistics.median(seconds):.2f}" if seconds else "-"
            cells = (*sums, f"{difference:.1e}", median, f"{same}/{len(rows_of_kind)}")
            rows.append(harness.row(kind, cells, 14))
    return "\n".join(rows)


def elastic(count: int, kills: int, seed: int, path: Path | None) -> int:
    """Runs the test of `chaos_elastic`, and prints and writes what came of it; the exit code. kills: of torchrun's"""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        digits = Path(name, "digits.npz")
        write_digits(digits, chaos_elastic.SAMPLES)
        recoveries, wrong, again = chaos_elastic.run(Path(name), digits, count, chance)
        torch_recoveries, failed = chaos_elastic.torchruns(Path(name), digits, kills, chance)
        recoveries += torch_recoveries
    print(f"\n{chaos_elastic.table(recoveries)}\n{wrong or 'the same weights, bit by bit'}\nseed {seed}")
    seconds = chaos_elastic.seconds_of(recoveries)
    goals = [harness.at_most("one of two ranks is killed: s", 1.0, chaos_elastic.one_of_two(recoveries))]
    events = [str(recovery.event) for recovery in recoveries]
    results = {"seconds": seconds, "repeated": again, "torchruns that failed": failed, "events": events}
    harness.write(path, "chaos_train --elastic", goals, seed=seed, wrong=wrong, **results)
    return int(bool(wrong))


def main() -> None:
    parser = harness.parser(__doc__, only=KINDS)
    parser.add_argument("--kills", type=int, default=100, help="number of jobs to strike (default: 100)")
    parser.add_argument(
        "--moves", type=int, default=20, help="number of jobs to move from 2 to 1 to 4 ranks (default: 20)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elastic", action="store_true", help="test jobs that lose and gain ranks and hosts instead")
    parser.add_argument("--events", type=int, default=100, help="with --elastic: number of events (default: 100)")
    parser.add_argument("--torchruns", type=int, default=5, help="with --elastic: kills of torchrun ranks (default: 5)")
    args = parser.parse_args()
    if args.elastic:
        sys.exit(elastic(args.events, args.torchruns, args.seed, args.json))
    chance = random.Random(args.seed)
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in (*args.only, MOVE)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_digits(folder / "digits.npz", SAMPLES)
        reference = undisturbed(folder)
        planned = [*cases(args.kills, args.only, reference, chance), *(move(chance) for _ in range(args.moves))]
        for number, case in enumerate(planned, 1):
            row, output = strike(folder, case, reference)
            results[case.kind].append(row)
            print(f"{number}/{len(planned)} {case.kind}: {row['wrong'] or 'same'}", flush=True)
            if row["wrong"]:
                print(f"{row['case']}\n{output}", flush=True)
    print(f"\n{table(results)}\nseed {args.seed}")
    harness.write(args.json, "chaos_train", seed=args.seed, sha256=reference.sha256, results=results)
    sys.exit(any(row["wrong"] for rows in results.values() for row in rows))


if __name__ == "__main__":
    main()
