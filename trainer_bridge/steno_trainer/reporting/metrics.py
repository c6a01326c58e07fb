"""What a training run measures: every number's name, once, with how to read it. Trackers and docs/metrics.md are made from this.

Names are those of TensorBoard and Weights & Biases (`group/name`); Prometheus has them as `steno_train_group_name`. What was not
measured in a step is absent from its values, never 0. Of families (`trial/tests_passed`) the last part is the user's own word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Values = Mapping[str, float]


class Measure(NamedTuple):
    name: str
    help: str

    @property
    def prometheus(self) -> str:
        return "steno_train_" + self.name.replace("/", "_")


class Family(NamedTuple):
    """Numbers that have names of the user's own: `prefix/NAME`; in Prometheus one gauge with a label."""

    prefix: str
    label: str
    help: str

    @property
    def prometheus(self) -> str:
        return "steno_train_" + self.prefix.replace("/", "_")


FAMILIES: tuple[Family, ...] = (
    Family("trial", "metric", "Mean of a metric of the step's trials, over those that have it"),
    Family("reward_by", "value", "Mean reward of the trials whose tasks have this value of `report_by`"),
    Family(
        "zero_variance_by", "value", "Fraction of the groups with this value of `report_by` whose rewards are all equal"
    ),
    Family("eval/trial", "metric", "Mean of a metric of the evaluation's trials, over those that have it"),
    Family("eval/reward_by", "value", "Mean reward of the evaluation's tasks that have this value of `report_by`"),
)

