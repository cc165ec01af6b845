"""What a run's figures say, in words: did it learn, did allocation help, what held it up, was it sound.

A verdict is never stronger than its interval: what cannot be told is called that.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from gvm_stream.terminal import count, share

Z95 = 1.96
TRAINER_BOUND, GENERATION_BOUND = 0.15, 0.4
"""Shares of the time that the learner waited for rollouts, below and above which the verdict is clear."""
VERIFIER_BOUND = 0.2
"""Share of the producers' time in which all they had waited for verdicts, from which the verifier is the bottleneck."""
LEAST_ESS = 0.5
"""Effective sample size, as a share, below which half of the rollouts are wasted by being off-policy."""

Tone = Literal["good", "bad", "unclear"]


class Verdict(NamedTuple):
    question: str
    answer: str
    tone: Tone
    text: str
    advice: str = ""


def verdicts(report: dict[str, Any]) -> list[Verdict]:
    return [learned(report), allocation_helps(report), bottleneck(report), sound(report)]


def learned(report: dict[str, Any]) -> Verdict:
    """From the first and the last evaluation; their errors are taken as independent, which is on the careful side as
    both are on the same prompts."""
    question = "Did it learn?"
    rows = [row for row in report["history"]["evaluations"] if row["accuracy"] is not None]
    if len(rows) < 2:
        return Verdict(
            question, "Cannot be told", "unclear", "There are no two evaluations to compare.",
            "One is made before training, one after, and one every eval.every_steps batches.",
        )  # fmt: skip
    first, last = rows[0], rows[-1]
    change = last["accuracy"] - first["accuracy"]
    half = Z95 * math.hypot(first["standard_error"], last["standard_error"])
    text = (
        f"Held-out accuracy went from {share(first['accuracy'])} to {share(last['accuracy'])} in {last['step']} "
        f"batches: {change:+.3f} (95 % interval {change - half:+.3f} to {change + half:+.3f}, on these prompts)."
    )
    if change > half:
        return Verdict(question, "Yes", "good", text)
    if change < -half:
        return Verdict(
            question, "It got worse", "bad", text, "Look at loss, gradient norm and mismatch; try a lower learner.lr."
        )
    advice = "More held-out samples (eval.prompts, eval.samples) or more batches would tell."
    return Verdict(question, "Cannot be told", "unclear", text, advice)


def allocation_helps(report: dict[str, Any]) -> Verdict:
    question, allocation = "Does allocation help?", report["allocation"]
    gain = allocation["gain_over_uniform"]
    visits = f"{gain['allocated_visits']} allocated and {gain['uniform_visits']} shadow-uniform visits"
    if allocation["policy"] == "uniform":
        return Verdict(question, "Not in use", "unclear", "The policy is uniform: every prompt gets the same number.")
    if gain["gain"] is None:
        return Verdict(
            question, "Not measured", "unclear", f"{visits[0].upper()}{visits[1:]} are too few to compare.",
            "allocation.shadow_uniform sets the share of visits that measure it.",
        )  # fmt: skip
    low, high = gain["low"], gain["high"]
    text = (
        f"Uniform needs {gain['gain']:.2f} times the tokens of {allocation['policy']} for a gradient as exact "
        f"(95 % interval {low:.2f} to {high:.2f}, from {visits})."
    )
    if low > 1:
        return Verdict(question, "Yes", "good", text)
    if high < 1:
        return Verdict(question, "No, it costs", "bad", text, 'Use allocation.policy = "uniform" for such a run.')
    return Verdict(
        question, "Cannot be told", "unclear", f"{text} It includes 1, no gain.",
        "The interval narrows with the number of visits, and with a larger allocation.shadow_uniform.",
    )  # fmt: skip


def bottleneck(report: dict[str, Any]) -> Verdict:
    question, waited = "What held it up?", report["learner_wait_share"]
    verifying = report["producer_shares"]["verifier"]
    if waited is None or not report["history"]["steps"]:
        return Verdict(question, "Cannot be told", "unclear", "No batch was trained.")
    text = f"The learner waited for rollouts in {waited:.0%} of the time, evaluations included."
    if verifying is not None and verifying > VERIFIER_BOUND:
        return Verdict(
            question, "Verification", "bad",
            f"{text} In {verifying:.0%} of theirs all that producers had in hand waited for a verdict.",
            "Raise verifier.workers, or lower verifier.timeout_s if a few responses take long.",
        )  # fmt: skip
    if waited > GENERATION_BOUND:
        return Verdict(
            question, "Generation", "unclear", text,
            "More or faster producers (run.producers, producer.slots) shorten the run; so does what saves rollouts.",
        )  # fmt: skip
    if waited < TRAINER_BOUND:
        return Verdict(
            question, "The trainer", "unclear",
            f"{text} Rollouts that allocation saves were not what it waited for.",
            "Give the learner more devices or larger micro-batches; fewer producers would do.",
        )  # fmt: skip
    return Verdict(question, "Nothing alone", "good", f"{text} Generation and training are about in balance.")


def sound(report: dict[str, Any]) -> Verdict:
    question, steps = "Was it sound?", report["history"]["steps"]
    problems, advice = [], ""
    if report["outcome"] == "failed":
        problems.append(f"The run failed: {report['reason']}.")
    if not report["ledger_conserved"] or report["engine_tokens_unaccounted"]:
        problems.append(
            f"The account does not add up ({report['engine_tokens_unaccounted']} tokens of the engines are missing)."
        )
    skipped = sum(not row["trained"] for row in steps)
    if skipped:
        problems.append(f"{skipped} of {len(steps)} batches were skipped.")
    sizes = [ess for row in steps if (ess := row["stats"]["effective_sample_size"]) is not None]
    if sizes and min(sizes) < LEAST_ESS:
        problems.append(f"The effective sample size fell to {min(sizes):.2f}: the rollouts were too far off-policy.")
        advice = "Lower allocation.max_lag or learner.lr."
    if problems:
        return Verdict(question, "Not quite", "bad", " ".join(problems), advice)
    text = f"All {count(report['tokens']['generated'])} tokens are accounted for."
    if sizes:
        text += f" The effective sample size was {min(sizes):.2f} of the rollouts or more."
    return Verdict(question, "Yes", "good", text)