MEASURES: tuple[Measure, ...] = tuple(
    Measure(*row)
    for row in (
        (
            "reward/mean",
            "Mean reward of the trials of the step's groups, those without variance included: the curve to watch",
        ),
        ("reward/std", "Standard deviation of the rewards of the step's trials"),
        ("reward/min", "Smallest reward of the step"),
        ("reward/max", "Largest reward of the step"),
        (
            "reward/zero_variance_fraction",
            "Fraction of the step's groups whose rewards are all equal; near 1: tasks are too easy or too hard",
        ),
        ("advantage/mean", "Mean advantage over trained samples; not 0 where trials forked into unequally many"),
        (
            "advantage/abs_mean",
            "Mean absolute advantage: the size of the step's learning signal; a teacher's part is not in it",
        ),
        ("batch/groups", "Groups that the step took"),
        (
            "batch/groups_trained",
            "Groups with samples that were trained: their rewards differ, or a teacher scores their tokens",
        ),
        ("batch/trials", "Trials with a reward"),
        ("batch/samples", "Samples trained: leaves of conversations"),
        ("batch/tokens", "Tokens of the trained samples, prompts included"),
        ("batch/trained_tokens", "Tokens that were trained"),
        ("length/sample_mean", "Mean tokens of a sample"),
        ("length/sample_max", "Tokens of the longest sample"),
        ("length/trained_mean", "Mean trained tokens of a sample"),
        ("length/turns_mean", "Mean turns of a trial"),
        (
            "length/truncated_fraction",
            "Fraction of the step's completions that were cut, by their length limit or otherwise; high: limits are tight",
        ),
        ("overlong/masked_fraction", "Fraction of the step's sampled tokens that were left out as overlong"),
        ("overlong/penalty", "Mean length penalty subtracted from the rewards, over trials"),
        ("loss", "The objective; its absolute size means little, a sudden growth is a fault"),
        ("policy/ratio", "Current against proximal probabilities; 1 with one optimizer step per batch"),
        ("policy/ratio_max", "Largest ratio of current to proximal probability"),
        ("policy/clip_high_fraction", "Fraction of tokens whose increase was clipped"),
        ("policy/clip_low_fraction", "Fraction of tokens whose decrease was clipped"),
        (
            "policy/sequence_clip_high_fraction",
            "Fraction of completions or samples whose increase was clipped, if their tokens share one ratio",
        ),
        (
            "policy/sequence_clip_low_fraction",
            "Fraction of completions or samples whose decrease was clipped, if their tokens share one ratio",
        ),
        ("policy/dual_clip_fraction", "Fraction of tokens whose decrease dual_clip stopped at its floor"),
        ("policy/nll", "What sft makes small: mean negative log-probability of the recorded tokens, in nats"),
        ("policy/kl", "How far the step has moved from where it started, in nats"),
        ("policy/entropy", "Entropy of the policy at trained tokens, in nats; a fall towards 0 is collapse"),
        ("optimizer/grad_norm", "Norm of the gradient before clipping"),
        ("optimizer/learning_rate", "Learning rate of the step"),
        ("optimizer/skipped_passes", "Passes that changed no weight: their loss or gradient was no finite number"),
        (
            "reference/kl",
            "k3 KL to the reference, in nats; a few tokens that the reference likes far more can outweigh all others",
        ),
        (
            "reference/log_ratio",
            "Mean log(policy / reference) of what was sampled, in nats: what distillation makes small",
        ),
        ("mismatch/kl", "KL of sampler and trainer, in nats: kernels and staleness together"),
        ("mismatch/kl_k3", "k3 estimate of mismatch/kl: less noise, never below 0"),
        ("mismatch/ratio", "Mean importance weight against the recorded probabilities; 1 if nothing is wrong"),
        ("mismatch/ratio_max", "Largest importance weight against the recorded probabilities"),
        ("mismatch/logprob_difference", "Mean absolute difference to the recorded log-probabilities, in nats"),
        ("mismatch/truncated_fraction", "Fraction of tokens whose importance weight was cut"),
        ("mismatch/masked_fraction", "Fraction of tokens that were masked for their ratio"),
        ("staleness/mean", "Steps between a sample's oldest version and the weights it trained, mean over samples"),
        (
            "staleness/max",
            "Largest staleness of a trained sample; over the bound only while lost steps are taken again after a crash",
        ),
        ("staleness/in_flight", "Part of staleness/mean that grew while the trial ran"),
        ("staleness/queue", "Part of staleness/mean that grew while the finished group waited"),
        ("time/wait_s", "Seconds that the trainer waited for groups; high: rollouts are too slow"),
        ("time/score_s", "Seconds of the passes without gradients: proximal and reference log-probabilities"),
        ("time/train_s", "Seconds of forward, backward and optimizer"),
        ("time/checkpoint_s", "Seconds of the checkpoint, where one was written"),
        ("time/gather_s", "Seconds that training paused to gather its weights"),
        (
            "time/push_s",
            "Seconds of the push, until every worker served the weights or was named as failed; overlaps the next step",
        ),
        ("time/pause_s", "Longest pause of a worker's generations for the update"),
        (
            "throughput/tokens_per_s",
            "Tokens of the samples of all passes, prompts included, per second of time/train_s",
        ),
        ("throughput/mfu", "Model FLOPs utilisation of the step, where the GPU's peak is known"),
        ("pack/balance", "Work over the time of the slowest rank at each micro-batch; 1 if no rank ever waits"),
        ("pack/fill", "Tokens computed, as a fraction of the budget of all micro-batches, empty ones included"),
        ("pack/micro_batches", "Micro-batches of each rank"),
        (
            "compute/unique_tokens",
            "Tokens of the samples of all passes; in each, a beginning that several share counts once",
        ),
        ("compute/repeated_tokens", "Tokens of shared beginnings that were computed again, in another micro-batch"),
        ("memory/peak_bytes", "Largest device memory of a rank in the step; resident memory on a CPU"),
        ("queue/waiting_groups", "Groups leased and read that no step has taken yet"),
        (
            "queue/in_hand_groups",
            "Groups of the run that are running, ready or leased, until a worker serves weights that were trained on them",
        ),
        (
            "report/unposted",
            "Steps that the proxy did not take to show them, since the trainer started; training goes on",
        ),
        ("eval/reward", "Mean reward of the evaluation, with its own sampling"),
        ("eval/reward_std", "Standard deviation between the tasks' mean rewards"),
        ("eval/trials", "Trials evaluated"),
        ("eval/unscored", "Trials of the evaluation that ended without a reward; they are in no mean"),
        ("eval/completion_tokens", "Tokens sampled for the evaluation"),
    )
)


def family_of(name: str) -> tuple[Family, str]:
    """The family of a number that is no measure, and the user's word for it. Raises: KeyError: it is of none."""
    for family in FAMILIES:
        prefix = family.prefix + "/"
        if name.startswith(prefix):
            return family, name.removeprefix(prefix)
    raise KeyError(name)
